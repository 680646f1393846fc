"""Two checkpoints beside each other, and one against its own hashes: a few rows in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.checkpoint.files import TORCH
from isograd.checkpoint.manifest import Box, Damage, Saved
from isograd.checkpoint.read import Reader, read_box

BLOCK_BYTES = 1 << 26  # of one tensor at a time


def damages(reader: Reader) -> Iterator[tuple[str, str | None]]:
    """(tensor, what is wrong with it) for every piece of every tensor; None: nothing is."""
    for key, saved in reader.manifest.tensors.items():
        for piece in saved.pieces:
            try:
                reader.piece(key, piece)
            except Damage as damage:
                yield key, str(damage)
            else:
                yield key, None


@dataclass(frozen=True)
class Difference:
    """How one tensor, or one entry of the optimizer, differs between two checkpoints."""

    key: str
    what: str  # in words, when the tensors cannot be compared row by row
    rows: tuple[int, ...] = ()  # that differ
    of: int = 0
    largest: float = 0.0  # absolute
    relative: float = 0.0  # the norm of the difference over the norm of the first

    def __str__(self) -> str:
        if self.what:
            return f"{self.key}: {self.what}"
        return (
            f"{self.key}: {len(self.rows)} of {self.of} rows differ ({_ranges(self.rows)}), by at most "
            f"{self.largest:.3g}, together {self.relative:.3g} of its norm"
        )


def differences(one: Reader, other: Reader) -> Iterator[Difference]:
    """Tensors of one that are not bit for bit those of the other."""
    a, b = one.manifest.tensors, other.manifest.tensors
    for key in sorted(a.keys() | b.keys()):
        if key not in b or key not in a:
            yield Difference(key, f"only in the {'first' if key in a else 'second'}")
        elif (a[key].shape, a[key].dtype) != (b[key].shape, b[key].dtype):
            yield Difference(key, f"{a[key].dtype} {list(a[key].shape)} and {b[key].dtype} {list(b[key].shape)}")
        elif _hashes(a[key]) != _hashes(b[key]) and (found := _by_rows(key, one, other)):
            yield found
    for name, values in one.manifest.numbers["counts"].items():
        unlike = [key for key, v in values.items() if other.manifest.numbers["counts"].get(name, {}).get(key) != v]
        if unlike:
            yield Difference(f"optimizer/{name}", f"differs for {len(unlike)} parameters, {unlike[0]} for one")


def _hashes(saved: Saved) -> set[tuple[Box, str]]:
    return {(piece.box, piece.xxh3_128) for piece in saved.pieces}


def _by_rows(key: str, one: Reader, other: Reader) -> Difference | None:
    saved = one.manifest.tensors[key]
    shape = saved.shape or (1,)
    if not math.prod(shape):
        return None
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * TORCH[saved.dtype].itemsize))
    rows: list[int] = []
    largest, apart, whole = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for first in range(0, shape[0], step):
        box = ((first, min(shape[0], first + step)), *((0, size) for size in shape[1:]))
        a, b = read_box(one, key, box), read_box(other, key, box)
        unlike = (_bits(a) != _bits(b)).flatten(1).any(1) if a.dim() > 1 else _bits(a) != _bits(b)
        rows += (first + unlike.nonzero().flatten()).tolist()
        gap = (a.double() - b.double()).abs()
        largest = torch.maximum(largest, gap.max())  # keeps NaN
        apart, whole = apart + float(gap.square().sum()), whole + float(a.double().square().sum())
    if not rows:
        return None
    return Difference(key, "", tuple(rows), shape[0], float(largest), math.sqrt(apart / whole) if whole else math.inf)


def _bits(tensor: Tensor) -> Tensor:
    """Equal bytes are equal, NaN or not."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.itemsize])


def _ranges(rows: tuple[int, ...]) -> str:
    """'3, 7-9, 12 and 5 more'."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    shown = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs[:6])
    rest = sum(b - a + 1 for a, b in runs[6:])
    return f"{shown} and {rest} more" if rest else shown
