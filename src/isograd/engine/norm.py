"""The global gradient norm: each logical element counted once, the same number on every rank.

Row shards over the data axes are disjoint; of replicas over tp only the first counts (Contract.counted_here). The sum
over ranks is taken in rank order from gathered values, so all ranks compute the same clip factor from the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def global_norm(slots: Sequence[Slot], world: Group, device: torch.device) -> float:
    """2-norm of all `paid` rows of all ranks; inf or nan if any element is."""
    rows = [slot.paid for slot in slots if slot.paid is not None and slot.paid.numel()]
    return math.sqrt(sum(float(part) for part in raw.gather_list(_squares(rows, device), world)))


def _squares(rows: list[Tensor], device: torch.device) -> Tensor:
    if not rows:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(rows, 2)).double().square().sum()


def reproducible_norm(slots: Sequence[Slot], world: Group, device: torch.device) -> float:
    """The same number however the elements are spread over ranks: squares are added as integers.

    Every square is rounded to a fixed-point number relative to the largest of all, which makes the sum associative.
    """
    rows = [slot.paid for slot in slots if slot.paid is not None and slot.paid.numel()]
    largest = max((float(row.abs().max()) for row in rows), default=0.0)
    flags = [math.nan if any(bool(row.isnan().any()) for row in rows) else largest]
    tops = [float(t) for t in raw.gather_list(torch.tensor(flags, dtype=torch.float64, device=device), world)]
    if any(math.isnan(t) or math.isinf(t) for t in tops):
        return math.inf if not any(math.isnan(t) for t in tops) else math.nan
    top = max(tops)
    if top == 0.0:
        return 0.0
    shift = FIXED_POINT_BITS - 2 * math.frexp(top)[1]
    scale = torch.tensor(2.0, dtype=torch.float64, device=device).pow(shift // 2)
    total = 0
    for row in rows:
        for part in row.reshape(-1).split(1 << 16):  # 2**16 squares of at most 2**46 stay inside an int64
            total += int((part.double() * scale).square().round().long().sum())
    halves = torch.tensor([total >> 32, total & 0xFFFFFFFF], dtype=torch.int64, device=device)
    gathered = [(int(h[0]) << 32) + int(h[1]) for h in raw.gather_list(halves, world)]
    return math.sqrt(sum(gathered)) / float(scale)
