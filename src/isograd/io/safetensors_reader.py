"""Safetensors files read by parts: one rank's rows of a tensor, never a whole model.

A file is opened for each part and closed after it, so that pages it was read from do not stay in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from isograd.errors import ModelError
from isograd.io.untrusted import MANIFEST, FileError, read_header, read_typed

Box = Sequence[tuple[int, int]]  # (start, stop) along each dimension


class Weights(Protocol):
    """Where parameters' first values are read from, by the model's own names."""

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there are values for the parameter of this name and global shape."""
        ...

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """The values of a box of the parameter."""
        ...


class SafetensorsReader:
    """The tensors of one safetensors file, or of all in a directory."""

    def __init__(self, path: str | Path) -> None:
        """Every header is checked before any tensor is read; see outside.read_header."""
        self.file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(Path(path)):
            for name, extent in read_header(file, follow=True).items():
                self.file_of[name] = file
                self.shapes[name] = extent.shape

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that name is stored; one of another shape is an error."""
        if name in self.shapes and self.shapes[name] != shape:
            raise ModelError("IG422", seen=f"{self.shapes[name]} in {self.file_of[name].name}", name=name, shape=shape)
        return name in self.shapes

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """A copy of the box of a tensor."""
        with opened_tensors(self.file_of[name]) as opened:
            if not box:
                scalar: Tensor = opened.get_tensor(name)
                return scalar.clone()
            sizes = [stop - start for start, stop in box]
            if not math.prod(sizes):
                return torch.empty(sizes)
            part: Tensor = opened.get_slice(name)[tuple(slice(start, stop) for start, stop in box)]
            return part.clone()

    def look(self, name: str, take: Callable[[Tensor], Tensor]) -> Tensor:
        """A copy of what `take` picks from a tensor, which is mapped: only pages that are touched are read."""
        with opened_tensors(self.file_of[name]) as opened:
            return take(opened.get_tensor(name)).clone(memory_format=torch.contiguous_format)


@contextmanager
def opened_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file whose header has been checked; what still goes wrong in it is an error with its name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as found:
            yield found
    except (SafetensorError, OSError) as error:
        raise FileError(
            "IG664",
            f"{file} cannot be read",
            seen=error,
            expected="the file as it was when its header was read",
            fix="the file is damaged or has changed: copy it again",
        ) from error


@dataclass(frozen=True)
class Index:
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


def _files(place: Path) -> list[Path]:
    """The files that a Hugging Face index names, else model.safetensors, else all safetensors of the folder."""
    index = place / "model.safetensors.index.json"
    if os.path.lexists(index):
        names = sorted(set(read_typed(Index, index, MANIFEST, follow=True).weight_map.values()))
        lost = [name for name in names if Path(name).name != name or not os.path.isfile(place / name)]
        if lost:
            raise ModelError("IG424", seen=f"{len(lost)} of {len(names)}: {lost[:8]}", place=place)
        return [place / name for name in names]
    if os.path.lexists(place / "model.safetensors"):
        return [place / "model.safetensors"]
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or any(f.suffix != ".safetensors" for f in files) or not os.path.lexists(files[0]):
        raise ModelError("IG421", seen=[f.name for f in place.glob("*")][:10], place=place)
    return files
