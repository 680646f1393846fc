"""One whole step of a real program on simulated ranks: what each of them sends, owes and holds.

Which ranks: those of the first column, which are all pipeline stages. Stages whose passes make the same calls are of
one kind. Where a kind begins and where it ends, ranks beside the first column are simulated: along each other axis the
second and the last one, and the rank that is last along all. Sizes may differ between ranks of a kind, because rows and
heads do not always divide evenly.

The ranks of the first column run together, each hearing what the others say. Those beside it hear what was said there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import fake
from isograd.comm.record import Entry, Record, recording
from isograd.core.contract import metadata_of, set_init_fn, set_metadata
from isograd.core.layout import AXES, Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.engine.plan import Slot
from isograd.engine.zero3.sharded_param import ShardedParam
from isograd.nn.moe import MoE
from isograd.nn.routing import ExpertOptions
from isograd.plan.allocations import GRADIENTS, OPTIMIZER, PARAMETERS, Allocations
from isograd.plan.peak import Peak, Taken, of_gpu, peak
from isograd.plan.saved import Saves, saves
from isograd.plan.shapes import LARGE, Shapes, bytes_of, mark, segments

Build = Callable[[Mesh], tuple[Engine, Any, int]]  # (engine, this rank's batch, micro-batches)


@dataclass(frozen=True)
class ExpectedReduction:
    """What a parameter's contract says that this rank does with its gradient."""

    elements: int  # of this rank's part
    own: int  # of those, in the rows that this rank owns
    data: tuple[int, ...]  # ranks that hold copies
    beyond: tuple[tuple[int, ...], ...]  # further groups that its gradient is summed over
    counted: bool  # in the norm


@dataclass(frozen=True)
class RehearsedRank:
    """What one simulated rank did in a step, and what it holds."""

    rank: int
    where: str
    entries: tuple[Entry, ...]
    start: int  # so many entries are of the engine's making, which happens once; the others are the step's
    events: tuple[tuple[str, int], ...]
    expected: dict[str, ExpectedReduction]
    normed: dict[str, int]  # elements of each gradient whose norm this rank took
    parameters: int  # bytes
    states: int  # bytes of the optimizer's state and of masters
    peak: Peak
    saves: dict[str, Saves]  # by tensor of a checkpoint

    @property
    def program(self) -> int:
        """Equal for ranks of one kind: they make the same calls in a step."""
        return hash(tuple(map(_call, self.step)))

    @property
    def step(self) -> tuple[Entry, ...]:
        """What this rank sends and receives in the step."""
        return self.entries[self.start :]

    @property
    def stage(self) -> int:
        """Equal for pipeline stages that do the same passes, in any order, with as many elements. A pass is what lies
        between two messages of the pipeline."""
        passes: Counter[int] = Counter()
        for pipeline, calls in groupby(self.entries, lambda entry: entry.axes.startswith("pp")):
            passes[0 if pipeline else hash(tuple(map(_call, calls)))] += 1
        sizes = Counter(each.elements for each in self.expected.values())
        del passes[0]
        return hash((frozenset(passes.items()), frozenset(sizes.items())))


def _call(entry: Entry) -> tuple[object, ...]:
    return entry.operation, entry.site, entry.phase, entry.axes, entry.purpose, len(entry.ranks)


