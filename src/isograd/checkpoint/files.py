"""Tensors in a safetensors file, written as a stream and read again.

One tensor at a time is written from memory that already exists, so that neither a checkpoint nor an export ever needs
a second copy of what it writes. Every file is read again after it was flushed: a disk may say that a write succeeded
of which nothing landed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.errors import CheckpointError
from isograd.io.atomic import flush
from isograd.io.no_follow import open_to_write
from isograd.io.store import Place
from isograd.io.untrusted import open_to_read

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH = {name: dtype for dtype, name in DTYPES.items()}
CHUNK = 1 << 20  # bytes that are hashed and written at a time
MOST = 1 << 28  # bytes that are flushed at a time; on a slow disk fewer


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file, before it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * TORCH[self.dtype].itemsize


def entry(name: str, tensor: Tensor, shape: Sequence[int] | None = None) -> TensorEntry:
    """The entry of a tensor, under another shape if one is given; refuses dtypes that safetensors does not have."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            "IG941",
            f"{name!r} has a dtype that safetensors does not know",
            seen=str(tensor.dtype),
            expected=", ".join(DTYPES.values()),
        )
    return TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape if shape is None else shape))


def in_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The order inside a file: wide elements first, so that each tensor begins at a multiple of its element."""
    return sorted(entries, key=lambda e: (-TORCH[e.dtype].itemsize, e.name))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in pieces, so that its reader or writer can give a sign of life after each."""
    content = raw_bytes(tensor.contiguous())
    return (content[at : at + CHUNK] for at in range(0, len(content), CHUNK))


def sha256(tensor: Tensor, moved: Callable[[], None] = lambda: None) -> str:
    """The hash of a tensor's bytes; `moved` is called after each chunk of them."""
    found = hashlib.sha256()
    for chunk in _chunks(tensor):
        found.update(chunk)
        moved()
    return found.hexdigest()


def write_tensors(
    path: Place,
    entries: Sequence[TensorEntry],
    tensors: Iterable[Tensor],
    note: dict[str, str],
    moved: Callable[[], None] = lambda: None,
    hashes: dict[str, str] | None = None,
) -> int:
    """A safetensors file; `tensors` come in the order of `entries` (use in_order). Returns its size in bytes.

    `moved` is called after each chunk that is written, flushed to the disk or read again. `hashes` receives the SHA-256
    of each tensor's bytes: they are hashed as they are written, so that the file grows all the time. What is read again
    must have the size and the hashes of what was written (IG945).
    """
    hashes = {} if hashes is None else hashes
    header: dict[str, Any] = {"__metadata__": note}
    at = 0
    for one in entries:
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + one.size]}
        at += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    with open_to_write(path, "wb") as file:
        file.write(text)
        flushes = _Flushes(file, moved)
        for one, tensor in zip(entries, tensors, strict=True):
            found = hashlib.sha256()
            for chunk in _chunks(tensor):
                found.update(chunk)
                file.write(chunk)
                moved()
                flushes.written()
            hashes[one.name] = found.hexdigest()
        flush(file)
    _read_again(path, text, entries, hashes, moved)
    return len(text) + at


def _read_again(
    path: Place, head: bytes, entries: Sequence[TensorEntry], hashes: dict[str, str], moved: Callable[[], None]
) -> None:
    """Raise IG945 unless a file holds this header, and tensors with these hashes, and nothing else."""
    expected = len(head) + sum(one.size for one in entries)
    with open_to_read(path) as file:
        size, _ = file.seek(0, os.SEEK_END), file.seek(0)
        if size != expected:
            raise CheckpointError("IG945", seen=f"{size:,} bytes instead of {expected:,}", path=path)
        if isinstance(path, Path) and hasattr(
            os, "posix_fadvise"
        ):  # from the disk, as far as the system allows, and not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file.read(len(head)) != head:
            raise CheckpointError("IG945", seen="another header", path=path)
        buffer, said = memoryview(bytearray(CHUNK)), time.monotonic()
        for one in entries:
            found, left = hashlib.sha256(), one.size
            while left and (count := file.readinto(buffer[: min(left, CHUNK)])):
                found.update(buffer[:count])
                left -= count
                moved()
                if (
                    isinstance(path, Path) and time.monotonic() - said > 1.0
                ):  # a sign of life for those that watch the folder
                    os.utime(str(path))
                    said = time.monotonic()
            if left or found.hexdigest() != hashes[one.name]:
                raise CheckpointError("IG945", seen=f"other bytes of {one.name!r}", path=path)


class _Flushes:
    """Flushes a file while it is written, so often that one flush takes about a second: a writer that is alive gives a
    sign of life every few seconds, on a disk of any speed."""

    def __init__(self, file: Any, moved: Callable[[], None]) -> None:
        self._file, self._moved = file, moved
        self._done, self._every = 0, CHUNK  # bytes

    def written(self) -> None:
        """A chunk was written: flush when it is time."""
        if self._file.tell() - self._done < self._every:
            return
        began = time.monotonic()
        flush(self._file)
        self._moved()
        took = time.monotonic() - began
        self._done = self._file.tell()
        if took < 0.5:
            self._every = min(MOST, 2 * self._every)
        elif took > 1.0:
            self._every = max(CHUNK, self._every // 2)
