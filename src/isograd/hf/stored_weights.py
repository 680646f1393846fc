"""The tensors of a folder under the names, and in the form, that the model has now.

Files keep names of older releases, and experts one by one; transformers renames, stacks and joins them while it loads.
Here its own conversions are read, and each rank reads its box alone: of a stack of experts, its experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isograd.io.safetensors_reader import Box, SafetensorsReader


@dataclass(frozen=True)
class Stack:
    """A tensor [experts, ...] whose file has experts one by one, perhaps in parts that lie side by side along dim 1."""

    parts: tuple[tuple[str, ...], ...]  # of each part, the name of each expert

    def shape(self, stored: SafetensorsReader) -> tuple[int, ...] | None:
        """None: these tensors are no stack."""
        shapes = [{stored.shapes[name] for name in part} for part in self.parts]
        lengths = {len(part) for part in self.parts}
        if len(lengths) > 1 or any(len(found) > 1 or not min(found) for found in shapes):
            return None
        first, *others = (min(found) for found in shapes)
        if any(shape[1:] != first[1:] for shape in others):
            return None
        return (*lengths, sum(min(found)[0] for found in shapes), *first[1:])

    def read(self, stored: SafetensorsReader, box: Box) -> Tensor:
        """A box of the stack."""
        sizes = [stop - start for start, stop in box]
        if not math.prod(sizes):
            return torch.empty(sizes)
        experts, (start, stop), *rest = box
        found, at = [], 0
        for part in self.parts:
            size = stored.shapes[part[0]][0]
            rows = (max(start - at, 0), min(stop - at, size))
            at += size
            if rows[0] < rows[1]:
                names = part[slice(*experts)]
                found.append(torch.stack([stored.read(name, stored.shapes[name], [rows, *rest]) for name in names]))
        return torch.cat(found, 1)


class StoredWeights:
    """By the model's names: `shapes`, and boxes. `unknown`: the names of tensors that have no place in it."""

    def __init__(self, stored: SafetensorsReader, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of the model's own tensors."""
        self._stored = stored
        self.places: dict[str, str | Stack] = {}
        self.unknown: list[str] = []
        conversions, prefix = _conversions(model), f"{model.base_model_prefix}."
        stacks: dict[str, dict[str, list[str]]] = {}
        patterns: dict[str, list[str]] = {}
        parts = {name: [(int(n), "") if n.isdecimal() else (-1, n) for n in name.split(".")] for name in stored.shapes}
        for name in sorted(parts, key=parts.__getitem__):  # expert 10 comes behind expert 9
            renamed, pattern, order = (name, None, []) if name in shapes else _renamed(name, conversions)
            fits = [n for n in (renamed, prefix + renamed, renamed.removeprefix(prefix)) if n in shapes]
            if not fits:
                self.unknown.append(name)
            elif pattern is None:
                self.places[fits[0]] = name
            else:
                patterns[fits[0]] = order
                stacks.setdefault(fits[0], {}).setdefault(pattern, []).append(name)
        for target, found in stacks.items():
            stack = Stack(tuple(tuple(found[p]) for p in patterns[target] if p in found))
            if len(found) == len(patterns[target]) and stack.shape(stored) is not None:
                self.places[target] = stack
            else:
                self.unknown += [name for names in found.values() for name in names]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that has a place."""
        place = self.places[name]
        found = place.shape(self._stored) if isinstance(place, Stack) else self._stored.shapes[place]
        assert found is not None
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor that has a place."""
        place = self.places[name]
        if isinstance(place, Stack):
            return place.read(self._stored, box)
        return self._stored.read(place, self._stored.shapes[place], box)


def _conversions(model: Any) -> Sequence[Any]:
    """What transformers does to names and tensors of a file of this class, in its order."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # releases that keep the names of files
        return ()
    found: Sequence[Any] = get_model_conversion_mapping(model)
    return found


def _renamed(name: str, conversions: Sequence[Any]) -> tuple[str, str | None, list[str]]:
    """The name that the model has for it now; where it is a part of a stack, the pattern that says which one, and the
    patterns of all parts in their order. Tensors that are changed in another way keep their name."""
    for conversion in conversions:
        if not hasattr(conversion, "operations"):
            name = conversion.rename_source_key(name)[0]
    for conversion in conversions:
        target, pattern = conversion.rename_source_key(name) if hasattr(conversion, "operations") else (name, None)
        if pattern is not None:
            steps = [(type(step).__name__, step.dim) for step in conversion.operations if hasattr(step, "dim")]
            order = list(conversion.source_patterns)
            stacks = steps[:1] == [("MergeModulelist", 0)] and steps[1:] == [("Concatenate", 1)] * (len(order) > 1)
            return (target, pattern, order) if stacks and len(steps) == len(conversion.operations) else (name, None, [])
    return name, None, []
