"""What a checkpoint holds, as one JSON file: which box of which tensor lies in which file, with which hash.

    step-00000100/
      manifest.json             this file
      manifest.sha256           its hash, in the format of `sha256sum --check`
      rank-00000.safetensors    what rank 0 wrote

{"format": "isograd checkpoint", "version": 2, "step": 100, "layout": "dp2 tp2 zero1", "model": {...},
 "written_by": {...}, "files": {"rank-00000.safetensors": 12345}, "numbers": {...}, "extra": {...},
 "tensors": {"model/embed.weight": {"shape": [101, 24], "dtype": "F32", "files": [0, 1],
             "boxes": [0, 51, 0, 24, 51, 101, 0, 24], "xxh3_128": ["9f3a...", "07bc..."]}}}

A tensor lies in pieces that cover it exactly: the file of each, as a number in the order of "files"; the (start, stop)
of each along each dimension, one after another; the hash of each. In columns, because there may be a million pieces.
engine/state.py says what the keys and the numbers mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import nn

from isograd.checkpoint.files import DTYPES, TORCH
from isograd.checkpoint.folder import step_of
from isograd.errors import CheckpointError
from isograd.io.atomic import write_bytes
from isograd.io.store import Place
from isograd.io.untrusted import FileError, Strict, parse_json, read_bytes, typed

FORMAT, VERSION = "isograd checkpoint", 2
NAME, HASH = "manifest.json", "manifest.sha256"
LARGEST = 1 << 30  # bytes of a manifest
COMPARISONS = 20_000_000  # of pieces with each other, to see that none overlap
MAP = 256  # values of a byte: what an optimizer of 8-bit states keeps of the smallest parameter, too

NUMBERS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
Box = tuple[tuple[int, int], ...]
Note = dict[str, Any]  # what one rank says of its file


class Damage(Exception):
    """A checkpoint contradicts itself or its manifest; an older one may still be whole."""


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """What a checkpoint must know to become a Hugging Face folder; None for modules that are of no such kind."""
    config: Any = getattr(model, "config", None)
    if type(config).__module__ == "isograd.models.config":
        return {"kind": "isograd", "config": json.loads(json.dumps(dataclasses.asdict(config)))}  # tuples are lists
    if type(model).__module__.startswith("transformers.") and hasattr(config, "to_dict"):
        values = json.loads(json.dumps(config.to_dict(), default=str))
        found = {"kind": "transformers", "config": {**values, "architectures": [type(model).__name__]}}
        adapters: Any = getattr(model, "_isograd_adapters", None)
        return found if adapters is None else {**found, "adapters": dataclasses.asdict(adapters)}
    return None


class Piece(NamedTuple):
    """What one rank wrote of a tensor: a box of it, in a file, with its hash."""

    file: str
    box: Box
    xxh3_128: str


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint: a row of each column for each piece."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    files: list[str]
    boxes: list[int]
    xxh3_128: list[str]

    @property
    def pieces(self) -> Iterator[Piece]:
        """The columns, read row by row."""
        width = 2 * max(1, len(self.shape))
        for i, (file, digest) in enumerate(zip(self.files, self.xxh3_128, strict=True)):
            ends = self.boxes[i * width : (i + 1) * width]
            yield Piece(file, tuple(zip(ends[::2], ends[1::2], strict=True)), digest)


@dataclass(frozen=True)
class CheckpointManifest:
    """The contents of manifest.json, typed."""

    step: int
    layout: str
    model: dict[str, Any] | None  # hf/export.py's description
    written_by: dict[str, str]
    files: dict[str, int]  # sizes in bytes
    numbers: dict[str, Any]
    extra: dict[str, Any]
    tensors: dict[str, Saved]

    def write(self, folder: Place) -> None:
        """Write the hash of manifest.json, and then this, which in a store is the checkpoint's name."""
        number = {file: i for i, file in enumerate(self.files)}
        tensors = {key: vars(s) | {"files": [number[file] for file in s.files]} for key, s in self.tensors.items()}
        whole = {"format": FORMAT, "version": VERSION, **vars(self), "tensors": tensors}
        text = json.dumps(whole, separators=(",", ":")).encode()
        write_bytes(folder / HASH, f"{hashlib.sha256(text).hexdigest()}  {NAME}\n".encode())
        write_bytes(folder / NAME, text)


def versions() -> dict[str, str]:
    """Which isograd and which torch write this checkpoint."""
    try:
        own = importlib.metadata.version("isograd")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        own = "unknown"
    return {"isograd": own, "torch": str(torch.__version__)}


Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}$")]  # of a file in the checkpoint's own folder


@dataclass(frozen=True)
class _Columns(Strict):
    """One tensor as the file has it."""

    shape: list[Count]
    dtype: str
    files: list[Count]
    boxes: list[Count]
    xxh3_128: list[Annotated[str, Field(pattern="^[0-9a-f]{32}$")]]