def rehearse(
    build: Build,
    layout: Layout,
    *,
    large: int = LARGE,
    taken: Taken = of_gpu,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> list[RehearsedRank]:
    """Run one step on each rank of the first column, and on those beside it, where a kind of stage begins and ends.

    taken: the bytes that an allocator takes for a piece of memory.
    tell: hears how many ranks have run, of how many.
    """
    world, mode = fake.FakeWorld(), Shapes(large)
    step = partial(_step, build, layout, world, taken)

    def run(*ranks: int) -> list[RehearsedRank]:
        found = world.run({rank: partial(step, rank, mode.another()) for rank in ranks})
        return [found[rank] for rank in ranks]

    found = run(*layout.ranks("pp", 0))
    others = neighbours(layout, found)
    for rank in others:
        tell(len(found), layout.pp + len(others))
        found += run(rank)
    return found


def neighbours(layout: Layout, column: list[RehearsedRank]) -> list[int]:
    """The ranks to imagine beside the first column: along each of dp, cp and tp the second and the last one, and the
    rank that is last of all three. Of stages that are next to each other and of one kind: on the first and the last."""
    last = {axis: layout.size(axis) - 1 for axis in AXES[1:]}
    spots = [dict.fromkeys(last, 0) | {axis: place} for axis in last for place in {1, last[axis]} if last[axis]]
    spots += [last] if last not in spots else []
    kinds = [rank.stage for rank in column]
    ends = {pp for pp in range(layout.pp) if pp in (0, layout.pp - 1) or {*kinds[pp - 1 : pp + 2]} != {kinds[pp]}}
    return [layout.rank({"pp": pp, **spot}) for pp in sorted(ends) for spot in spots if any(spot.values())]


def _run(build: Build, mesh: Mesh, allocations: Allocations, record: Record, taken: Taken) -> tuple[Engine, Peak, int]:
    engine, batch, micro_batches = build(mesh)
    start = len(record.entries)
    for module in engine.model.modules():
        if isinstance(module, MoE):
            module.choose = evenly
    _name_states(engine, allocations)
    step_state, collect, finish = engine.step_state, engine.step_state.collect, engine.step_state.finish_reductions

    def marked(slot: Slot, gradient: Tensor) -> None:
        """Each gradient that autograd has finished is marked with its parameter's name."""
        mark(gradient, ((slot.name, gradient.numel()),))
        collect(slot, gradient)
        allocations.name(step_state.now.local[slot], GRADIENTS, _pattern(slot.name))

    def settled(flush: bool) -> None:
        finish(flush)
        for slot, rows in step_state.now.final_shards.items():
            allocations.name(rows, GRADIENTS, _pattern(slot.name))

    step_state.collect, step_state.finish_reductions = marked, settled  # type: ignore[method-assign]
    step_state.reducer.buffers.give_back = lambda flat: None  # type: ignore[method-assign]  # as on a GPU
    began = allocations.moment
    engine.train_step(batch, micro_batches)
    for state in engine.optimizer.state.values():
        for entry, value in state.items():
            if isinstance(value, Tensor):
                allocations.name(value, OPTIMIZER, entry)
    return engine, peak(allocations, began, taken), start


def _name_states(engine: Engine, allocations: Allocations) -> None:
    """Say which memory is that of parameters and masters. The whole parameters of ZeRO 3 come and go."""
    for slot in engine.plan.slots:
        allocations.name(engine._sharded_optimizer.masters[slot.name], OPTIMIZER, "masters")
    for record in engine.table:
        if engine._zero3 is None or engine._zero3.params[id(record.parameter)].now.mine.dtype == record.parameter.dtype:
            allocations.name(engine.local_shard(record.name), PARAMETERS, _pattern(record.name))
    for param in engine._zero3.params.values() if engine._zero3 is not None else ():
        allocations.name(param.now.full, PARAMETERS, "gathered (ZeRO 3)")
        allocations.resized(param.now.full)
        for change in ("alloc_full", "free_full"):
            setattr(param, change, _noticed(getattr(param, change), param, allocations))


def _noticed(change: Callable[..., None], param: ShardedParam, allocations: Allocations) -> Callable[..., None]:
    def both(*args: Any, **named: Any) -> None:
        change(*args, **named)
        allocations.name(param.now.full, PARAMETERS, "gathered (ZeRO 3)")
        allocations.resized(param.now.full)

    return both


def _follow(part: Tensor, total: Tensor) -> None:
    if found := segments(part):
        mark(total, found)


def _pattern(name: str) -> str:
    """The name of a parameter with those of other layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _step(build: Build, layout: Layout, world: fake.FakeWorld, taken: Taken, rank: int, mode: Shapes) -> RehearsedRank:
    mesh = Mesh.imagine(layout, rank, world)
    mode.allocations = Allocations()
    with mode, recording(segments, _follow) as record:
        engine, top, start = _run(build, mesh, mode.allocations, record, taken)
    mode.allocations = None
    slots = engine.plan.slots
    expected = {
        slot.name: ExpectedReduction(
            slot.parameter.numel(),
            slot.rows(slot.parameter.data).numel(),
            mesh.ranks(slot.contract.data),
            tuple(mesh.ranks(axes) for axes in slot.contract.partial_over),
            slot.contract.is_primary_replica(mesh),
        )
        for slot in slots
    }
    counted: dict[str, int] = {}
    for name, size in (segment for found in mode.normed for segment in found):
        counted[name] = counted.get(name, 0) + size
    parameters = [engine.local_shard(record.name) for record in engine.table]
    states = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    masters = [m for g in engine.optimizer.param_groups for m in g["params"] if m.dtype == torch.float32]
    wide = all(p.dtype == torch.float32 for p in parameters)
    return RehearsedRank(
        *(rank, mesh.describe_rank(), tuple(record.entries), start, tuple(record.events), expected, counted),
        bytes_of(parameters),
        bytes_of(states) + (0 if wide else bytes_of(masters)),
        top,
        saves(engine),
    )


def without_memory(model: nn.Module, *, later: bool = False) -> nn.Module:
    """A model on the meta device, with parameters of shapes alone in place of its own: inside `shapes`. `later`: the
    engine puts them there, this rank's rows alone, as `isograd train` does at ZeRO 3."""
    if later:
        for own in model.parameters():
            set_init_fn(own, partial(_ones, dtype=own.dtype))
        return model
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            new = made.get(id(parameter))
            if new is None:
                value = torch.ones(parameter.shape, dtype=parameter.dtype)
                new = made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                set_metadata(new, metadata_of(parameter))
            module._parameters[leaf] = new
    return model


def _ones(box: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones([stop - start for start, stop in box], dtype=dtype, device=device)


def kinds(ranks: list[RehearsedRank]) -> Iterator[list[RehearsedRank]]:
    """Ranks with equal programs together."""
    found: dict[int, list[RehearsedRank]] = {}
    for rank in ranks:
        found.setdefault(rank.program, []).append(rank)
    yield from found.values()


def evenly(scores: Tensor, options: ExpertOptions, bias: Tensor | None = None) -> Tensor:
    """Which experts tokens choose in a rehearsal, [tokens, per_token]: nobody knows before there is a model and data,
    so they choose evenly, whatever the scores are. Token t chooses the experts t k, t k + 1, ... t k + k - 1, counted
    around. Takes the place of nn/routing.py's `choose`; ranks with as many tokens tell each other equal counts."""
    slots = torch.arange(len(scores) * options.per_token)
    return (slots % options.number).view(len(scores), options.per_token)
