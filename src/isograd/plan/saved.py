"""Whether a checkpoint would hold every element of every tensor once: who writes what, of all ranks of a world.

An imagined rank says what it writes itself (engine/state.py's parts, after a step). Of the ranks between them, the plan
of the first rank of their stage says it: contracts and row cuts name the box of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from isograd.contract import Contract
from isograd.engine import Engine, state
from isograd.engine.plan import cut_rows, slot_of
from isograd.layout import Layout
from isograd.mesh import Mesh

Box = tuple[tuple[int, int], ...]
Slotted = tuple[str, Contract, tuple[int, ...], bool]  # name, contract, cuts, whole
BUFFER = "buffer/"  # of which every stage may write a copy


@dataclass(frozen=True)
class Saves:
    """What one rank knows of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    box: Box | None  # what this rank writes
    slot: Slotted | None  # the plan, of a parameter


def saves(engine: Engine) -> dict[str, Saves]:
    """What this rank writes into a checkpoint, and its plan."""
    masters, held = engine._optimized.masters, engine.optimizer.state
    entries = {
        name: [e for e, v in held.get(master, {}).items() if isinstance(v, Tensor) and v.shape == master.shape != ()]
        for name, master in masters.items()
    }
    slots = {f"{slot.name}": slot for slot in engine.plan.slots}
    slots |= {r.name: slot_of(r, engine.mesh) for r in engine.table if r.name not in slots}
    found = {}
    for part in state.parts(engine, entries):
        box, tensor = part.written
        slot = None if part.key.startswith(BUFFER) else slots[_parameter(part.key)]
        plan = None if slot is None else (slot.name, slot.contract, slot.cuts, slot.whole)
        found[part.key] = Saves(part.shape or (1,), box if tensor.numel() else None, plan)
    return found


def _parameter(key: str) -> str:
    """The parameter of "model/NAME" or "optimizer/ENTRY/NAME"."""
    return key.split("/", 2)[-1] if key.startswith("optimizer/") else key.split("/", 1)[1]


def holes(ranks: Mapping[int, Mapping[str, Saves]], layout: Layout) -> Iterator[str]:
    """What would be written by no rank, or by several. `ranks`: what each imagined rank says, by number."""
    of_stage = layout.world_size // layout.pp
    stages: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        stages.setdefault(rank // of_stage, []).append(rank)
    boxes: dict[str, dict[int, Box]] = {}  # by tensor: what each rank writes
    shapes: dict[str, tuple[int, ...]] = {}
    for number, known in stages.items():
        stage = _Stage(layout, range(number * of_stage, (number + 1) * of_stage))
        for key, one in ranks[known[0]].items():
            shapes[key] = one.shape
            planned = {} if one.slot is None else stage.planned(one.slot)
            said = {rank: ranks[rank][key].box for rank in known if key in ranks[rank]}
            mine = {rank: box for rank, box in (planned | said).items() if box is not None}
            boxes[key] = boxes.get(key, {}) | mine
    found: dict[object, list[str]] = {}  # tensors that are written in the same way have the same holes
    for key, written in boxes.items():
        same = shapes[key], key.startswith(BUFFER), tuple(written.items())
        if same not in found:
            found[same] = list(_wrong(key, shapes[key], list(written.items())))
        for what in found[same]:
            yield f"of {key!r}, {what}"


class _Stage:
    """The ranks of a pipeline stage, and what they write by plan."""

    def __init__(self, layout: Layout, ranks: range) -> None:
        self._meshes = {rank: Mesh.unbound(layout, rank) for rank in ranks}
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # by data axes: (rank, place beside, owner)
        self._planned: dict[Slotted, dict[int, Box]] = {}

    def planned(self, slot: Slotted) -> dict[int, Box]:
        """The box of each rank that writes some of a parameter."""
        if slot not in self._planned:
            self._planned[slot] = dict(self._boxes(*slot))
        return self._planned[slot]

    def _boxes(self, name: str, contract: Contract, cuts: tuple[int, ...], whole: bool) -> Iterator[tuple[int, Box]]:
        if contract.data not in self._places:
            self._places[contract.data] = [
                (rank, mesh.index(contract.beside), mesh.index(contract.data)) for rank, mesh in self._meshes.items()
            ]
        parts: dict[int, tuple[Box, tuple[int, ...]] | None] = {}  # by place beside: its part, and the cuts of its rows
        for rank, place, owner in self._places[contract.data]:
            if place not in parts:
                parts[place] = _part(name, contract, cuts, whole, self._meshes[rank])
            part = parts[place]
            if part is not None and part[1][owner] < part[1][owner + 1]:
                (first, _), *rest = part[0]
                yield rank, ((first + part[1][owner], first + part[1][owner + 1]), *rest)


def _part(
    name: str, contract: Contract, cuts: tuple[int, ...], whole: bool, mesh: Mesh
) -> tuple[Box, tuple[int, ...]] | None:
    """A rank's part of a parameter, and where its owners' rows end; None: another rank's replica counts."""
    if not contract.counted_here(mesh):
        return None
    box = contract.local(mesh) or ((0, 1),)
    sizes = [stop - start for start, stop in box]
    if sizes[0] != cuts[-1]:  # another size than the part that `cuts` are of
        cuts = tuple(sizes[0] if cut else 0 for cut in cuts) if whole else cut_rows(name, sizes, len(cuts) - 1)
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
