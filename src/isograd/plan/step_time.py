"""How long a step takes under a layout on a machine, and where the time goes.

Without a pipeline, micro-batches follow one another. With one, the schedule of pipeline/schedule.py is simulated with
the costs of each stage and the time of a send between neighbours; of a long step the first micro-batches are simulated
until their pace is steady, and the rest continue at it. After the last backward come what is left of the gradients'
reduction, the optimizer, and the gather of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isograd.core.layout import Layout
from isograd.pipeline.schedule import Action, Timed, build
from isograd.plan import comm_volume
from isograd.plan.costs import Cost, Costs
from isograd.plan.machine import Machine
from isograd.plan.work import BlockKind, Work, kinds_of, of_block, of_ends, params_on_rank

ROUNDS = 3  # at least so many are simulated, until two last as long: one is a micro-batch for each pipeline rank
PARTS = ("compute", "tp", "cp", "ep", "dp", "bubble", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """A predicted step."""

    seconds: float
    spread: float
    mfu: float  # in PaLM's convention: Work.flops
    parts: dict[str, float]  # seconds of the rank that has the most to do; they add up to the step

    @property
    def low(self) -> float:
        """The shorter end of the interval that should hold 90 of 100 runs."""
        return self.seconds * math.exp(-self.spread)

    @property
    def high(self) -> float:
        """The longer end."""
        return self.seconds * math.exp(self.spread)


@dataclass(frozen=True)
class StageTimes:
    """One pipeline rank: seconds of each of its stages, forward and backward, and of what follows."""

    stages: list[tuple[Cost, Cost]]
    after: dict[str, float]  # seconds after the last backward, by part

    @property
    def busy(self) -> float:
        """Seconds of one micro-batch."""
        return sum(forward.total + backward.total for forward, backward in self.stages)


Blocks = dict[tuple[object, ...], dict[BlockKind, dict[str, Cost]]]


def predict(
    work: Work, layout: Layout, machine: Machine, *, simulated: bool = True, known: Blocks | None = None
) -> StepTime:
    """The step's time. `simulated` False: the bubble of a pipeline by a formula, which is much faster. `known`: the
    costs of blocks, which layouts of one model and machine can share."""
    costs = Costs(work, layout, machine)
    ranks = _ranks(costs, {} if known is None else known)
    slowest = max(ranks, key=lambda rank: rank.busy)
    micro = work.micro_batches
    busy = whole = micro * slowest.busy
    if layout.pp > 1:
        send = costs.move(comm_volume.passed(work, layout))
        whole = _pipeline(work, layout, ranks, send) if simulated else _bound(layout, ranks, micro, send)
    after = max((rank.after for rank in ranks), key=lambda found: sum(found.values()))
    parts = dict.fromkeys(PARTS, 0.0)
    for forward, backward in slowest.stages:
        for cost in (forward, backward):
            parts["compute"] += micro * cost.compute
            for axes, seconds in cost.messages.items():
                parts[axes] += micro * seconds
    if machine.per_device > 1:  # while one rank waits, others have its device
        average = micro * sum(rank.busy for rank in ranks) / layout.pp
        parts = {part: seconds * average / busy for part, seconds in parts.items()}
        busy, whole = average, max(average, whole / machine.per_device)
    parts["bubble"] = max(0.0, whole - busy)  # which rounding alone makes negative
    for part, seconds in after.items():
        parts[part] += seconds
    seconds = whole + sum(after.values())
    peak = machine.peak(work.products or work.dtype) * layout.pp * layout.dp * layout.cp * layout.tp
    return StepTime(seconds, machine.rates.spread, work.flops / seconds / peak, parts)


def timeline(work: Work, layout: Layout, machine: Machine) -> tuple[list[StageTimes], list[list[Timed]]]:
    """Each pipeline rank, and when it does what: of all micro-batches, none of them estimated."""
    costs = Costs(work, layout, machine)
    ranks = _ranks(costs, {})
    send = costs.move(comm_volume.passed(work, layout)) if layout.pp > 1 else 0.0
    schedule = build(layout.schedule, layout.pp, layout.vpp, work.micro_batches)
    return ranks, schedule.timed(_durations(work, layout, ranks, send), send)


def _ranks(costs: Costs, known: Blocks) -> list[StageTimes]:
    """Those of the pipeline, in order; ranks with as many layers are one."""
    work, layout = costs.work, costs.layout
    sizes = layout.cp, layout.cp_method, layout.tp, layout.sp, layout.ep
    micro = work.micro_batches if work.products == "fp8" else work.micro_batches == 1
    key = (work.tokens(layout), work.recompute, micro, work.accumulate, *sizes)
    if key not in known:
        known[key] = {kind: costs.of_block(kind) for stage in kinds_of(work, Layout(), 0) for kind, _ in stage}
    found: dict[object, StageTimes] = {}
    ranks = []
    for index in range(layout.pp):
        alike = kinds_of(work, layout, index), index == 0, index == layout.pp - 1
        if alike not in found:
            found[alike] = _rank(costs, known[key], index)
        ranks.append(found[alike])
    return ranks


def _rank(costs: Costs, blocks: dict[BlockKind, dict[str, Cost]], index: int) -> StageTimes:
    work, layout = costs.work, costs.layout
    stages, last_backward, forwards = [], 0.0, 0.0
    pace = 1 + costs.machine.slowest_of(layout.world_size)  # all wait for the slowest device
    numbers, whole_step = kinds_of(work, layout, index), work.profile.whole_in_pipeline and layout.pp > 1
    root: dict[str, float] = {}
    if not whole_step:  # gathered before each forward, and whole until a backward is over
        root = costs.messages(
            comm_volume.shards(work, layout, of_ends(work, layout, index == 0, index == layout.pp - 1))
        )
    for place, kinds in enumerate(numbers):
        ends = costs.of_ends(index == 0 and place == 0, index == layout.pp - 1 and place == len(numbers) - 1)
        both = []
        for way in ("F", "B"):
            found = Cost(ends[way].compute, _sum(ends[way].messages, root if way == "F" else {}))
            for number, (kind, count) in enumerate(kinds):
                one = blocks[kind][way]
                messages = {axes: count * seconds for axes, seconds in one.messages.items()}
                if layout.zero == 3 and not whole_step:
                    messages = _sum(messages, {"dp": _late_shards(costs, one, kind, count, number == 0)})
                found = Cost(found.compute + count * one.compute, _sum(found.messages, messages))
            both.append(Cost(found.compute * pace, found.messages))
        stages.append((both[0], both[1]))
        last_backward += both[1].compute
        forwards += both[0].compute
    mine = params_on_rank(work, layout, index)
    reduction = sum(costs.messages(comm_volume.gradients(work, layout, mine)).values())
    partial = sum(costs.messages(comm_volume.partial_sums(work, layout, mine, index)).values())
    gather = sum(costs.messages(comm_volume.updated(work, layout, mine)).values())
    gather += sum(costs.messages(comm_volume.shards(work, layout, mine)).values()) if whole_step else 0.0
    at_end = layout.zero == 3 and layout.pp > 1  # blocks are left once for every micro-batch
    hidden = 0.0 if at_end else work.profile.hides_gradients * last_backward
    left = work.reductions * costs.exposed(reduction, hidden)
    left += costs.exposed(gather, work.profile.hides_parameters * forwards) + partial
    return StageTimes(stages, {"dp": left, "optimizer": costs.optimizer(index)})


def _late_shards(costs: Costs, block: Cost, kind: BlockKind, count: int, first: bool) -> float:
    """At ZeRO 3: what the gathers of some blocks' parameters take longer than the compute that hides them. Nothing
    hides that of the first block of a pass."""
    work, layout = costs.work, costs.layout
    seconds = sum(costs.messages(comm_volume.shards(work, layout, of_block(work, layout, kind.sparse))).values())
    hidden = costs.exposed(seconds, work.profile.hides_shards * block.compute)
    return (count - first) * hidden + first * seconds


def _sum(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {axes: a.get(axes, 0.0) + b.get(axes, 0.0) for axes in {**a, **b}}


def _bound(layout: Layout, ranks: list[StageTimes], micro: int, send: float) -> float:
    """Filling and emptying a pipeline costs a micro-batch of each other rank; less, where ranks take turns in smaller
    pieces, or where backward is cut in two."""
    fill = {"1f1b": 1.0, "gpipe": 1.0, "zb": 0.4}[layout.schedule]
    busy = [rank.busy for rank in ranks]
    slowest = max(busy)
    return micro * slowest + fill * (sum(busy) - slowest) / layout.vpp + 2 * (layout.pp - 1) * send


def _durations(work: Work, layout: Layout, ranks: list[StageTimes], send: float) -> Callable[[Action], float]:
    """How long a rank is busy with an action."""
    waits = send if work.profile.waits_for_sends else 0.0

    def seconds(action: Action) -> float:
        forward, backward = ranks[action.stage % layout.pp].stages[action.stage // layout.pp]
        if action.kind == "F":
            return forward.total + (waits if action.stage < layout.pp * layout.vpp - 1 else 0.0)
        if action.kind == "W":
            return backward.compute / 2
        whole = backward.total - (backward.compute / 2 if action.kind == "I" else 0.0)
        return whole + (waits if action.stage else 0.0)

    return seconds


def _pipeline(work: Work, layout: Layout, ranks: list[StageTimes], send: float) -> float:
    """Seconds from the first forward to the last backward."""
    pp, vpp, micro = layout.pp, layout.vpp, work.micro_batches
    seconds = _durations(work, layout, ranks, send)

    def run(count: int) -> float:
        return max(row[-1].end for row in build(layout.schedule, pp, vpp, count).timed(seconds, send))

    count, pace, least = min(micro, (ROUNDS - 1) * pp + micro % pp), 0.0, pp * max(rank.busy for rank in ranks)
    end = run(count)
    while count < micro:  # in the first rounds a busy rank may still catch up: the end then comes later by less
        count, last, before = count + pp, pace, end
        end = run(count)
        pace = end - before
        if math.isclose(pace, last, rel_tol=1e-6) and pace > least * (1 - 1e-6):
            break
    return end + (micro - count) / pp * pace
