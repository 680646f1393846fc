"""Boxes of a checkpoint's tensors, read from the files of whatever ranks wrote them.

A rank opens only files that hold something of its own, reads a piece to where it belongs if it lies there in one part,
and checks the hash of each piece that it reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128

from isograd.checkpoint import manifest
from isograd.checkpoint.files import TORCH, chunks, raw_bytes
from isograd.checkpoint.folder import one_of
from isograd.checkpoint.manifest import Box, CheckpointManifest, Damage, Piece, Saved
from isograd.errors import CheckpointError
from isograd.io.store import Place, StorePath, place_of
from isograd.io.untrusted import Extent, FileError, open_to_read, read_header


class Reader:
    """One checkpoint, open for reading: any box of any tensor, checked against its hash."""

    def __init__(self, folder: Place) -> None:
        """Raises Damage when the manifest is."""
        self.folder = folder
        self.manifest: CheckpointManifest = manifest.read(folder)
        self._opened: dict[str, _Opened] = {}
        self._files = ExitStack()

    def fill(self, key: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor to where it belongs; raises Damage with the tensor's name."""
        saved = self.manifest.tensors[key]
        found = 0
        for piece in saved.pieces:
            common = _common(box, piece.box)
            if common is None:
                continue
            part = target[_within(common, box)]
            here = common == piece.box and part.is_contiguous() and part.device.type == "cpu"
            if here and part.dtype == TORCH[saved.dtype]:
                self.piece(key, piece, part)
            else:
                part.copy_(self.piece(key, piece)[_within(common, piece.box)])
            found += manifest.volume(common)
        if found != manifest.volume(box):
            raise Damage(f"{key}: {found} of {manifest.volume(box)} elements of {_spell(box)} are in the manifest")

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A box, or all, of a tensor."""
        saved = self.manifest.tensors[key]
        whole = tuple((0, size) for size in saved.shape or (1,))
        for file in dict.fromkeys(piece.file for piece in saved.pieces if _common(box or whole, piece.box)):
            self._open(file)  # its size is the manifest's: no memory is asked for that no file could fill
        try:
            tensor = torch.empty([stop - start for start, stop in box or whole], dtype=TORCH[saved.dtype])
        except RuntimeError as error:
            raise Damage(f"{key}: no memory for a tensor of {list(saved.shape)}") from error
        self.fill(key, box or whole, tensor)
        return tensor if saved.shape else tensor.view(())

    def piece(self, key: str, piece: Piece, into: Tensor | None = None) -> Tensor:
        """What one rank wrote of a tensor, checked; in memory of its own, or in that of a contiguous tensor."""
        saved = self.manifest.tensors[key]
        place = f"{key} {_spell(piece.box)} in {piece.file}"
        opened, size = self._open(piece.file), tuple(stop - start for start, stop in piece.box)
        extent = opened.header.get(key)
        if extent is None or (extent.shape, extent.dtype) != (size, saved.dtype):
            seen = "nothing" if extent is None else f"{extent.shape} of {extent.dtype}"
            raise Damage(f"{place}: {seen} instead of {size} of {saved.dtype}")
        tensor = torch.empty(size, dtype=TORCH[saved.dtype]) if into is None else into
        try:
            digest = opened.read(extent, tensor)
        except OSError as error:
            raise Damage(f"{place}: {error}") from error
        if digest != piece.xxh3_128:
            raise Damage(f"{place}: its bytes do not have the hash that the manifest says")
        return tensor

    def _open(self, file: str) -> _Opened:
        if file not in self._opened:
            path = self.folder / file
            if not (path.is_file() if isinstance(path, StorePath) else os.path.lexists(path)):
                raise Damage(f"{file} is missing")
            try:
                found = self._files.enter_context(open_to_read(path))
                size = found.seek(0, os.SEEK_END)
                if size != self.manifest.files[file]:
                    raise Damage(f"{file} has {size} bytes instead of {self.manifest.files[file]}")
                header = read_header(path)
            except FileError as error:
                raise Damage(error.brief) from error
            at = size - sum(one.stop - one.start for one in header.values())
            self._opened[file] = _Opened(path, found, header, at)
        return self._opened[file]

    def close(self) -> None:
        """Close the files that are open."""
        self._opened.clear()
        self._files.close()


@dataclass(frozen=True)
class _Opened:
    """A safetensors file, or object of a store, of which tensors are read by ranges."""

    path: Place
    file: Any
    header: dict[str, Extent]
    first: int  # byte of the first tensor

    def read(self, extent: Extent, tensor: Tensor) -> str:
        """Fill a whole tensor; the hash of what was read, which is less where the file ends."""
        found, at = xxh3_128(), self.first + extent.start
        if isinstance(self.path, StorePath):
            self.path.fill(raw_bytes(tensor), at)
        else:
            self.file.seek(at)
        for chunk in chunks(raw_bytes(tensor)):
            count = len(chunk) if isinstance(self.path, StorePath) else self.file.readinto(chunk)
            found.update(chunk[:count])
        return found.hexdigest()


class SavedWeights:
    """A checkpoint's parameters as first values of a new run: Engine(model, ..., weights=SavedWeights(place)).

    Under any layout, and without the optimizer; `CheckpointManager.load` resumes the run that saved it.
    """

    def __init__(self, place: str | Place) -> None:
        self._reader = open_whole(place)

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether this parameter or buffer was saved; refuses one that was saved with another shape."""
        saved = self._find(name)
        if saved is not None and saved[1].shape != shape:
            raise CheckpointError(
                "IG937",
                seen=f"{name!r} is {list(saved[1].shape)} there and {list(shape)} here",
                place=self._reader.folder.name,
            )
        return saved is not None

    def read(self, name: str, shape: tuple[int, ...], box: Sequence[tuple[int, int]]) -> Tensor:
        """A box of a saved parameter or buffer."""
        saved = self._find(name)
        assert saved is not None
        return read_box(self._reader, saved[0], tuple(box))

    def _find(self, name: str) -> tuple[str, Saved] | None:
        tensors = self._reader.manifest.tensors
        return next(((key, tensors[key]) for kind in ("model", "buffer") if (key := f"{kind}/{name}") in tensors), None)


def open_whole(place: str | Place) -> Reader:
    """A checkpoint, or the newest in a folder of them; damage is an error with a code."""
    place = place_of(place)
    try:
        return Reader(one_of(place))
    except Damage as damage:
        raise damaged(place, damage) from damage


def read_box(reader: Reader, key: str, box: Box) -> Tensor:
    """A box of a tensor; damage is an error with a code."""
    try:
        return reader.read(key, box)
    except Damage as damage:
        raise damaged(reader.folder, damage) from damage


def damaged(place: Place, damage: Damage) -> CheckpointError:
    """The error of a checkpoint whose files are not what its manifest lists."""
    return CheckpointError("IG936", seen=damage, place=place)


def _common(a: Box, b: Box) -> Box | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(box, outer, strict=True))


def _spell(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
