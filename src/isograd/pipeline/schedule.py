"""Schedules of a pipeline as data: what each rank does, in which order; checked before anything runs.

The model is cut into pp * vpp stages; stage s lives on rank s % pp of the pp axis. A micro-batch needs, on each stage,

    F   forward                                   and then either    B   backward
                                                  or both            I   backward of the stage's input
                                                                     W   backward of its weights, at any later time

    gpipe   all forwards, then all backwards; the last stage, which waits for nobody, goes back at once
    1f1b    a backward as soon as there is one; as many forwards ahead as the pipeline is deep. With vpp: interleaved
    zb      1f1b with B in its two parts: W fills the time in which a rank would wait (zero-bubble H1)

Schedules are made by simulating the ranks with one policy. Only the order of actions is kept: `check` proves that it is
complete and free of deadlocks, whatever the actions cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from isograd.errors import PipelineError

COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # assumed, in forwards, when schedules are made and drawn


class Action(NamedTuple):
    """One thing that a rank does: "F", "B", "I" or "W" of one micro-batch on one stage."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


class Timed(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does, in order."""

    name: str
    pp: int
    vpp: int
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]  # one per rank of the pp axis

    @property
    def stages(self) -> int:
        """The number of stages of the whole model."""
        return self.pp * self.vpp

    def rank_of(self, stage: int) -> int:
        """The rank of the pp axis that holds a stage."""
        return stage % self.pp

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must be done before this one, on this rank or on a neighbour."""
        kind, stage, micro = action
        if kind == "F":
            return (Action("F", stage - 1, micro),) if stage else ()
        if kind == "W":
            return (Action("I", stage, micro),)
        later = (Action(kind, stage + 1, micro),) if stage + 1 < self.stages else ()
        return (Action("F", stage, micro), *later)

    def sent(self, source: int, target: int) -> list[Action]:
        """The actions of rank `source` whose result goes to rank `target`, in the order in which it is sent."""
        step = {"F": 1, "B": -1, "I": -1}
        return [
            action
            for action in self.orders[source]
            if action.kind in step
            and 0 <= action.stage + step[action.kind] < self.stages
            and self.rank_of(action.stage + step[action.kind]) == target
        ]

    def timed(
        self, cost: Callable[[Action], float] = lambda action: COST[action.kind], send: float = 0.0
    ) -> list[list[Timed]]:
        """When each rank runs each action, if actions take `cost`, and a result needs `send` to another rank."""
        done: dict[Action, float] = {}
        rows: list[list[Timed]] = [[] for _ in self.orders]
        at = [0] * len(self.orders)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.orders):
                while at[rank] < len(order) and all(need in done for need in self.needs(order[at[rank]])):
                    action = order[at[rank]]
                    free = rows[rank][-1].end if rows[rank] else 0.0
                    ready = [done[n] + send * (self.rank_of(n.stage) != rank) for n in self.needs(action)]
                    start = max([free, *ready])
                    done[action] = start + cost(action)
                    rows[rank].append(Timed(action, start, done[action]))
                    at[rank] += 1
                    moved = True
        return rows

    def bubble(self, cost: Callable[[Action], float] = lambda action: COST[action.kind]) -> float:
        """The share of all ranks' time that is spent waiting, when actions take `cost`."""
        return idle_share(self.timed(cost))

    def in_flight(self, rank: int) -> int:
        """The largest number of forwards whose activations a rank holds at the same time."""
        held, most = 0, 0
        for action in self.orders[rank]:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, held)
        return most


def idle_share(rows: Sequence[Sequence[Timed]]) -> float:
    """The share of time that ranks are idle, from the first action to the last one of any rank."""
    whole = max(row[-1].end for row in rows) - min(row[0].start for row in rows)
    busy = sum(timed.end - timed.start for row in rows for timed in row)
    return 1.0 - busy / (whole * len(rows))


def check(schedule: Schedule) -> None:
    """Refuse a schedule unless every stage runs every micro-batch exactly once in each direction, on the rank that
    holds the stage, and without a deadlock."""
    problems = []
    for rank, order in enumerate(schedule.orders):
        foreign = [str(a) for a in order if schedule.rank_of(a.stage) != rank]
        twice = sorted({str(a) for a in order if order.count(a) > 1}) if len(set(order)) < len(order) else []
        problems += [f"rank {rank} runs actions of stages on other ranks: {foreign}"] if foreign else []
        problems += [f"rank {rank} runs twice: {twice}"] if twice else []
    have = {action for order in schedule.orders for action in order}
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            kinds = {kind for kind in "FBIW" if Action(kind, stage, micro) in have}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                problems.append(f"stage {stage} and micro-batch {micro} have {sorted(kinds)}")
    beyond = [str(a) for a in have if not (0 <= a.stage < schedule.stages and 0 <= a.micro < schedule.micro_batches)]
    problems += [f"there are no {beyond}"] if beyond else []
    if not problems:
        done = [len(row) for row in schedule.timed()]
        stuck = [
            f"rank {rank} at {order[n]}" for rank, (order, n) in enumerate(zip(schedule.orders, done, strict=True))
            if n < len(order)
        ]  # fmt: skip
        problems += [f"deadlock: {', '.join(stuck)}"] if stuck else []
    if problems:
        raise PipelineError("IG800", seen="; ".join(problems[:4]), name=schedule.name)


