"""Whether a checkpoint would hold every element of every tensor once: who writes what, of all ranks of a world.

A simulated rank says what it writes itself (engine/state.py's parts, after a step). Of the ranks between them, the
plan of the first rank of their stage says it: contracts and row cuts name the box of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from isograd.core.contract import Contract
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine, state
from isograd.engine.plan import cut_rows, slot_of
from isograd.engine.sdc.memory import parameter_of

Box = tuple[tuple[int, int], ...]
Slotted = tuple[str, Contract, tuple[int, ...], bool]  # name, contract, cuts, whole
BUFFER = "buffer/"  # of which every stage may write a copy
NOTHING: dict[int, Box] = {}  # is planned of what is no parameter


@dataclass(frozen=True)
class Saves:
    """What one rank knows of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    box: Box | None  # what this rank writes
    slot: Slotted | None  # the plan, of a parameter


def saves(engine: Engine) -> dict[str, Saves]:
    """What this rank writes into a checkpoint, and its plan."""
    masters, held = engine._sharded_optimizer.masters, engine.optimizer.state
    entries = {
        name: [e for e, v in held.get(master, {}).items() if isinstance(v, Tensor) and v.shape == master.shape != ()]
        for name, master in masters.items()
    }
    slots = {f"{slot.name}": slot for slot in engine.plan.slots}
    slots |= {r.name: slot_of(r, engine.mesh) for r in engine.table if r.name not in slots}
    found = {}
    for part in state.parts(engine, entries):
        box, tensor = part.written
        slot = None if part.key.startswith(BUFFER) else slots[parameter_of(part.key)]
        plan = None if slot is None else (slot.name, slot.contract, slot.cuts, slot.uncut_matrix)
        found[part.key] = Saves(part.shape or (1,), box if tensor.numel() else None, plan)
    return found


def holes(ranks: Mapping[int, Mapping[str, Saves]], layout: Layout) -> Iterator[str]:
    """What would be written by no rank, or by several. `ranks`: what each simulated rank says, by number."""
    plans = _Plans(layout)
    stages: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        stages.setdefault(rank // plans.of_stage, []).append(rank)
    written: dict[str, list[_Said]] = {}  # of each tensor, what each stage writes
    shapes: dict[str, tuple[int, ...]] = {}
    for number, known in stages.items():
        first = number * plans.of_stage
        for key, one in ranks[known[0]].items():
            shapes[key] = one.shape
            planned = NOTHING if one.slot is None else plans.planned(one.slot, first)
            said = tuple((rank - first, ranks[rank][key].box) for rank in known if key in ranks[rank])
            written.setdefault(key, []).append(_Said(first, planned, said))
    right = set()  # tensors that are written in the same way are looked at once
    for key, parts in written.items():
        same = shapes[key], key.startswith(BUFFER), tuple((id(part.planned), part.said) for part in parts)
        if same in right:
            continue
        boxes = {rank: box for part in parts for rank, box in part.boxes() if box is not None}
        wrong = list(_wrong(key, shapes[key], list(boxes.items())))
        if not wrong:
            right.add(same)
        for what in wrong:
            yield f"of {key!r}, {what}"


class _Said(NamedTuple):
    """What the ranks of one stage write of a tensor. Ranks are counted from the stage's first one."""

    first: int
    planned: Mapping[int, Box]
    said: tuple[tuple[int, Box | None], ...]  # by the ranks that were simulated

    def boxes(self) -> Iterator[tuple[int, Box | None]]:
        """What each rank of the world writes; what it says counts, where it was simulated."""
        return ((self.first + rank, box) for rank, box in {**self.planned, **dict(self.said)}.items())


class _Plans:
    """What the ranks of a stage write by plan. Stages with equal contracts and cuts have equal plans."""

    def __init__(self, layout: Layout) -> None:
        self.of_stage = layout.world_size // layout.pp
        self._layout = layout
        self._places: dict[str, list[int]] = {}  # by axes: the place of each rank of the first stage in its group
        self._planned: dict[tuple[object, ...], dict[int, Box]] = {}

    def planned(self, slot: Slotted, first: int) -> dict[int, Box]:
        """The box of each rank that writes some of a parameter. `first`: the first rank of its stage."""
        name, contract, cuts, whole = slot
        cut = contract.cut
        even = cut is None or len({stop - start for start, stop in cut.ranges}) == 1
        key = contract, cuts, whole, "" if even else name, first if contract.ties else 0
        if key not in self._planned:
            boxes = self._planned[key] = {}
            parts: dict[int, tuple[Box, tuple[int, ...]] | None] = {}  # by place beside: its part, and its rows' ends
            places = zip(self._along(contract.model_parallel_axis), self._along(contract.data), strict=True)
            for rank, (place, owner) in enumerate(places):
                if place not in parts:
                    parts[place] = _part(contract, cuts, whole, Mesh.unbound(self._layout, first + rank))
                part = parts[place]
                if part is not None and part[1][owner] < part[1][owner + 1]:
                    (start, _), *rest = part[0]
                    boxes[rank] = ((start + part[1][owner], start + part[1][owner + 1]), *rest)
        return self._planned[key]

    def _along(self, axes: str) -> list[int]:
        if axes not in self._places:
            places = [0] * self._layout.world_size
            for group in self._layout.groups(axes):
                for place, rank in enumerate(group):
                    places[rank] = place
            self._places[axes] = places[: self.of_stage]
        return self._places[axes]


def _part(contract: Contract, cuts: tuple[int, ...], whole: bool, mesh: Mesh) -> tuple[Box, tuple[int, ...]] | None:
    """A rank's part of a parameter, and where its owners' rows end; None: another rank's replica counts."""
    if not contract.is_primary_replica(mesh):
        return None
    box = contract.local(mesh) or ((0, 1),)
    sizes = [stop - start for start, stop in box]
    if sizes[0] != cuts[-1]:  # another size than the part that `cuts` are of
        cuts = tuple(sizes[0] if cut else 0 for cut in cuts) if whole else cut_rows(sizes, len(cuts) - 1)
    return box, cuts


def _wrong(key: str, shape: tuple[int, ...], written: Sequence[tuple[int, Box]]) -> Iterator[str]:
    """What is wrong with the boxes of one tensor: counted on the grid of all their ends."""
    ends = [sorted({0, size, *(e for _, box in written for e in box[dim])}) for dim, size in enumerate(shape)]
    places = [{end: place for place, end in enumerate(of_dim)} for of_dim in ends]
    counts = np.zeros([len(of_dim) - 1 for of_dim in ends], dtype=np.int32)
    for _, box in written:
        counts[tuple(slice(place[a], place[b]) for place, (a, b) in zip(places, box, strict=True))] += 1
    most = math.inf if key.startswith(BUFFER) else 1
    for wrong, many in ((counts == 0, "no rank"), (counts > most, "several ranks")):
        cells = np.argwhere(wrong)
        if not len(cells):
            continue
        total = sum(math.prod(int(e[i + 1] - e[i]) for e, i in zip(ends, cell, strict=True)) for cell in cells)
        first = [(e[i], e[i + 1]) for e, i in zip(ends, cells[0].tolist(), strict=True)]
        who = [r for r, box in written if all(a <= c < b for (a, b), (c, _) in zip(box, first, strict=True))]
        named = f": {who[:6]}" if who else ""
        where = ", ".join(f"{a}:{b}" for a, b in first)
        yield f"{total} of {math.prod(shape)} elements are written by {many}{named}; the first at [{where}]"
