"""Whole matrices out of tensor-parallel parts, for an optimizer that works on matrices (Muon).

Of a matrix that tp cuts, the data rank that owns it has a part on each of its tp ranks. One of these, the home of the
matrix, steps the whole of it:

1. `collect`: the other tp ranks send their parts of the parameter and of its settled gradient; the home puts them in
   their places. Of replicas (key and value heads fewer than tp ranks) the first is sent.
2. The home steps the matrix. Its momentum is here, and nowhere else.
3. `spread`: the home sends each tp rank its new part. From there they travel to the other data ranks as ever.

The parameter is collected in each step, so that what was edited in a part is what is stepped. Only ranks of one tp
group talk to each other, all of them about the same matrices in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.contract import Shard
from isograd.engine.plan import Slot
from isograd.mesh import Mesh


class Across:
    """The matrices that tp cuts and that are stepped whole."""

    def __init__(self, slots: Sequence[Slot], mesh: Mesh, owners: Mapping[str, int | None], stage: int) -> None:
        """`owners`: the data rank of each. At stage 0 all data ranks step."""
        self.group = mesh.group("tp")
        cut = {slot: shard for slot in slots if slot.name in owners and (shard := cut_over_tp(slot)) is not None}
        self._homes = {
            slot.name: home for slot, home in zip(cut, _homes(list(cut), owners, self.group.size), strict=True)
        }
        self._cuts = {slot: s for slot, s in cut.items() if stage == 0 or owners[slot.name] == slot.owner}
        self._all = {slot.name for slot in cut}

    def __contains__(self, slot: Slot) -> bool:
        return slot.name in self._all

    @property
    def slots(self) -> list[Slot]:
        """Those of which this data rank's tp group steps the whole."""
        return list(self._cuts)

    def is_home(self, slot: Slot) -> bool:
        """Whether this rank steps the matrix."""
        return slot in self._cuts and self._homes[slot.name] == self.group.index

    def collect(self, parts: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """Whole matrices at their homes, of my parts of these slots, which all ranks of the tp group give alike."""
        if not parts:
            return {}
        me, members = self.group.index, range(self.group.size)
        out: list[list[Tensor]] = [[] for _ in members]
        into: list[list[Tensor]] = [[] for _ in members]
        places: list[tuple[Tensor, Tensor]] = []
        wholes: dict[Slot, Tensor] = {}
        for slot, part in parts.items():
            shard, home = self._cuts[slot], self._homes[slot.name]
            if home != me:
                out[home] += [part.contiguous()] if _is_first(shard, me) else []
                continue
            whole = wholes[slot] = part.new_empty(slot.contract.shape)
            for member in members:
                place = _place(whole, shard, member)
                if member == me:
                    place.copy_(part)
                elif _is_first(shard, member):
                    arriving = torch.empty(place.shape, dtype=part.dtype, device=part.device)
                    into[member].append(arriving)
                    places.append((place, arriving))
        raw.exchange(out, into, self.group).wait()
        for place, arrived in places:
            place.copy_(arrived)
        return wholes

    def spread(self, wholes: Mapping[Slot, Tensor], targets: Mapping[Slot, Tensor]) -> None:
        """The parts of stepped matrices, from their homes into `targets`, which all ranks of a tp group give alike."""
        if not targets:
            return
        me, members = self.group.index, range(self.group.size)
        out: list[list[Tensor]] = [[] for _ in members]
        into: list[list[Tensor]] = [[] for _ in members]
        arriving: list[tuple[Tensor, Tensor]] = []
        for slot, target in targets.items():
            shard, home = self._cuts[slot], self._homes[slot.name]
            if home == me:
                for member in members:
                    if member == me:
                        target.copy_(_place(wholes[slot], shard, member))
                    else:
                        out[member].append(_place(wholes[slot], shard, member).to(target.dtype).contiguous())
            else:
                part = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                into[home].append(part)
                arriving.append((target, part))
        raw.exchange(out, into, self.group).wait()
        for target, part in arriving:
            target.copy_(part)


def cut_over_tp(slot: Slot) -> Shard | None:
    """How tp cuts a matrix; None: it does not."""
    shards = slot.contract.shards
    return shards[0] if slot.whole and not slot.contract.stacked and shards else None


def _homes(slots: Sequence[Slot], owners: Mapping[str, int | None], members: int) -> list[int]:
    """The tp rank of each: the largest first, to the one that has least. A function of names and whole shapes."""
    loads: dict[int | None, list[int]] = {}
    found: dict[str, int] = {}
    for slot in sorted(slots, key=lambda s: (-torch.Size(s.contract.shape).numel(), s.name)):
        mine = loads.setdefault(owners[slot.name], [0] * members)
        found[slot.name] = mine.index(min(mine))
        mine[found[slot.name]] += torch.Size(slot.contract.shape).numel()
    return [found[slot.name] for slot in slots]


def _place(whole: Tensor, shard: Shard, member: int) -> Tensor:
    start, stop = shard.ranges[member]
    return whole.narrow(shard.dim, start, stop - start)


def _is_first(shard: Shard, member: int) -> bool:
    """Whether no earlier member holds the same part."""
    return shard.ranges.index(shard.ranges[member]) == member
