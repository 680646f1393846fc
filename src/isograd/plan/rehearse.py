"""One whole step of a real program on imagined ranks: what each of them sends, owes and holds.

    ranks = rehearse(build, layout)           # build(mesh) -> (engine, batch, micro_batches)
    found = check(ranks)                      # plan/check.py; empty: everything fits together

Which ranks: of each axis the first and the last, of tp and dp also the second where there is one between, and every
pipeline stage. Ranks whose programs are equal (the same calls from the same sites) are of one kind; sizes may differ
between them, because rows and heads do not always divide evenly.

The stages of the first column are imagined once before, so that each has heard what later stages say.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import imagined, raw
from isograd.comm.record import Entry
from isograd.contract import mark_as, marks_of
from isograd.engine import Engine
from isograd.engine.plan import Slot
from isograd.errors import IsogradError, PlanError
from isograd.layout import AXES, Layout
from isograd.mesh import Mesh
from isograd.plan.shapes import LARGE, bytes_of, mark, segments, shapes

Build = Callable[[Mesh], tuple[Engine, Any, int]]  # (engine, this rank's batch, micro-batches)
ROUNDS = 4  # in which the stages of a pipeline must have told each other what they decide by


@dataclass(frozen=True)
class Debt:
    """What a parameter's contract says that this rank does with its gradient."""

    elements: int  # of this rank's part
    own: int  # of those, in the rows that this rank owns
    data: tuple[int, ...]  # ranks that hold copies
    beyond: tuple[tuple[int, ...], ...]  # further groups that its gradient is summed over
    counted: bool  # in the norm


@dataclass(frozen=True)
class Rank:
    """What one imagined rank did in a step, and what it holds."""

    rank: int
    where: str
    entries: tuple[Entry, ...]
    events: tuple[tuple[str, int], ...]
    debts: dict[str, Debt]
    normed: dict[str, int]  # elements of each gradient whose norm this rank took
    parameters: int  # bytes
    gradients: int  # bytes, when all are there
    states: int  # bytes of the optimizer's state and of masters

    @property
    def program(self) -> int:
        """Equal for ranks of one kind."""
        return hash(tuple((e.operation, e.site, e.phase, e.axes, e.purpose, len(e.ranks)) for e in self.entries))


def chosen(layout: Layout) -> list[int]:
    """The ranks to imagine: all stages; of other axes the ends, and the second one, by columns."""
    spots = {axis: sorted({0, 1, size - 1} & {*range(size)}) for axis in AXES if (size := layout.size(axis))}
    spots["pp"] = list(range(layout.pp))
    spots["cp"] = sorted({0, layout.cp - 1})
    columns = product(spots["dp"], spots["cp"], spots["tp"])
    return [layout.rank({"pp": pp, "dp": dp, "cp": cp, "tp": tp}) for dp, cp, tp in columns for pp in spots["pp"]]


def rehearse(build: Build, layout: Layout, *, large: int = LARGE, ranks: list[int] | None = None) -> list[Rank]:
    """Run one step on each of `ranks` (left out: one or more of each kind)."""
    if layout.zero == 3 or layout.ep > 1:
        raise PlanError(
            "IG270",
            f"the rehearsal of this version cannot run {str(layout)!r}",
            seen=str(layout),
            expected="zero0 to zero2, without ep: ZeRO 3 gives memory back and takes it, and what experts send depends "
            "on data",
        )
    world = imagined.World()
    with shapes(large) as mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        if layout.pp > 1:
            _settle(build, layout, world)
        found = []
        for rank in chosen(layout) if ranks is None else ranks:
            mode.normed.clear()
            found.append(_step(build, layout, rank, world, mode.normed))
    return found


def _settle(build: Build, layout: Layout, world: imagined.World) -> None:
    """Imagine the first column until no stage has to guess what another one says."""
    column = layout.ranks("pp", 0)
    for number in range(ROUNDS):
        world.unsure, last = False, number == ROUNDS - 1
        for rank in column:
            try:
                _run(build, Mesh.imagine(layout, rank, world))
            except IsogradError:  # for want of words: the weight of a loss, for one, is known on the last stage
                if last:
                    raise
                world.unsure = True
        if not world.unsure:
            return


def _run(build: Build, mesh: Mesh) -> Engine:
    engine, batch, micro_batches = build(mesh)
    collect = engine.ledger.collect

    def marked(slot: Slot, gradient: Tensor) -> None:
        """Each gradient that autograd has finished is marked with its parameter's name."""
        mark(gradient, ((slot.name, gradient.numel()),))
        collect(slot, gradient)

    engine.ledger.collect = marked  # type: ignore[method-assign]
    engine.train_step(batch, micro_batches)
    return engine


def _step(build: Build, layout: Layout, rank: int, world: imagined.World, normed: list[Any]) -> Rank:
    mesh = Mesh.imagine(layout, rank, world)
    with raw.recording(segments) as record:
        engine = _run(build, mesh)
    slots = engine.plan.slots
    debts = {
        slot.name: Debt(
            slot.parameter.numel(),
            slot.rows(slot.parameter.data).numel(),
            mesh.ranks(slot.contract.data),
            tuple(mesh.ranks(axes) for axes in slot.contract.owes),
            slot.contract.counted_here(mesh),
        )
        for slot in slots
    }
    counted: dict[str, int] = {}
    for name, size in (segment for found in normed for segment in found):
        counted[name] = counted.get(name, 0) + size
    parameters = {id(p): p for p in engine.model.parameters()}
    states = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    masters = [m for g in engine.optimizer.param_groups for m in g["params"] if m.dtype == torch.float32]
    wide = all(p.dtype == torch.float32 for p in parameters.values())
    return Rank(
        *(rank, mesh.where(), tuple(record.entries), tuple(record.events), debts, counted),
        bytes_of(parameters.values()),
        sum(slot.parameter.numel() * slot.dtype.itemsize for slot in slots),
        bytes_of(states) + (0 if wide else bytes_of(masters)),
    )


def without_memory(model: nn.Module) -> nn.Module:
    """A model on the meta device, with parameters of shapes alone in place of its own: inside `shapes`."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            new = made.get(id(parameter))
            if new is None:
                value = torch.ones(parameter.shape, dtype=parameter.dtype)
                new = made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                mark_as(new, marks_of(parameter))
            module._parameters[leaf] = new
    return model


def kinds(ranks: list[Rank]) -> Iterator[list[Rank]]:
    """Ranks with equal programs together."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.program, []).append(rank)
    yield from found.values()
