"""The global gradient norm: each logical element counted once, the same number on every rank.

Row shards over the data axes are disjoint; of replicas over tp only the first counts (Contract.counted_here). The sum
over ranks is taken in rank order from gathered values, so all ranks compute the same clip factor from the same bits.

On the CPU rows are looked at as they land, for NaN and infinity. Their norms show both, and `Norms` remembers them, so
that the step does not read again what it has read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group
from isograd.engine.plan import Slot
from isograd.mesh import Mesh

FIXED_POINT_BITS = 46  # of the largest square; 2**16 such squares still fit an int64


def counted(slots: Sequence[Slot], mesh: Mesh) -> list[Slot]:
    """The slots whose rows stand for their replicas on this rank."""
    return [slot for slot in slots if slot.contract.counted_here(mesh)]


class Norms:
    """2-norms of rows, remembered for as long as nothing is written to the rows."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], int, Tensor]] = {}  # by id: the rows, their version, their norm

    def take(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The norms of these rows, which are read now."""
        norms = list(torch._foreach_norm(list(rows), 2)) if rows else []
        for row, norm in zip(rows, norms, strict=True):
            if not row.is_inference():  # those count no versions
                self._known[id(row)] = ref(row), row._version, norm
        return norms

    def of(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The norms of these rows; only those are read whose norm is not known."""
        known = [self._find(row) for row in rows]
        read = iter(self.take([row for row, norm in zip(rows, known, strict=True) if norm is None]))
        return [next(read) if norm is None else norm for norm in known]

    def _find(self, row: Tensor) -> Tensor | None:
        if id(row) not in self._known:
            return None
        seen, version, norm = self._known[id(row)]
        return norm if seen() is row and row._version == version else None

    def clear(self) -> None:
        """Nothing is known any more."""
        self._known.clear()


def global_norm(norms: list[Tensor], world: Group, device: torch.device) -> float:
    """2-norm of the rows of all ranks, from the norms of mine; inf or nan if any element is."""
    return math.sqrt(sum(torch.stack(raw.gather_list(_squares(norms, device), world)).tolist()))


def _squares(norms: list[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).double().square().sum()


def reproducible_norm(rows: list[Tensor], world: Group, device: torch.device) -> float:
    """The same number however the elements are spread over ranks: squares are added as integers.

    Every square is rounded to a fixed-point number relative to the largest of all, which makes the sum associative.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack([row.abs().max().double() for row in rows]).max() if rows else zero  # NaN if any is
    tops = torch.stack(raw.gather_list(largest, world)).tolist()
    if any(math.isnan(t) or math.isinf(t) for t in tops):
        return math.inf if not any(math.isnan(t) for t in tops) else math.nan
    top = max(tops)
    if top == 0.0:
        return 0.0
    shift = FIXED_POINT_BITS - 2 * math.frexp(top)[1]
    scale = 2.0 ** min(shift // 2, 1000)
    halves = torch.zeros(2, dtype=torch.int64, device=device)  # the high bits of the sum, and the low 32: not all fit
    for row in rows:
        for part in row.reshape(-1).split(1 << 16):  # 2**16 squares of at most 2**46 stay inside an int64
            squares = (part.double() * scale).square().round().long().sum()
            halves += torch.stack((squares >> 32, squares & 0xFFFFFFFF))
    gathered = torch.stack(raw.gather_list(halves, world)).tolist()
    return math.sqrt(sum((high << 32) + low for high, low in gathered)) / scale
