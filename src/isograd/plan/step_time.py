"""How long a step takes under a layout on a machine, and where the time goes.

    found = predict(work, Layout.parse("dp16 tp8 sp pp4 zero1"), machine.load("h100"))
    found.seconds, found.low, found.high, found.mfu, found.parts

Without a pipeline, micro-batches follow one another. With one, the schedule of pipeline/schedule.py is simulated with
the costs of each stage and the time of a send between neighbours; of a long step the first micro-batches are simulated,
and the rest continue at the same pace. After the last backward come what is left of the gradients' reduction, the
optimizer, and the gather of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from isograd.layout import Layout
from isograd.pipeline.schedule import Action, Schedule, build
from isograd.plan import moves
from isograd.plan.costs import Cost, Costs
from isograd.plan.machine import Machine
from isograd.plan.work import Work, held, layers_of, of_block, of_ends

ROUNDS = 3  # micro-batches that are simulated, in multiples of the pipeline's ranks
PARTS = ("compute", "tp", "cp", "ep", "dp", "bubble", "optimizer")


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    seconds: float
    spread: float
    mfu: float  # of the products that the model needs at the least, none of them twice
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
class _Rank:
    """One pipeline rank: seconds of each of its stages, forward and backward, and of what follows."""

    stages: list[tuple[Cost, Cost]]
    after: dict[str, float]  # seconds after the last backward, by part

    @property
    def busy(self) -> float:
        """Seconds of one micro-batch."""
        return sum(forward.total + backward.total for forward, backward in self.stages)


Blocks = dict[tuple[object, ...], dict[bool, dict[str, Cost]]]


def predict(
    work: Work, layout: Layout, machine: Machine, *, simulated: bool = True, known: Blocks | None = None
) -> Step:
    """The step's time. `simulated` False: the bubble of a pipeline by a formula, which is much faster. `known`: the
    costs of blocks, which layouts of one model and machine can share."""
    costs = Costs(work, layout, machine)
    known = {} if known is None else known
    sizes = layout.cp, layout.cp_method, layout.tp, layout.sp, layout.ep
    key = (work.tokens(layout), work.recompute, *sizes)
    if key not in known:
        known[key] = {sparse: costs.of_block(sparse) for sparse in _kinds(work)}
    blocks = known[key]
    middle = [] if layout.pp <= 2 else [1]  # all between the first and the last are about equal
    ranks = {index: _rank(costs, blocks, index) for index in dict.fromkeys([0, *middle, layout.pp - 1])}
    slowest = max(ranks.values(), key=lambda rank: rank.busy)
    micro = work.micro_batches
    whole = micro * slowest.busy
    if layout.pp > 1:
        send = costs.move(moves.passed(work, layout))
        whole = _pipeline(layout, ranks, micro, send) if simulated else _bound(layout, slowest.busy, micro, send)
    after = max((rank.after for rank in ranks.values()), key=lambda found: sum(found.values()))
    parts = dict.fromkeys(PARTS, 0.0)
    for forward, backward in slowest.stages:
        for cost in (forward, backward):
            parts["compute"] += micro * cost.compute
            for axes, seconds in cost.messages.items():
                parts[axes] += micro * seconds
    parts["bubble"] = whole - micro * slowest.busy
    for part, seconds in after.items():
        parts[part] += seconds
    seconds = whole + sum(after.values())
    peak = machine.peak(work.products or work.dtype) * layout.pp * layout.dp * layout.cp * layout.tp
    return Step(seconds, machine.rates.spread, work.flops / seconds / peak, parts)


def _kinds(work: Work) -> set[bool]:
    return {work.has_experts(layer) for layer in range(work.model.layers)}


def _rank(costs: Costs, blocks: dict[bool, dict[str, Cost]], index: int) -> _Rank:
    work, layout = costs.work, costs.layout
    stages, last_backward, forwards = [], 0.0, 0.0
    numbers = layers_of(work, layout, index)
    for place, counts in enumerate(numbers):
        first = index == 0 and place == 0
        last = index == layout.pp - 1 and place == len(numbers) - 1
        ends = costs.of_ends(first, last)
        root = costs.messages(moves.shards(work, layout, of_ends(work, layout, first, last)))
        both = []
        for way in ("F", "B"):
            found = Cost(ends[way].compute, _sum(ends[way].messages, root if way == "F" else {}))
            for sparse, count in zip((False, True), counts, strict=True):
                if count:
                    one = blocks[sparse][way]
                    late = _late_shards(costs, one, sparse)
                    whole = _sum(one.messages, late)
                    found = Cost(
                        found.compute + count * one.compute,
                        _sum(found.messages, {axes: count * seconds for axes, seconds in whole.items()}),
                    )
            both.append(found)
        stages.append((both[0], both[1]))
        last_backward += both[1].compute
        forwards += both[0].compute
    mine = held(work, layout, index)
    reduction = sum(costs.messages(moves.gradients(work, layout, mine)).values())
    debts = sum(costs.messages(moves.debts(work, layout, mine, index)).values())
    gather = sum(costs.messages(moves.updated(work, layout, mine)).values())
    left = max(0.0, reduction - work.habits.hides_gradients * last_backward)
    left += max(0.0, gather - work.habits.hides_parameters * forwards) + debts
    return _Rank(stages, {"dp": left, "optimizer": costs.optimizer(index)})


def _late_shards(costs: Costs, block: Cost, sparse: bool) -> dict[str, float]:
    """At ZeRO 3: what the gather of one block's parameters takes longer than the compute that hides it."""
    work, layout = costs.work, costs.layout
    if layout.zero < 3:
        return {}
    seconds = sum(costs.messages(moves.shards(work, layout, of_block(work, layout, sparse))).values())
    return {"dp": max(0.0, seconds - work.habits.hides_shards * block.compute)}


