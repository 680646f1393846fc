"""Folders that torch.distributed.checkpoint wrote (DCP), as torchtitan's and Megatron-Core's: read by tensors.

A folder is a file `.metadata`, a pickle, and files of pieces, each a zip that holds a pickle again. Both are read as
data (opcodes.py). Every number is checked before it is used: pieces lie inside their tensor, do not overlap and fill
it; a piece lies inside its file, which is no link; its bytes are as many as its shape says.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.errors import CheckpointError
from isograd.integrations.checkpoints.opcodes import PickledName, PickledObject, RefusedOpcode, brief, value_in
from isograd.io.untrusted import FileError, open_to_read, read_bytes

# What zipfile raises for damaged files; a password that is asked for is a RuntimeError.
OF_ZIPS = (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError, OverflowError, struct.error)
UNREADABLE = (RefusedOpcode, FileError, OSError, *OF_ZIPS)
DESCRIPTION = ".metadata"
LARGEST = 256 << 20  # bytes of a description
MOST_PIECES = 4_000_000
MOST_ELEMENTS = 1 << 48  # of a tensor
META, SHARD = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16), ("BFloat16", torch.bfloat16),
        ("Long", torch.int64), ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8),
        ("Byte", torch.uint8), ("Bool", torch.bool),
    )
}  # fmt: skip
KNOWN = {
    *(f"{META}.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    f"{SHARD}.TensorProperties", f"{SHARD}.MEM_FORMAT_ENCODING", STORED, "torch.Size",
    "torch.serialization._get_layout",
    f"{MEGATRON}.MCoreMetadata", f"{MEGATRON}.MCoreSavePlan", "pathlib.PosixPath", "pathlib._local.PosixPath",
    "collections.OrderedDict", *DTYPES,
}  # fmt: skip
PIECE = {"torch._utils._rebuild_tensor_v2", "collections.OrderedDict", *STORAGES}


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor, and where its bytes lie."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[DcpChunk, ...]


class DcpFolder:
    """A folder that torch.distributed.checkpoint wrote, opened for reading."""

    def __init__(self, place: str | Path) -> None:
        self.place = Path(place)
        with refused(lambda seen: CheckpointError(
            "IG948", f"{self.place / DESCRIPTION} describes no checkpoint of torch.distributed.checkpoint", seen=seen,
            expected="the description that torch.distributed.checkpoint.save writes; nothing in it is executed",
            fix="the folder with the files *.distcp and .metadata; copy it again if it should be one",
        )):  # fmt: skip
            self.tensors = _tensors(value_in(read_bytes(self.place / DESCRIPTION, LARGEST), KNOWN))
        self.shapes = {name: held.shape for name, held in self.tensors.items()}

    def full(self, name: str) -> Tensor:
        """A tensor, put together."""
        held = self.tensors[name]
        if held.dtype not in STORAGES.values():
            raise CheckpointError(
                "IG941", f"{self.place}: {name!r} has a dtype that is not read", seen=str(held.dtype),
                expected=", ".join(map(str, STORAGES.values())),
            )  # fmt: skip
        for piece in held.pieces:  # before memory is taken, as much as the description asks for
            with _checked(name, held, piece), open_to_read(self.place / piece.file) as file:
                there = max(0, min(os.fstat(file.fileno()).st_size - piece.at, piece.length))
                if there < piece.length:
                    raise RefusedOpcode(f"{there} of {piece.length} bytes")
                if math.prod(piece.sizes) * held.dtype.itemsize > piece.length:
                    raise RefusedOpcode(f"{piece.length} bytes, which are too few")
        found = torch.empty(held.shape, dtype=held.dtype)
        for piece in held.pieces:
            box = tuple(slice(a, a + size) for a, size in zip(piece.start, piece.sizes, strict=True))
            with _checked(name, held, piece), open_to_read(self.place / piece.file) as file:
                file.seek(piece.at)
                found[box] = _tensor(file.read(piece.length), held.dtype, piece.sizes)
        return found


@contextmanager
def refused(error_of: Callable[[str], CheckpointError], file: str = "") -> Iterator[None]:
    """What is wrong with files that are read in here, as one error of what was `seen`. file: named before that."""
    try:
        yield
    except UNREADABLE as error:
        raise error_of(file + (error.brief if isinstance(error, FileError) else str(error))[:500]) from error


def _checked(name: str, held: DcpTensor, piece: DcpChunk) -> AbstractContextManager[None]:
    return refused(lambda seen: CheckpointError(
        "IG949", f"a piece of {name!r} cannot be read", seen=seen,
        expected=f"{held.dtype} {list(piece.sizes)} in {piece.length} bytes from byte {piece.at} on",
        fix="the file is damaged, missing or compressed: copy it again, or save without compression",
    ), f"{piece.file}: ")  # fmt: skip


@dataclass(frozen=True)
class _Flat:
    """Elements of a file that lie beside each other."""

    path: Path
    at: int  # first byte
    dtype: torch.dtype
    count: int

    def cut(self, start: int, stop: int) -> _Flat:
        """Some of them."""
        return _Flat(self.path, self.at + start * self.dtype.itemsize, self.dtype, stop - start)

    def read(self) -> Tensor:
        """The elements."""
        with open_to_read(self.path) as file:
            file.seek(self.at)
            raw = bytearray(file.read(self.count * self.dtype.itemsize))
        if len(raw) != self.count * self.dtype.itemsize:
            raise CheckpointError(
                "IG949", f"a part of {self.path.name} cannot be read", seen=f"{len(raw):,} bytes",
                expected=f"{self.count * self.dtype.itemsize:,} from byte {self.at:,} on", fix="copy the file again",
            )  # fmt: skip
        return torch.frombuffer(raw, dtype=self.dtype) if raw else torch.empty(0, dtype=self.dtype)


class _Saved:
    """What torch.save wrote into a file: the value, and where its tensors lie."""

    def __init__(self, path: Path, inside: bytes | None = None, known: Collection[str] | None = None) -> None:
        """inside: of another file, all the bytes; known: see value_in."""
        self.path = path
        with open_to_read(path) if inside is None else io.BytesIO(inside) as file, zipfile.ZipFile(file) as archive:
            size = file.seek(0, os.SEEK_END)
            self.inside: dict[str, tuple[int, int]] = {}
            for info in archive.infolist():
                file.seek(info.header_offset + 26)
                start = info.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))
                if info.compress_type != zipfile.ZIP_STORED or start + info.file_size > size:
                    raise RefusedOpcode(f"{path.name}: a member that is packed, or cut short")
                self.inside[info.filename.partition("/")[2]] = start, info.file_size
            start, length = self.inside.get("data.pkl", (0, LARGEST + 1))
            if length > LARGEST:
                raise RefusedOpcode(f"{path.name}: no data.pkl of at most {LARGEST:,} bytes")
            if "byteorder" in self.inside:
                file.seek(self.inside["byteorder"][0])
                if file.read(self.inside["byteorder"][1]) != b"little":
                    raise RefusedOpcode(f"{path.name}: numbers of the other byte order")
            file.seek(start)
            self.value = value_in(file.read(length), known)

    def flat(self, value: Any) -> _Flat:
        """A tensor whose elements lie one after another."""
        key, dtype, at, shape, strides = _rebuilt(value)
        start, length = self.inside.get(f"data/{key}", (0, 0))
        count, dense = math.prod(shape), 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size > 1 and stride != dense:
                raise RefusedOpcode(f"{self.path.name}: a tensor of the shape {shape} that does not lie in one piece")
            dense *= size
        if (at + count) * dtype.itemsize > length:
            raise RefusedOpcode(f"{self.path.name}: a tensor of {count:,} elements in {length:,} bytes")
        return _Flat(self.path, start + at * dtype.itemsize, dtype, count)


def _tensors(described: Any) -> dict[str, DcpTensor]:
    whole = _made(described, f"{META}.Metadata", f"{MEGATRON}.MCoreMetadata")
    entries, places = whole.get("state_dict_metadata"), whole.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise RefusedOpcode("no tables of tensors and of places")
    where: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, value in places.items():
        index = _made(key, f"{META}.MetadataIndex")
        if index.get("offset") is not None:
            where[_text(index.get("fqn")), _numbers(index["offset"])] = _place(value)
    found, count = {}, 0
    for name, value in entries.items():
        if isinstance(value, PickledObject) and value.name == f"{META}.TensorStorageMetadata":
            held = _dcp_tensor(_text(name), _made(value, value.name), where)
            count += len(held.pieces)
            if count > MOST_PIECES:
                raise RefusedOpcode(f"more than {MOST_PIECES:,} pieces")
            found[name] = held
    return found


def _dcp_tensor(
    name: str, value: dict[Any, Any], where: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> DcpTensor:
    shape, chunks, said = _numbers(value.get("size")), value.get("chunks"), repr(name[:80])
    if not isinstance(chunks, list) or len(chunks) > MOST_PIECES or math.prod(shape) > MOST_ELEMENTS:
        raise RefusedOpcode(f"{said}: no list of pieces, or more than {MOST_ELEMENTS:,} elements")
    pieces = []
    for chunk in chunks:
        part = _made(chunk, f"{META}.ChunkStorageMetadata")
        start, sizes = _numbers(part.get("offsets")), _numbers(part.get("sizes"))
        inside = len(start) == len(sizes) == len(shape) and all(
            a + size <= most for a, size, most in zip(start, sizes, shape, strict=True)
        )
        if not inside or (name, start) not in where:
            raise RefusedOpcode(f"{said}: a piece {start} {sizes} of {shape} that lies outside, or nowhere")
        pieces.append(DcpChunk(start, sizes, *where[name, start]))
    pieces = [piece for piece in pieces if math.prod(piece.sizes)]
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape) or _overlap(pieces):
        raise RefusedOpcode(f"{said}: pieces that do not fill its shape {shape} once")
    return DcpTensor(shape, _dtype(value.get("properties")), tuple(pieces))


def _overlap(pieces: list[DcpChunk]) -> bool:
    """Whether any two share an element. Sorted along the dim that has most cuts, a piece is compared with those that
    begin before it ends: of a tensor that is cut along one dim, with none."""
    if len(pieces) < 2 or not pieces[0].sizes:
        return len(pieces) > 1
    start = torch.tensor([piece.start for piece in pieces])
    dim = max(range(start.shape[1]), key=lambda d: len(start[:, d].unique()))
    order = start[:, dim].argsort()
    start, stop = start[order], (start + torch.tensor([piece.sizes for piece in pieces]))[order]
    behind = torch.searchsorted(start[:, dim].contiguous(), stop[:, dim].contiguous()).tolist()
    for number, last in enumerate(behind):
        beside = slice(number + 1, last)
        if last > number + 1 and bool(((start[beside] < stop[number]) & (start[number] < stop[beside])).all(1).any()):
            return True
    return False


def _place(value: Any) -> tuple[str, int, int]:
    place = _made(value, STORED)
    file: str = _text(place.get("relative_path"))
    at: Any = place.get("offset")
    length: Any = place.get("length")
    if place.get("transform_descriptors"):
        raise RefusedOpcode("pieces that are packed (transform_descriptors)")
    if Path(file).name != file or not _is_number(at) or not _is_number(length):
        raise RefusedOpcode(f"a place that is no part of a file of this folder: {file[:80]!r}")
    return file, at, length


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, PickledObject) else None
    name = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(name, PickledName) or name.full not in DTYPES:
        raise RefusedOpcode(f"a tensor of the dtype {name.full if isinstance(name, PickledName) else 'that is none'}")
    found: torch.dtype = DTYPES[name.full]
    return found


def _made(value: Any, *names: str) -> dict[Any, Any]:
    """The fields of an object of one of these classes."""
    if not isinstance(value, PickledObject) or value.name not in names or not isinstance(value.state, dict):
        raise RefusedOpcode(f"no {names[0].rpartition('.')[2]} where one should be")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    """A torch.Size."""
    is_size = isinstance(value, PickledObject) and value.name == "torch.Size" and len(value.args) == 1
    if not is_size or not isinstance(numbers := value.args[0], tuple) or len(numbers) > 16:
        raise RefusedOpcode("no size where one should be")
    if not all(map(_is_number, numbers)):
        raise RefusedOpcode("a size that is no list of numbers")
    return numbers


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 50


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedOpcode("no name where one should be")
    return value


def _tensor(data: bytes, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """What torch.save wrote, if it is a tensor of this dtype and these sizes."""
    saved = _Saved(Path("the piece"), data, PIECE)
    key, of, at, shape, strides = _rebuilt(saved.value)
    first, length = saved.inside.get(f"data/{key}", (0, 0))
    last = at + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if of != dtype or shape != sizes or (last + 1) * dtype.itemsize > length:
        raise RefusedOpcode(f"a tensor {of} {list(shape)} in {length} bytes")
    return torch.frombuffer(bytearray(data[first : first + length]), dtype=dtype).as_strided(shape, strides, at)


def _rebuilt(value: Any) -> tuple[str, torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """(key of its bytes, dtype, first element, shape, strides)."""
    args = value.args if isinstance(value, PickledObject) and value.name == "torch._utils._rebuild_tensor_v2" else ()
    if len(args) < 4 or not isinstance(args[0], PickledObject) or args[0].name != "persistent":
        raise RefusedOpcode("a pickle that is no tensor")
    (storage,) = args[0].args
    if not isinstance(storage, tuple) or len(storage) != 5 or not isinstance(storage[1], PickledName):
        raise RefusedOpcode("a tensor without a storage")
    at, shape, strides = args[1:4]
    good = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) and _is_number(at)
    if not good or not all(map(_is_number, (*shape, *strides))) or storage[1].full not in STORAGES:
        raise RefusedOpcode("a tensor whose shape is none")
    return _text(storage[2]), STORAGES[storage[1].full], at, shape, strides


def _dict(value: Any) -> dict[Any, Any]:
    found = value.state if isinstance(value, PickledObject) and value.name == "collections.OrderedDict" else value
    if not isinstance(found, dict):
        raise RefusedOpcode(f"no table where one should be, but {brief(value)}")
    return found