@lru_cache(maxsize=256)
def build(name: str, pp: int, vpp: int, micro_batches: int) -> Schedule:
    """The checked schedule of this name. Any number of micro-batches is legal; fewer than ranks leave ranks idle."""
    schedule = Schedule(name, pp, vpp, micro_batches, _simulate(name, pp, vpp, micro_batches))
    check(schedule)
    return schedule


def _max_ahead(name: str, pp: int, vpp: int, rank: int) -> float:
    """How many forwards a rank may be ahead of its backwards: this bounds the memory of activations in 1f1b."""
    if name == "gpipe" and not _is_end(pp, vpp, rank):
        return math.inf
    return pp - rank if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * pp + 1


def _is_end(pp: int, vpp: int, rank: int) -> bool:
    """Whether a rank holds the last stage and no other. In gpipe, too, its backwards follow their forwards: the head's
    loss makes much of its gradient in forward, and ranks before it would wait until all micro-batches had done that."""
    return vpp == 1 and rank == pp - 1


def _in_turns(pp: int, rank: int, micro_batches: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """(stage, micro): groups of pp micro-batches go through a rank's chunks in turn."""
    groups = [range(a, min(a + pp, micro_batches)) for a in range(0, micro_batches, pp)]
    return [(chunk * pp + rank, micro) for group in groups for chunk in chunks for micro in group]


class _Rank:
    """One rank while a schedule is made: the actions it still has to run, and the order decided so far."""

    def __init__(self, name: str, pp: int, vpp: int, rank: int, micro_batches: int) -> None:
        forward = _in_turns(pp, rank, micro_batches, range(vpp))
        backward = _in_turns(pp, rank, micro_batches, range(vpp)[::-1])
        self.split = name == "zb"
        self.forwards = [Action("F", *place) for place in forward][::-1]
        self.backwards = [Action("I" if self.split else "B", *place) for place in backward][::-1]
        self.weights: list[Action] = []
        self.ahead = _max_ahead(name, pp, vpp, rank)
        self.room = _max_ahead(name, pp, vpp, 0)  # as many as the first rank holds: later ranks then have W to delay
        self.strict = name != "gpipe" or _is_end(pp, vpp, rank)
        self.held = 0  # whose activations are kept
        self.open = 0  # forwards without their backward
        self.free = 0.0
        self.order: list[Action] = []

    def choose(self, ready: Callable[[Action], bool], patient: bool) -> Action | None:
        """The next action: a backward before a forward; forwards only as far ahead as is allowed; weights while it
        waits, and where a forward needs their room.

        A patient rank of 1f1b and zb waits for the forward whose turn it is: a backward instead would delay later
        actions.
        """
        ahead = bool(self.forwards) and self.open < self.ahead
        if self.strict and patient:
            turns = [self.forwards if ahead else self.backwards]
        else:
            turns = [self.backwards] * (self.strict or not self.forwards) + [self.forwards] * ahead
        for turn in turns:
            full = turn is self.forwards and self.held >= self.room
            if turn and not (full and self.weights) and ready(turn[-1]):
                return turn[-1]
        return self.weights[0] if self.weights else None

    def take(self, action: Action, now: float) -> None:
        """Run this action, starting now."""
        self.order.append(action)
        self.free = now + COST[action.kind]
        if action.kind == "F":
            self.forwards.pop()
            self.held += 1
            self.open += 1
        elif action.kind == "W":
            self.weights.pop(0)
            self.held -= 1
        else:
            self.backwards.pop()
            self.held -= action.kind == "B"
            self.open -= 1
            self.weights += [Action("W", action.stage, action.micro)] if self.split else []

    @property
    def finished(self) -> bool:
        """Whether this rank has nothing left to run."""
        return not (self.forwards or self.backwards or self.weights)


def _simulate(name: str, pp: int, vpp: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    ranks = [_Rank(name, pp, vpp, rank, micro_batches) for rank in range(pp)]
    made = Schedule(name, pp, vpp, micro_batches, ())
    done: dict[Action, float] = {}
    now, patient = 0.0, True
    while not all(rank.finished for rank in ranks):
        taken = False

        def ready(action: Action, now: float = now) -> bool:
            return all(done.get(need, math.inf) <= now for need in made.needs(action))

        for rank in ranks:
            if rank.free <= now:
                action = rank.choose(ready, patient)
                if action is not None:
                    rank.take(action, now)
                    done[action] = rank.free
                    taken = True
        later = [rank.free for rank in ranks if rank.free > now]
        if later:
            now, patient = min(later), True
        elif patient:  # all ranks wait for each other: a short last group of micro-batches
            patient = False
        elif not taken:
            for rank in ranks:
                rank.ahead += 1
                rank.room += 1
    return tuple(tuple(rank.order) for rank in ranks)
