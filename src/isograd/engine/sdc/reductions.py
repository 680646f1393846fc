"""A checksum through a step's reductions: what was sent, what arrived, what was added up.

A sum is linear: with a fixed vector v of random signs, the sum over the ranks of <v, g_r> is <v, G>. So for every slot
of a bucket and every owner,

    a sender     takes <v, rows> and a fingerprint of what it is about to send,
    the owner    takes a fingerprint of what has arrived: another one, and the message was changed on its way,
                 adds it up twice: the same bits, or one of the two sums is wrong,
                 and takes <v, sum>: the same up to rounding, or it was added up wrongly both times.

`check` brings the senders' numbers to the owners, and all ranks refuse alike. The bound of the last comparison:
each of the n - 1 additions of an element is off by at most half a unit in the last place of a partial sum. The signs do
not depend on the data, so (Hoeffding) the errors add up to more than t times the root of their squares with a
probability below 2 exp(-t^2 / 2): with t = 8, 3e-14. A change of one element is found when it is larger than this
bound: for two ranks 6 units in the last place of the slot's norm. Smaller ones are not.

All other messages of data (within a layer, between stages, a block gathered by ZeRO 3) have a fingerprint where they
leave and one where they arrive, up to `check`.

On NCCL's own reduce-scatter single messages cannot be seen: only the sum is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.comm.fingerprint import fingerprint
from isograd.comm.group import Group
from isograd.comm.transport import Tensors
from isograd.core.mesh import Mesh
from isograd.engine.packing import Packing, Reduction
from isograd.engine.plan import Bucket
from isograd.errors import EngineError

T = 8.0  # Hoeffding's t
LENGTH = 1 << 16  # elements of v; longer tensors use it again, with another sign
_EPS64 = 2.0**-52
SHOWN = 6


@cache
def _signs(device: torch.device) -> Tensor:
    bits = torch.randint(0, 2, (LENGTH,), generator=torch.Generator().manual_seed(20261122))
    return (bits * 2 - 1).double().to(device)


def numbers_of(pieces: Sequence[Tensor]) -> Tensor:
    """[pieces, 4]: <v, piece>, <piece, piece> and the two halves of the fingerprint of each, in fp64. The fingerprint
    is that of the values in fp64, as a message may be of another dtype than what is sent."""
    found = []
    for piece in pieces:
        signs, total = _signs(piece.device), torch.zeros(4, dtype=torch.float64, device=piece.device)
        for number, part in enumerate(piece.detach().reshape(-1).split(LENGTH)):
            wide = part.double()
            sign = 1.0 if (number * number + number // 3) % 2 == 0 else -1.0
            prints = fingerprint(wide) * (2 * number + 1)
            halves = (prints & 0xFFFFFFFF).double(), (prints >> 32).double()
            total += torch.stack((torch.dot(wide, signs[: len(wide)]) * sign, torch.dot(wide, wide), *halves))
        found.append(total)
    return torch.stack(found) if found else torch.zeros(0, 4, dtype=torch.float64)


class MessageSums:
    """Fingerprints of the messages that this rank sends and receives, but for those that `ReductionSums` sees."""

    def __init__(self) -> None:
        self._sent: dict[tuple[Any, ...], list[Tensor]] = {}  # by (axes, purpose, ranks, sender, receiver, tag)
        self._arrived: dict[tuple[Any, ...], list[Tensor | None]] = {}  # in the order of the sender; None: under way

    def note(self, group: Group, out: Tensors, into: Tensors, tag: int) -> Callable[[], None]:
        """As messages start. Returns what is to be called when they have been waited for."""
        if group.purpose in ("gradients", "copies"):  # copies of the state travel beside the steps
            return lambda: None
        known = dict[int, Tensor]()  # one tensor may go to every member
        waiting = list[tuple[list[Tensor | None], int, Tensor]]()
        me, key = group.ranks[group.index], (group.axes, group.purpose, group.ranks)
        for peer, sends, receives in zip(group.ranks, out, into, strict=True):
            if peer == me:
                continue
            for tensor in filter(Tensor.numel, sends):
                if id(tensor) not in known:
                    known[id(tensor)] = fingerprint(tensor)
                self._sent.setdefault((*key, me, peer, tag), []).append(known[id(tensor)])
            for tensor in filter(Tensor.numel, receives):
                row = self._arrived.setdefault((*key, peer, me, tag), [])
                waiting.append((row, len(row), tensor))
                row.append(None)

        def arrived() -> None:
            for row, place, tensor in waiting:
                row[place] = fingerprint(tensor)

        return arrived

    def wrong(self, mesh: Mesh) -> list[str]:
        """On all ranks: which messages have come to this rank with other bits."""
        mine = [[str(key), torch.stack(row).tolist()] for key, row in self._sent.items()]
        sent = dict(pair for pairs in all_gather_object(mine, mesh) for pair in pairs)
        found = []
        for key, row in self._arrived.items():
            pairs = zip(sent.get(str(key), []), row, strict=False)
            if any(there is not None and here != int(there) for here, there in pairs):
                axes, _, _, sender, me, _ = key
                between = f"rank {sender}, which sent it, and rank {me}, which received it"
                found.append(f"a message of {axes} was changed between {between}")
        return found


class ReductionSums:
    """The numbers of one step, by bucket. A bucket may leave several times; sender and owner add in the same order."""

    def __init__(self) -> None:
        self._sent: dict[Bucket, Tensor] = {}  # [owners, slots, 4]
        self._arrived: dict[Bucket, Tensor] = {}  # [senders, slots, 4]; not there where single messages are not seen
        self._total: dict[Bucket, Tensor] = {}  # [slots, 4]
        self._apart: dict[Bucket, Tensor] = {}  # [slots]: whether two sums of the same pieces were different
        self.messages = MessageSums()

    def sending(self, bucket: Bucket, packing: Packing, flat: Tensor) -> None:
        """Before a bucket leaves."""
        owners = enumerate(flat.split(packing.sizes))
        _add(self._sent, bucket, torch.stack([numbers_of(packing.rows(chunk, owner)) for owner, chunk in owners]))

    def wait(self, bucket: Bucket, reduction: Reduction) -> list[Tensor]:
        """In place of the reduction's: my rows, added up twice."""
        pieces, rows_of = reduction.wait_for_pieces(), reduction.packing.rows
        if len(pieces) > 1:
            _add(self._arrived, bucket, torch.stack([numbers_of(rows_of(piece)) for piece in pieces]))
        again = [piece.clone() for piece in pieces]
        rows = rows_of(reduction.sum(pieces))
        twice = zip(rows, rows_of(reduction.sum(again)), strict=True)
        _add(self._apart, bucket, torch.stack([fingerprint(one) != fingerprint(two) for one, two in twice]).long())
        _add(self._total, bucket, numbers_of(rows))
        return rows

    def check(self, groups: Iterable[Group], mesh: Mesh) -> None:
        """All ranks together, when all is finished: refuse the step if what was sent is not what came or was added."""
        wrong = self.messages.wrong(mesh)
        wrong += [words for group in groups if group.size > 1 for words in self._compare(group)]
        said = [word for words in all_gather_object(wrong[:SHOWN], mesh) for word in words]
        if said:
            seen = "; ".join(said[:SHOWN]) + ("; ..." if len(said) > SHOWN else "")
            raise EngineError("IG580", seen=seen, where=mesh.describe_rank())

    def _compare(self, group: Group) -> list[str]:
        """What is wrong with my rows."""
        buckets = sorted((b for b in self._sent if b.owners.ranks == group.ranks), key=lambda bucket: bucket.number)
        if not buckets:
            return []

        def every(found: Mapping[Bucket, Tensor], dim: int) -> Tensor:
            return torch.cat([found[bucket] for bucket in buckets], dim)

        sent, me = every(self._sent, 1), group.ranks[group.index]  # [owners, slots, 4]
        said = torch.stack(raw.all_to_all(list(sent.unbind(0)), [sent.shape[1:]] * group.size, group))
        slots = [slot for bucket in buckets for slot in bucket.slots]
        names = [slot.name for slot in slots]
        wrong = []
        if all(bucket in self._arrived for bucket in buckets):
            arrived = every(self._arrived, 1)  # [senders, slots, 4]
            for sender, slot in (said[..., 2:] != arrived[..., 2:]).any(2).nonzero().tolist():
                between = f"rank {group.ranks[sender]}, which sent them, and rank {me}, which owns them"
                wrong.append(f"rows of {names[slot]} were changed between {between}")
            said = arrived  # what did arrive must add up
        for slot in every(self._apart, 0).nonzero().flatten().tolist():
            twice = "a second time the result was another"
            wrong.append(f"rows of {names[slot]} were added up wrongly on rank {me}: {twice}")
        sizes = [(torch.finfo(slot.dtype).eps, slot.rows(slot.parameter).numel()) for slot in slots]
        additions = math.sqrt((group.size - 1) * group.size)
        rounding = [eps / 2 * additions + _EPS64 * math.sqrt(min(count, LENGTH)) for eps, count in sizes]
        bound = T * torch.tensor(rounding, dtype=torch.float64, device=said.device) * said[..., 1].sum(0).sqrt()
        apart = (said[..., 0].sum(0) - every(self._total, 0)[:, 0]).abs()
        for slot in (apart > bound).nonzero().flatten().tolist():
            off = f"off by {float(apart[slot]):.3g}, rounding explains {float(bound[slot]):.3g}"
            wrong.append(f"rows of {names[slot]} were added up wrongly on rank {me}: {off}")
        return wrong


def _add(into: dict[Bucket, Tensor], bucket: Bucket, value: Tensor) -> None:
    into[bucket] = into[bucket] + value if bucket in into else value
