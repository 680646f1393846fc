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
BUFFER = "buffer/"  # of which every stage may write a copy


@dataclass(frozen=True)
class Saves:
    """What one rank knows of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    box: Box | None  # what this rank writes
    slot: tuple[str, Contract, tuple[int, ...], bool] | None  # the plan: name, contract, cuts, whole; of a parameter


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
    meshes: dict[int, Mesh] = {}
    boxes: dict[str, list[tuple[int, Box]]] = {}  # by tensor: (rank, what it writes)
    shapes: dict[str, tuple[int, ...]] = {}
    for known in stages.values():
        for key, one in ranks[known[0]].items():
            shapes[key] = one.shape
            planned = {} if one.slot is None else dict(_planned(one.slot, layout, known[0], of_stage, meshes))
            said = {rank: ranks[rank][key].box for rank in known if key in ranks[rank]}
            mine = boxes.setdefault(key, [])
            mine += [(rank, box) for rank, box in (planned | said).items() if box is not None]
    for key, written in boxes.items():
        yield from _wrong(key, shapes[key], written)


def _planned(
    slot: tuple[str, Contract, tuple[int, ...], bool], layout: Layout, first: int, ranks: int, meshes: dict[int, Mesh]
) -> Iterator[tuple[int, Box]]:
    """The box of each rank of a stage that writes some of a parameter."""
    name, contract, cuts, whole = slot
    for rank in range(first - first % ranks, first - first % ranks + ranks):
        mesh = meshes.get(rank)
        if mesh is None:
            mesh = meshes[rank] = Mesh.unbound(layout, rank)
        if not contract.counted_here(mesh):
            continue
        box = list(contract.local(mesh)) or [(0, 1)]
        rows, here = box[0][1] - box[0][0], cuts
        if rows != cuts[-1]:  # another rank's part has another size
            sizes = [stop - start for start, stop in box]
            here = tuple(rows if cut else 0 for cut in cuts) if whole else cut_rows(name, sizes, len(cuts) - 1)
        owner = mesh.index(contract.data)
        if here[owner] < here[owner + 1]:
            box[0] = (box[0][0] + here[owner], box[0][0] + here[owner + 1])
            yield rank, tuple(box)


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
        yield f"of {key!r}, {total} of {math.prod(shape)} elements are written by {many}{named}; the first at [{where}]"
