"""The race: contestants alive at once, each in its own world of ranks, taking turns of a few steps.

The order rotates from round to round and a ratio is taken between turns of the same round, so that whatever slows the
machine slows all alike. A turn's time is its slowest rank's. Sleeping contestants wait in the kernel and cost no time.
A turn beside which other jobs worked is repeated.

Where memory does not hold all contestants, they race in heats. The reference runs in each heat, and so do the peers of
those who race in it: a ratio is never taken between heats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch
from torch import Tensor

from benchmarks import quiet, seat
from benchmarks.contestant import ONE, Entry
from benchmarks.task import Sizes
from isograd.launcher.launch import World, start_method
from isograd.pipeline.schedule import Schedule, Timed, idle_share

TIMEOUT = 600.0
ATTEMPTS = 4  # at a turn that other jobs disturb
MIB = 2**20
SPARE = 2**30  # bytes that stay free
GROWTH = 1.5  # a contestant may come to need as many times the memory of the largest so far


@dataclass(frozen=True)
class Error:
    """Against one process on the whole batch."""

    total: float  # of all gradients as one vector, relative
    worst: float  # of the parameter that is furthest off, relative to its own norm
    where: str


@dataclass
class Result:
    entry: Entry
    seconds: list[float] = field(default_factory=list)  # per step, one for each round
    cpu: list[float] = field(default_factory=list)  # seconds of work per step, of the rank that works most
    bubbles: list[tuple[float, float]] = field(default_factory=list)  # of a pipeline: measured, in theory
    wire: list[float] = field(default_factory=list)  # bytes per step, of the rank that sends most
    loopback: list[float] = field(default_factory=list)  # bytes per step by the interface, divided by ranks
    disturbed: int = 0  # turns beside which other jobs worked, in each attempt
    peak: int = 0  # bytes, of the rank that needs most
    even: Error | None = None
    uneven: Error | None = None
    heat: Mapping[str, Result] = field(default_factory=dict, repr=False)  # by name: who raced in the same rounds

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peer(self) -> str | None:
        """The fastest of those that do the same and raced beside me."""
        beside = [self.heat[name] for name in self.entry.peers if name in self.heat]
        return min(beside, key=lambda result: result.median).entry.name if beside else None

    def ratios(self, other: str | None) -> list[float] | None:
        """My time by the other's, round by round; None where the other did not race beside me."""
        beside = self.heat.get(other or "")
        return beside and [mine / theirs for mine, theirs in zip(self.seconds, beside.seconds, strict=True)]

    def work_ratios(self, other: str | None) -> list[float] | None:
        """The same of what a rank worked: other jobs on the machine stretch it less."""
        beside = self.heat.get(other or "")
        return beside and [mine / theirs for mine, theirs in zip(self.cpu, beside.cpu, strict=True)]


def run(
    entries: Sequence[Entry],
    sizes: Sizes,
    ranks: int,
    *,
    rounds: int,
    steps: int,
    errors: bool,
    reference: Entry = ONE,
    attempts: int = ATTEMPTS,
    settle: int = seat.SETTLE_STEPS,
) -> list[Result]:
    """`reference`: whose gradients on the whole batch are the truth. `attempts`: at a turn that others disturb.
    `settle`: steps before the first turn."""
    start_method(_modules(entries))
    results: list[Result] = []
    waiting = list(entries)
    while waiting:
        guests = guests_of(waiting, entries, reference)
        with ExitStack() as stack:
            heat = _seat(stack, [*guests, *waiting], sizes, ranks, settle)
            seated = [result for result, _ in heat]
            if len(seated) <= len(guests):
                raise SystemExit(f"memory does not hold {', '.join(e.name for e in [*guests, waiting[0]])} at once")
            _race(heat, sizes, rounds, steps, attempts)
            if errors:
                _compare(seated, [world for _, world in heat], sizes, reference)
        for result in seated:
            result.heat = {r.entry.name: r for r in seated}
        results += [result for result in seated if result.entry in waiting]
        waiting = waiting[len(seated) - len(guests) :]
        if waiting:
            print(f"  memory is used up; another heat: {', '.join(e.name for e in waiting)}", flush=True)
    return results


def guests_of(waiting: Sequence[Entry], entries: Sequence[Entry], reference: Entry) -> list[Entry]:
    """Who has raced in an earlier heat and is needed in the next one."""
    needed = {reference.name, *(peer for entry in waiting for peer in entry.peers)}
    return [entry for entry in entries if entry.name in needed and entry not in waiting]


def _modules(entries: Sequence[Entry]) -> list[str]:
    """What ranks would load anew for each contestant, which takes seconds: the server that starts them loads it."""
    builders = [entry.build.func if isinstance(entry.build, partial) else entry.build for entry in entries]
    modules = {builder.__module__ for builder in builders} - {"__main__"}
    return [*sorted(modules), "benchmarks.seat", "torch._dynamo"]