def _sum(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {axes: a.get(axes, 0.0) + b.get(axes, 0.0) for axes in {**a, **b}}


def _bound(layout: Layout, busy: float, micro: int, send: float) -> float:
    """Filling and emptying a pipeline costs a micro-batch for each further rank; less, where ranks take turns in
    smaller pieces, or where backward is cut in two."""
    fill = {"1f1b": 1.0, "gpipe": 1.0, "zb": 0.4}[layout.schedule]
    return (micro + fill * (layout.pp - 1) / layout.vpp) * busy + 2 * (layout.pp - 1) * send


@lru_cache(maxsize=256)
def _schedule(name: str, pp: int, vpp: int, micro: int) -> Schedule:
    return build(name, pp, vpp, micro)


def _pipeline(layout: Layout, ranks: dict[int, _Rank], micro: int, send: float) -> float:
    """Seconds from the first forward to the last backward."""
    pp, vpp = layout.pp, layout.vpp

    def rank_of(index: int) -> _Rank:
        return ranks[index] if index in ranks else ranks[1]

    def seconds(action: Action) -> float:
        forward, backward = rank_of(action.stage % pp).stages[action.stage // pp]
        if action.kind == "F":
            return forward.total
        if action.kind == "B":
            return backward.total
        return backward.compute / 2 + (sum(backward.messages.values()) if action.kind == "I" else 0.0)

    def run(count: int) -> float:
        return finish(_schedule(layout.schedule, pp, vpp, count), seconds, send)

    if micro <= ROUNDS * pp:
        return run(micro)
    rest = micro % pp
    long, short = ROUNDS * pp + rest, (ROUNDS - 1) * pp + rest
    end = run(long)
    return end + (micro - long) * (end - run(short)) / (long - short)


def finish(schedule: Schedule, seconds: Callable[[Action], float], send: float) -> float:
    """When the last action of any rank ends, if actions take `seconds` and a result needs `send` to a neighbour."""
    done: dict[Action, float] = {}
    at, free = [0] * schedule.pp, [0.0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                needs = schedule.needs(action)
                if any(need not in done for need in needs):
                    break
                ready = [done[need] + (send if schedule.rank_of(need.stage) != rank else 0.0) for need in needs]
                free[rank] = max([free[rank], *ready]) + seconds(action)
                done[action] = free[rank]
                at[rank] += 1
                moved = True
    return max(free)
