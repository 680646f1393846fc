"""Boxes of a checkpoint's tensors, read from the files of whatever ranks wrote them.

A rank opens only files that hold something of its own, maps them, and checks the hash of each piece that it reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.checkpoint import manifest
from isograd.checkpoint.files import DTYPES, TORCH, sha256
from isograd.checkpoint.manifest import Box, Damage, Manifest, Piece


class Reader:
    def __init__(self, folder: Path) -> None:
        """Raises Damage when the manifest is."""
        self.folder = folder
        self.manifest: Manifest = manifest.read(folder)
        self._opened: dict[str, Any] = {}

    def fill(self, key: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor to where it belongs; raises Damage with the tensor's name."""
        saved = self.manifest.tensors[key]
        found = 0
        for piece in saved.pieces:
            common = _common(box, piece.box)
            if common is None:
                continue
            tensor = self.piece(key, piece)
            target[_within(common, box)].copy_(tensor[_within(common, piece.box)])
            found += manifest.volume(common)
        if found != manifest.volume(box):
            raise Damage(f"{key}: {found} of {manifest.volume(box)} elements of {_spell(box)} are in the manifest")

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A box, or all, of a tensor."""
        saved = self.manifest.tensors[key]
        box = tuple((0, size) for size in saved.shape or (1,)) if box is None else box
        tensor = torch.empty([stop - start for start, stop in box], dtype=TORCH[saved.dtype])
        self.fill(key, box, tensor)
        return tensor if saved.shape else tensor.view(())

    def piece(self, key: str, piece: Piece) -> Tensor:
        """What one rank wrote of a tensor, checked."""
        saved = self.manifest.tensors[key]
        place = f"{key} {_spell(piece.box)} in {piece.file}"
        try:
            tensor: Tensor = self._open(piece.file).get_tensor(key)
        except Damage as error:
            raise Damage(f"{place}: {error}") from error
        except Exception as error:  # a header that lies is told in many ways
            raise Damage(f"{place}: {error}") from error
        size = [stop - start for start, stop in piece.box]
        if list(tensor.shape) != size or DTYPES.get(tensor.dtype) != saved.dtype:
            raise Damage(f"{place}: {tuple(tensor.shape)} of {tensor.dtype} instead of {tuple(size)} of {saved.dtype}")
        if sha256(tensor) != piece.sha256:
            raise Damage(f"{place}: its bytes do not have the hash that the manifest says")
        return tensor

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            path = self.folder / file
            if Path(file).name != file or not path.is_file():
                raise Damage("the file is missing")
            size = path.stat().st_size
            if size != self.manifest.files.get(file):
                raise Damage(f"the file has {size} bytes instead of {self.manifest.files.get(file)}")
            self._opened[file] = safe_open(str(path), framework="pt")
        return self._opened[file]

    def close(self) -> None:
        self._opened.clear()


def _common(a: Box, b: Box) -> Box | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(box, outer, strict=True))


def _spell(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
