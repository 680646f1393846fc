"""Safetensors files read by parts: one rank's rows of a tensor, never a whole model.

A file is opened for each part and closed after it, so that pages it was read from do not stay in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from isograd.errors import ModelError

Box = Sequence[tuple[int, int]]  # (start, stop) along each dimension


class Weights(Protocol):
    """Where parameters' first values are read from, by the model's own names."""

    def has(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor: ...


class Stored:
    """The tensors of one safetensors file, or of all in a directory."""

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        files = _files(Path(path))
        self.homes: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    self.homes[name] = file
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that name is stored; one of another shape is an error."""
        if name in self.shapes and self.shapes[name] != shape:
            raise ModelError(
                "IG422",
                f"the stored {name!r} has another shape",
                seen=f"{self.shapes[name]} in {self.homes[name].name}",
                expected=f"{shape}, as the model has it",
                fix="build the model with the config that the weights were made with",
            )
        return name in self.shapes

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """A copy of the box of a tensor."""
        from safetensors import safe_open

        with safe_open(str(self.homes[name]), framework="pt") as opened:
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
        from safetensors import safe_open

        with safe_open(str(self.homes[name]), framework="pt") as opened:
            return take(opened.get_tensor(name)).clone(memory_format=torch.contiguous_format)


def _files(place: Path) -> list[Path]:
    """Those that a Hugging Face index names, else model.safetensors, else all: folders may hold a second form too."""
    index = place / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        lost = [name for name in names if Path(name).name != name or not (place / name).is_file()]
        if lost:
            raise ModelError(
                "IG424",
                f"shards of {place} are missing",
                seen=f"{len(lost)} of {len(names)}: {lost[:8]}",
                expected="every file that model.safetensors.index.json names",
                fix="copy the folder again",
            )
        return [place / name for name in names]
    if (place / "model.safetensors").is_file():
        return [place / "model.safetensors"]
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or any(f.suffix != ".safetensors" or not f.is_file() for f in files):
        raise ModelError(
            "IG421",
            f"no safetensors in {place}",
            seen=[f.name for f in place.glob("*")][:10],
            expected="*.safetensors",
            fix="pickled weights (.bin, .pt) can run code and are not read; "
            "convert them with transformers: model.save_pretrained(dir, safe_serialization=True)",
        )
    return files
