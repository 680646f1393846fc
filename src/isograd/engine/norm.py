"""The global gradient norm: each logical element counted once, the same number on every rank.

Row shards over the data axes are disjoint; of replicas over tp only the first counts (Contract.is_primary_replica).
The sum over ranks is taken in rank order from gathered values, so all ranks compute the same clip factor from the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.core.mesh import Mesh
from isograd.engine.plan import Slot

FIXED_POINT_BITS = 46  # of the largest square; 2**16 such squares still fit an int64


def counted(slots: Sequence[Slot], mesh: Mesh) -> list[Slot]:
    """The slots whose rows stand for their replicas on this rank."""
    return [slot for slot in slots if slot.contract.is_primary_replica(mesh)]


def global_norm(rows: list[Tensor], world: Group, device: torch.device) -> float:
    """2-norm of the rows of all ranks; inf or nan if any element is."""
    return math.sqrt(sum(raw.gather(_squares(rows, device), world).tolist()))


def global_norm_beside(rows: list[Tensor], world: Group, device: torch.device, late: Tensor) -> Tensor:
    """On the card, a row per rank: the sum of its squares, and its `late` numbers. One message."""
    return raw.gather(torch.cat((_squares(rows, device)[None], late)), world)


def _squares(rows: list[Tensor], device: torch.device) -> Tensor:
    if not rows:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(list(torch._foreach_norm(rows, 2))).double()
    return norms.dot(norms)


def reproducible_norm(rows: list[Tensor], world: Group, device: torch.device) -> float:
    """The same number however the elements are spread over ranks: squares are added as integers.

    Every square is rounded to a fixed-point number relative to the largest of all, which makes the sum associative.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack([row.abs().max().double() for row in rows]).max() if rows else zero  # NaN if any is
    tops = raw.gather(largest, world).tolist()
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
    gathered = raw.gather(halves, world).tolist()
    return math.sqrt(sum((high << 32) + low for high, low in gathered)) / scale
