"""A checksum through a step's reductions: what was sent, what arrived, what was added up.

A sum is linear: with a fixed vector v of random signs, the sum over the ranks of <v, g_r> is <v, G>. So for every slot
of a bucket and every owner,

    a sender     takes <v, rows> of what it is about to send,
    the owner    takes it again of what has arrived: the same bits, or the message was changed on its way,
                 adds it up twice: the same bits, or one of the two sums is wrong,
                 and takes it of the sum: the same up to rounding, or it was added up wrongly both times.

`compare` brings the senders' numbers to the owners, and all ranks refuse alike. The bound of the last comparison:
each of the n - 1 additions of an element is off by at most half a unit in the last place of a partial sum. The signs do
not depend on the data, so (Hoeffding) the errors add up to more than t times the root of their squares with a
probability below 2 exp(-t^2 / 2): with t = 8, 3e-14. A change of one element is found when it is larger than this
bound: for two ranks 6 units in the last place of the slot's norm. Smaller ones are not.

On NCCL's own reduce-scatter single messages cannot be seen: only the sum is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.fingerprint import checksum
from isograd.comm.notes import gather_notes
from isograd.comm.raw import Group
from isograd.errors import EngineError
from isograd.mesh import Mesh

T = 8.0  # Hoeffding's t
LENGTH = 1 << 16  # elements of v; longer tensors use it again, with another sign
_EPS64 = 2.0**-52
SHOWN = 6


@cache
def _signs(device: str) -> Tensor:
    bits = torch.randint(0, 2, (LENGTH,), generator=torch.Generator().manual_seed(20261122))
    return (bits * 2 - 1).double().to(device)


def dots(pieces: Sequence[Tensor]) -> Tensor:
    """[pieces, 2]: <v, piece> and <piece, piece> of each, in fp64; equal bits have equal numbers."""
    found = []
    for piece in pieces:
        flat = piece.detach().reshape(-1)
        signs, sign = _signs(str(flat.device)), 1.0
        total = torch.zeros(2, dtype=torch.float64, device=flat.device)
        for number, part in enumerate(flat.split(LENGTH)):
            wide = part.double()
            sign = 1.0 if (number * number + number // 3) % 2 == 0 else -1.0
            total += torch.stack((torch.dot(wide, signs[: len(wide)]) * sign, torch.dot(wide, wide)))
        found.append(total)
    return torch.stack(found) if found else torch.zeros(0, 2, dtype=torch.float64)


class Sums:
    """The numbers of one step, by bucket."""

    def __init__(self) -> None:
        self._sent: dict[int, Tensor] = {}  # [owners, slots, 2]
        self._arrived: dict[int, Tensor] = {}  # [senders, slots, 2]; not there where single messages are not seen
        self._total: dict[int, Tensor] = {}  # [slots, 2]
        self._apart: dict[int, Tensor] = {}  # [slots]: whether two sums of the same pieces were equal
        self._eps: dict[int, float] = {}
        self._elements: dict[int, list[int]] = {}

    def sending(self, bucket: int, owners: Sequence[Sequence[Tensor]]) -> None:
        """Before a bucket leaves: the rows of each owner, by slot."""
        _add(self._sent, bucket, torch.stack([dots(pieces) for pieces in owners]))

    def arrived(self, bucket: int, members: Sequence[Sequence[Tensor]]) -> None:
        """Before they are added up: my rows, as each member has them."""
        _add(self._arrived, bucket, torch.stack([dots(pieces) for pieces in members]))

    def summed(self, bucket: int, pieces: Sequence[Tensor], again: Sequence[Tensor]) -> None:
        """My rows of the sum, and the same computed a second time."""
        apart = [checksum(one) != checksum(two) for one, two in zip(pieces, again, strict=True)]
        _add(self._apart, bucket, torch.stack(apart).long())
        _add(self._total, bucket, dots(pieces))
        self._eps[bucket] = max((torch.finfo(piece.dtype).eps for piece in pieces), default=0.0)
        self._elements[bucket] = [piece.numel() for piece in pieces]

    def compare(self, group: Group, buckets: dict[int, list[list[str]]]) -> list[str]:
        """What is wrong with my rows. `buckets`: of each, the names that each of its slots stands for."""
        if group.size == 1 or not buckets:
            return []
        numbers = sorted(buckets)
        sent = torch.cat([self._sent[number] for number in numbers], dim=1)  # [owners, slots, 2]
        shape = sent.shape[1:]
        said = torch.stack(raw.all_to_all(list(sent.unbind(0)), [shape] * group.size, group))  # [senders, slots, 2]
        names = [name for number in numbers for name in buckets[number]]
        wrong = []
        if all(number in self._arrived for number in numbers):
            arrived = torch.cat([self._arrived[number] for number in numbers], dim=1)
            for sender, slot in (said != arrived).any(2).nonzero().tolist():
                if bool(torch.isfinite(said[sender, slot]).all() | torch.isfinite(arrived[sender, slot]).all()):
                    wrong.append(f"rows of {_names(names[slot])} were changed between rank {group.ranks[sender]}, "
                                 f"which sent them, and rank {group.ranks[group.index]}, which owns them")  # fmt: skip
            said = arrived  # what did arrive must add up
        for slot in torch.cat([self._apart[number] for number in numbers]).nonzero().flatten().tolist():
            wrong.append(f"rows of {_names(names[slot])} were added up wrongly on rank {group.ranks[group.index]}: "
                         "a second time the result was another")  # fmt: skip
        total = torch.cat([self._total[number] for number in numbers])
        eps = torch.tensor([self._eps[number] for number in numbers for _ in buckets[number]], device=total.device)
        count = torch.tensor([n for number in numbers for n in self._elements[number]], device=total.device)
        rounding = eps / 2 * math.sqrt((group.size - 1) * group.size) + _EPS64 * count.clamp(max=LENGTH).sqrt()
        bound = T * rounding * said[..., 1].sum(0).sqrt()
        apart = (said[..., 0].sum(0) - total[:, 0]).abs()
        for slot in (apart > bound).nonzero().flatten().tolist():
            wrong.append(f"rows of {_names(names[slot])} were added up wrongly on rank {group.ranks[group.index]}: "
                         f"off by {float(apart[slot]):.3g}, rounding explains {float(bound[slot]):.3g}")  # fmt: skip
        return wrong


def refuse(wrong: list[str], mesh: Mesh) -> None:
    """All ranks together: the step is refused when one of them found something."""
    said = [word for words in gather_notes(wrong[:SHOWN], mesh.group("world"), mesh.device) for word in words]
    if said:
        raise EngineError(
            "IG580", "a gradient was changed while it was reduced",
            seen="; ".join(said[:SHOWN]) + ("; ..." if len(said) > SHOWN else ""),
            expected="the sums of what the ranks have sent, up to rounding",
            fix="engine.discard() on all ranks, and the step again; if it happens again, the rank named has a "
            "faulty processor, memory or network card", where=mesh.where(),
        )  # fmt: skip


def _add(into: dict[int, Tensor], bucket: int, value: Tensor) -> None:
    """A bucket may leave several times in a step; sender and owner add in the same order."""
    into[bucket] = into[bucket] + value if bucket in into else value


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} small parameters ({', '.join(names[:2])}, ...)"