@dataclass(frozen=True)
class _Adapters(Strict):
    """LoRA: what peft calls its config, and the scale of each adapted layer."""

    config: dict[str, Any]
    scales: dict[str, float]


@dataclass(frozen=True)
class _Described(Strict):
    """The model, as describe_model gives it."""

    kind: str
    config: dict[str, Any]
    adapters: _Adapters | None = None


@dataclass(frozen=True)
class _Group(Strict):
    """A group of an optimizer: its options, and the parameters in it."""

    kind: str
    options: dict[str, Any]
    names: list[str]


@dataclass(frozen=True)
class _Scale(Strict):
    """fp16's loss scale."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: Count


@dataclass(frozen=True)
class _Numbers(Strict):
    """What is kept per run and per parameter: engine/state.py."""

    groups: list[_Group]
    counts: dict[str, dict[str, tuple[Any, str | None]]]  # {entry: {parameter: (value, dtype of a tensor)}}
    loss_scale: _Scale | None
    counters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Head(Strict):
    """The whole file."""

    format: str
    version: int
    step: Count
    layout: str
    model: _Described | None
    written_by: dict[str, str]
    files: dict[Name, Count]
    numbers: _Numbers
    extra: dict[str, Any]
    tensors: dict[str, _Columns]


def read(folder: Place) -> CheckpointManifest:
    """Raises Damage, or an error when an isograd of another format wrote it."""
    path = folder / NAME
    try:
        text = read_bytes(path, LARGEST)
        words = read_bytes(folder / HASH, 1 << 12).decode("ascii", "replace").split()
        if not words or hashlib.sha256(text).hexdigest() != words[0]:
            raise Damage(f"{NAME} does not have the hash that {HASH} says")
        found = parse_json(text, str(path), nan=True)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise Damage(f"{NAME} is no manifest of a checkpoint")
        version = found.get("version")
        if type(version) is int and version > 0 and version != VERSION:
            by = str(found.get("written_by"))[:200]
            raise CheckpointError("IG939", name=folder.name, version=VERSION, other=version, by=by)
        if version != VERSION:
            raise Damage(f"{NAME} has no version")
        head = typed(_Head, text, path, parsed=True)
    except FileError as error:
        raise Damage(error.brief) from error
    named = step_of(folder)
    if named is not None and named != head.step:
        raise Damage(f"step: {NAME} says {head.step}, and the folder's name {named}")
    budget = [COMPARISONS]
    tensors = {key: _saved(key, value, head.files, budget) for key, value in head.tensors.items()}
    _check_numbers(head.numbers, tensors)
    return CheckpointManifest(
        head.step, head.layout, found["model"], head.written_by, head.files, found["numbers"], head.extra, tensors
    )


def _saved(key: str, value: _Columns, sizes: dict[str, int], budget: list[int]) -> Saved:
    """One tensor whose pieces lie inside it and cover it exactly once."""
    files = list(sizes)
    if value.dtype not in TORCH:
        raise Damage(f"{key}: the dtype {value.dtype[:20]!r} is unknown")
    if any(number >= len(files) for number in value.files):
        raise Damage(f"{key}: a piece lies in a file that {NAME} does not list")
    width, pieces, hashes = 2 * max(1, len(value.shape)), len(value.files), len(value.xxh3_128)
    if pieces != hashes or len(value.boxes) != width * pieces:
        raise Damage(f"{key}: {pieces} pieces, {hashes} hashes, {len(value.boxes)} ends of boxes")
    saved = Saved(tuple(value.shape), value.dtype, [files[n] for n in value.files], value.boxes, value.xxh3_128)
    boxes = [piece.box for piece in saved.pieces]
    limits, wide = saved.shape or (1,), TORCH[value.dtype].itemsize
    if any(not 0 <= a <= b <= n for box in boxes for (a, b), n in zip(box, limits, strict=True)):
        raise Damage(f"{key}: a piece lies outside of its shape {list(saved.shape)}")
    volumes = list(map(volume, boxes))
    if any(size * wide > sizes[file] for size, file in zip(volumes, saved.files, strict=True)):
        raise Damage(f"{key}: a piece is larger than the file that it lies in")
    covered, total = sum(volumes), math.prod(saved.shape)
    if covered != total or _overlap(boxes, budget):
        raise Damage(f"{key}: its pieces do not cover its {total} elements once ({covered} in all)")
    return saved


def _overlap(boxes: Sequence[Box], budget: list[int]) -> bool:
    """Whether two boxes share an element: a sweep along the dimension in which most boxes begin at different places."""
    full = [box for box in boxes if volume(box)]
    if len(full) < 2:
        return False
    dim = max(range(len(full[0])), key=lambda d: len({box[d][0] for box in full}))
    under_way: list[Box] = []
    for box in sorted(full, key=lambda box: box[dim]):
        under_way = [other for other in under_way if other[dim][1] > box[dim][0]]
        budget[0] -= len(under_way)
        if budget[0] < 0:
            raise Damage(f"{NAME} lists more pieces than can be compared with each other")
        if any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other, strict=True)) for other in under_way):
            return True
        under_way.append(box)
    return False


def _check_numbers(numbers: _Numbers, tensors: dict[str, Saved]) -> None:
    """Options and numbers are plain values that the optimizer can hold, of parameters that it steps."""
    stepped = {name for group in numbers.groups for name in group.names}
    for place, values in (
        *((f"groups.{i}.options", group.options) for i, group in enumerate(numbers.groups)),
        ("counters", numbers.counters),
    ):
        for key, value in values.items():
            if not _is_plain(value):
                raise Damage(f"numbers.{place}.{key}: {repr(value)[:80]} is no finite number, word or list of these")
    for entry, by_name in numbers.counts.items():
        for name, (value, dtype) in by_name.items():
            wrong = _not_held(entry, value, dtype) if name in stepped else "the optimizer steps no such parameter"
            if wrong:
                raise Damage(f"numbers.counts.{entry}.{name}: {wrong}")
    for key, saved in tensors.items():
        kind, _, rest = key.partition("/")
        name = rest.partition("/")[2]
        if kind == "optimizer" and (name not in stepped or f"model/{name}" not in tensors):
            lost = f"model/{name} is not in the checkpoint"
            raise Damage(f"{key}: {lost if name in stepped else 'the optimizer steps no such parameter'}")
        if kind == "ema" and f"model/{rest}" not in tensors:
            raise Damage(f"{key}: model/{rest} is not in the checkpoint")
        name = rest if kind == "ema" else name
        shape = tensors[f"model/{name}"].shape if kind in ("optimizer", "ema") else saved.shape
        fits = kind == "optimizer" and math.prod(saved.shape) <= max(math.prod(shape), MAP)
        if saved.shape != shape and not fits:
            raise Damage(f"{key}: shape {list(saved.shape)} instead of that of model/{name}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 1 << 63)


def _not_held(entry: str, value: Any, dtype: str | None) -> str:
    """Why a number of a parameter cannot be what an optimizer keeps; empty: it can."""
    said, one = f"{repr(value)[:60]} of dtype {str(dtype)[:20]}", value
    while isinstance(one, list) and len(one) == 1 and dtype is not None:
        one = one[0]
    if isinstance(one, str) and dtype is None and entry != "step":
        return ""
    if not isinstance(one, bool | int | float) or (dtype is not None and dtype not in NUMBERS):
        return f"{said} is no number"
    if not (abs(one) < 1 << 63 if type(one) is int else True) or (dtype and not _fits(one, NUMBERS[dtype])):
        return f"{said} does not fit into it"
    if entry == "step" and not (0 <= one < 1 << 53 and one == int(one)):
        return f"{said} is no number of steps"
    return ""


def _fits(value: Any, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return isinstance(value, bool)
    if dtype.is_floating_point:
        return not isinstance(value, bool) and (not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max)
    limits = torch.iinfo(dtype)
    return type(value) is int and limits.min <= value <= limits.max


def merge(notes: Sequence[Note], head: dict[str, Any]) -> CheckpointManifest:
    """`head`: step, layout, model, extra, and "run", the numbers per run. A rank's note has its tensors and the numbers
    of the parameters whose first element it owns. Stages of a pipeline may write the same buffer: the first one counts.
    """
    tensors: dict[str, Saved] = {}
    counts: dict[str, dict[str, Any]] = {}
    for note in notes:
        for entry, values in note["counts"].items():
            counts.setdefault(entry, {}).update(values)
        for key, (shape, dtype, box, digest) in note["tensors"].items():
            if key in tensors and key.startswith("buffer/"):
                continue
            saved = tensors.setdefault(key, Saved(tuple(shape), dtype, [], [], []))
            saved.files.append(note["file"])
            saved.boxes.extend(end for ends in box for end in ends)
            saved.xxh3_128.append(digest)
    tensors = dict(sorted(tensors.items()))
    wrong = [
        f"{key}: {covered} of {math.prod(saved.shape)} elements"
        for key, saved in tensors.items()
        if (covered := sum(volume(piece.box) for piece in saved.pieces)) != math.prod(saved.shape)
    ]
    if wrong:
        raise CheckpointError("IG940", seen="; ".join(wrong[:8]))
    files = {note["file"]: note["bytes"] for note in notes}
    numbers = {**head["run"], "counts": {entry: dict(sorted(counts[entry].items())) for entry in sorted(counts)}}
    head = {key: value for key, value in head.items() if key != "run"}
    return CheckpointManifest(**head, numbers=numbers, tensors=tensors, files=files, written_by=versions())


def volume(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(stop - start for start, stop in box)
