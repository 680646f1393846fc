"""What a checkpoint holds, as one JSON file: which box of which tensor lies in which file, with which hash.

    step-00000100/
      manifest.json             this file
      manifest.sha256           its hash, in the format of `sha256sum --check`
      rank-00000.safetensors    what rank 0 wrote

{"format": "isograd checkpoint", "version": 1, "step": 100, "layout": "dp2 tp2 zero1", "model": {...},
 "written_by": {...}, "files": {"rank-00000.safetensors": 12345}, "numbers": {...}, "extra": {...},
 "tensors": {"model/embed.weight": {"shape": [101, 24], "dtype": "F32", "files": [0, 1],
             "boxes": [0, 51, 0, 24, 51, 101, 0, 24], "sha256": ["9f3a...", "07bc..."]}}}

A tensor lies in pieces that cover it exactly: the file of each, as a number in the order of "files"; the (start, stop)
of each along each dimension, one after another; the hash of each. In columns, because there may be a million pieces.
engine/state.py says what the keys and the numbers mean.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isograd.checkpoint.files import write_bytes, write_json
from isograd.errors import CheckpointError

FORMAT, VERSION = "isograd checkpoint", 1
NAME, HASH = "manifest.json", "manifest.sha256"

Box = tuple[tuple[int, int], ...]
Note = dict[str, Any]  # what one rank says of its file


class Damage(Exception):
    """What a checkpoint says of itself is not true; an older one may still be whole."""


class Piece(NamedTuple):
    file: str
    box: Box
    sha256: str


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint: a row of each column for each piece."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    files: list[str]
    boxes: list[int]
    sha256: list[str]

    @property
    def pieces(self) -> Iterator[Piece]:
        width = 2 * max(1, len(self.shape))
        for i, (file, sha256) in enumerate(zip(self.files, self.sha256, strict=True)):
            ends = self.boxes[i * width : (i + 1) * width]
            yield Piece(file, tuple(zip(ends[::2], ends[1::2], strict=True)), sha256)


@dataclass(frozen=True)
class Manifest:
    step: int
    layout: str
    model: dict[str, Any] | None  # checkpoint/hugging.py's description
    extra: dict[str, Any]
    numbers: dict[str, Any]
    tensors: dict[str, Saved]
    files: dict[str, int]  # sizes in bytes
    written_by: dict[str, str]

    def write(self, folder: Path) -> None:
        number = {file: i for i, file in enumerate(self.files)}
        tensors = {
            key: {
                "shape": saved.shape,
                "dtype": saved.dtype,
                "files": [number[file] for file in saved.files],
                "boxes": saved.boxes,
                "sha256": saved.sha256,
            }
            for key, saved in self.tensors.items()
        }
        head = {"format": FORMAT, "version": VERSION, "step": self.step, "layout": self.layout}
        head["model"] = self.model
        rest = {"written_by": self.written_by, "files": self.files, "numbers": self.numbers, "extra": self.extra}
        text = write_json(folder / NAME, {**head, **rest, "tensors": tensors})
        write_bytes(folder / HASH, f"{hashlib.sha256(text).hexdigest()}  {NAME}\n".encode())


def versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("isograd")
    except importlib.metadata.PackageNotFoundError:  # run from its source
        own = "unknown"
    return {"isograd": own, "torch": str(torch.__version__)}


def read(folder: Path) -> Manifest:
    """Raises Damage, or an error when a newer isograd wrote it."""
    try:
        text = (folder / NAME).read_bytes()
        expected = (folder / HASH).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise Damage(f"{NAME} or {HASH} cannot be read: {error}") from error
    if hashlib.sha256(text).hexdigest() != expected:
        raise Damage(f"{NAME} does not have the hash that {HASH} says")
    try:
        found = json.loads(text)
        version = found["version"]
        if found["format"] == FORMAT and version > VERSION:
            raise CheckpointError(
                "IG939",
                f"{folder.name} was written by a newer isograd",
                seen=f"format version {version}, written by {found.get('written_by')}",
                expected=f"at most version {VERSION}",
                fix="read it with the isograd that wrote it, or a later one",
            )
        return Manifest(
            found["step"],
            found["layout"],
            found["model"],
            found["extra"],
            found["numbers"],
            {key: _saved(value, list(found["files"])) for key, value in found["tensors"].items()},
            found["files"],
            found["written_by"],
        )
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise Damage(f"{NAME} is no manifest: {error!r}") from error


def _saved(value: Any, files: list[str]) -> Saved:
    names = [files[number] for number in value["files"]]
    return Saved(tuple(value["shape"]), value["dtype"], names, value["boxes"], value["sha256"])


# -- from what ranks say of their files ------------------------------------------------------------------------------


def merge(notes: Sequence[Note], head: dict[str, Any]) -> Manifest:
    """`head`: step, layout, model, extra, and "run", the numbers per run. A rank's note has its tensors and the numbers
    of the parameters whose first element it owns. Stages of a pipeline may write the same buffer: the first one counts.
    """
    tensors: dict[str, Saved] = {}
    counts: dict[str, dict[str, Any]] = {}
    for note in notes:
        for entry, values in note["counts"].items():
            counts.setdefault(entry, {}).update(values)
        for key, (shape, dtype, box, sha256) in note["tensors"].items():
            if key in tensors and key.startswith("buffer/"):
                continue
            saved = tensors.setdefault(key, Saved(tuple(shape), dtype, [], [], []))
            saved.files.append(note["file"])
            saved.boxes.extend(end for ends in box for end in ends)
            saved.sha256.append(sha256)
    tensors = dict(sorted(tensors.items()))
    _check_cover(tensors)
    files = {note["file"]: note["bytes"] for note in notes}
    numbers = {**head["run"], "counts": {entry: dict(sorted(counts[entry].items())) for entry in sorted(counts)}}
    head = {key: value for key, value in head.items() if key != "run"}
    return Manifest(**head, numbers=numbers, tensors=tensors, files=files, written_by=versions())


def _check_cover(tensors: dict[str, Saved]) -> None:
    wrong = [
        f"{key}: {covered} of {math.prod(saved.shape)} elements"
        for key, saved in tensors.items()
        if (covered := sum(volume(piece.box) for piece in saved.pieces)) != math.prod(saved.shape)
    ]
    if wrong:
        raise CheckpointError(
            "IG940",
            "the ranks together did not write every element once",
            seen="; ".join(wrong[:8]),
            expected="every row of every tensor from one rank",
            fix="is the optimizer's state the same on all ranks? Otherwise please report this",
        )


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
