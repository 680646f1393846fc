"""The race: all contestants alive at once, each in its own world of ranks, taking turns of a few steps.

The order rotates from round to round and a ratio is taken between turns of the same round, so that whatever slows the
machine slows all alike. A turn's time is its slowest rank's. Sleeping contestants wait in the kernel and cost no time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import seat
from benchmarks.contestant import ONE, Entry
from benchmarks.task import Sizes
from isograd.comm.launch import World
from isograd.pipeline.schedule import idle_share

TIMEOUT = 600.0


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
    peak: int = 0  # bytes, of the rank that needs most
    even: Error | None = None
    uneven: Error | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio(self, other: Result | None) -> float | None:
        """The median over rounds of my time by the other's."""
        return None if other is None else _median_ratio(self.seconds, other.seconds)

    def cpu_ratio(self, other: Result | None) -> float | None:
        """The same of what a rank worked: other jobs on the machine stretch it less."""
        return None if other is None else _median_ratio(self.cpu, other.cpu)


def _median_ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def run(
    entries: Sequence[Entry],
    sizes: Sizes,
    ranks: int,
    *,
    rounds: int,
    steps: int,
    errors: bool,
    reference: Entry = ONE,
) -> list[Result]:
    """`reference`: whose gradients on the whole batch are the truth."""
    results = [Result(entry) for entry in entries]
    with ExitStack() as stack:
        worlds = [stack.enter_context(World(1 if entry.alone else ranks)) for entry in entries]
        for result, world in zip(results, worlds, strict=True):
            began = time.perf_counter()
            world.run(seat.sit, result.entry, sizes, timeout=TIMEOUT)
            _say(f"{result.entry.name}: built, {seat.SETTLE_STEPS} steps", began)
        for number in range(rounds):
            began = time.perf_counter()
            for place in range(len(entries)):
                index = (place + number) % len(entries)
                turns = worlds[index].run(seat.turn, sizes, steps, number + 1, timeout=TIMEOUT)
                results[index].seconds.append(max(t.seconds for t in turns))
                results[index].cpu.append(max(t.cpu for t in turns))
                results[index].bubbles += bubble(turns)
                results[index].wire.append(max(t.sent for t in turns))
                results[index].loopback.append(min(t.loopback for t in turns) / len(turns))
            _say(f"round {number + 1} of {rounds}", began)
        for result, world in zip(results, worlds, strict=True):
            result.peak = max(world.run(seat.peak))
        if errors:
            _compare(results, worlds, sizes, reference)
    return results


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
    found = [t.timeline for t in turns if t.timeline is not None]
    if not found:
        return []
    schedule, rows = found[0][0], [timeline for _, timeline in found]
    took = {timed.action: timed.end - timed.start for row in rows for timed in row}
    return [(idle_share(rows), schedule.bubble(took.__getitem__))]


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