def _seat(
    stack: ExitStack, entries: Sequence[Entry], sizes: Sizes, ranks: int, settle: int
) -> list[tuple[Result, World]]:
    """Build one after the other, as long as memory holds one more."""
    heat: list[tuple[Result, World]] = []
    most = 0
    for entry in entries:
        before = psutil.virtual_memory().available
        if heat and before < GROWTH * most + SPARE:
            break
        began = time.perf_counter()
        world = stack.enter_context(World(1 if entry.alone else ranks))
        world.run(seat.sit, entry, sizes, settle, timeout=TIMEOUT)
        heat.append((Result(entry), world))
        most = max(most, before - psutil.virtual_memory().available)
        _say(f"{entry.name}: built, {settle} steps", began)
    return heat


def _race(heat: Sequence[tuple[Result, World]], sizes: Sizes, rounds: int, steps: int, attempts: int) -> None:
    everyone = [pid for _, world in heat for pid in world.pids]
    for number in range(rounds):
        began = time.perf_counter()
        for place in range(len(heat)):
            result, world = heat[(place + number) % len(heat)]
            turns = _turn(result, world, everyone, sizes, steps, number + 1, attempts)
            result.seconds.append(max(t.seconds for t in turns))
            result.cpu.append(max(t.cpu for t in turns))
            result.bubbles += bubble(turns)
            result.wire.append(max(t.sent for t in turns))
            result.loopback.append(min(t.loopback for t in turns) / len(turns))
        _say(f"round {number + 1} of {rounds}", began)
    for result, world in heat:
        result.peak = max(world.run(seat.peak))


def _turn(
    result: Result, world: World, everyone: Sequence[int], sizes: Sizes, steps: int, number: int, attempts: int
) -> list[seat.Turn]:
    """One that no other job disturbed, if one of several attempts is such. `everyone`: the processes of all
    contestants, whose work is the race's own."""
    for _ in range(attempts):
        watch = quiet.Watch(everyone)
        turns: list[seat.Turn] = world.run(seat.turn, sizes, steps, number, timeout=TIMEOUT)
        sent, carried = max(t.sent for t in turns), min(t.loopback for t in turns) / len(turns)
        if not watch.disturbed() and carried <= sent * 1.02 + MIB:
            return turns
    result.disturbed += 1
    return turns


def _compare(results: Sequence[Result], worlds: Sequence[World], sizes: Sizes, reference: Entry) -> None:
    for kind in ("even", "uneven"):
        began = time.perf_counter()
        with World(1) as one:
            expected = one.run(seat.gradients, reference, sizes, kind == "uneven", timeout=TIMEOUT)[0]
        for result, world in zip(results, worlds, strict=True):
            if not result.entry.alone:
                got = world.run(seat.gradients, result.entry, sizes, kind == "uneven", timeout=TIMEOUT)[0]
                setattr(result, kind, difference(got, expected))
        _say(f"gradients with {kind} labels", began)


def bubble(turns: Sequence[seat.Turn]) -> list[tuple[float, float]]:
    """The share of a step's time that its ranks waited, and the share that the schedule itself costs.

    In theory: the same actions in the same order, each as long as it was, with messages that take no time.
    """
    rows = [sorted(turn.timeline, key=lambda timed: timed.start) for turn in turns]
    if not all(rows):
        return []
    took = {timed.action: timed.end - timed.start for row in rows for timed in row}
    return [(idle_share(rows), schedule_of(rows).bubble(took.__getitem__))]


def schedule_of(rows: Sequence[Sequence[Timed]]) -> Schedule:
    """What the ranks did, in the order in which they did it."""
    orders = tuple(tuple(timed.action for timed in row) for row in rows)
    actions = [action for order in orders for action in order]
    stages, micros = (1 + max(action[part] for action in actions) for part in (1, 2))
    return Schedule("as it ran", len(rows), stages // len(rows), micros, orders)


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> Error:
    if got.keys() != expected.keys():
        raise AssertionError(f"gradients by other names: {sorted(got.keys() ^ expected.keys())}")
    off = {name: float((got[name] - expected[name]).double().norm()) for name in expected}
    size = {name: float(expected[name].double().norm()) for name in expected}
    worst = max(expected, key=lambda name: off[name] / size[name])
    total = [float(torch.tensor(list(part.values()), dtype=torch.float64).norm()) for part in (off, size)]
    return Error(total[0] / total[1], off[worst] / size[worst], worst)


def _say(what: str, began: float) -> None:
    print(f"  {what}: {time.perf_counter() - began:.1f} s", flush=True)
