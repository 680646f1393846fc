"""Which layout is best: all that a number of devices allows, bound by divisibility and memory, then by predicted time.

A first pass judges every candidate by a formula; the best of them are then predicted with their pipeline's schedule
simulated. Every candidate that falls out is counted by its reason, with one example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

from isograd.core.layout import Layout
from isograd.errors import LayoutError, PipelineError, PlanError
from isograd.plan.machine import Machine
from isograd.plan.memory import Memory, memory
from isograd.plan.step_time import Blocks, StepTime, predict
from isograd.plan.work import Work

SIMULATED = 24  # candidates whose pipeline is simulated
LARGEST_ROWS = 8  # sequences of a micro-batch
SHORTEST = 1024  # tokens of a sequence on one rank of cp
FULL = "more memory than a device has"


@dataclass(frozen=True)
class Candidate:
    """A layout with the choices that go with it, what it needs, and how long its step is."""

    layout: Layout
    work: Work
    memory: Memory
    step: StepTime


@dataclass
class Out:
    """Why candidates fell out: how many, and the first of them."""

    count: int
    example: str


@dataclass
class SearchResult:
    """What a search has found."""

    best: list[Candidate]
    fitting: int  # candidates that fit
    tried: int
    out: dict[str, Out] = field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        """Count a candidate that falls out."""
        self.tried += 1
        self.out.setdefault(reason, Out(0, example)).count += 1


def search(
    work: Work,
    devices: int,
    machine: Machine,
    *,
    shown: int = 10,
    recomputes: tuple[str, ...] = ("none", "selective", "full"),
    buildable: Callable[[Layout], str | None] = lambda layout: None,
) -> SearchResult:
    """The best candidates. `buildable` says why a layout cannot be built after all; only the best are asked."""
    if devices < 1:
        raise PlanError("IG275", "a plan needs at least one device", seen=devices, expected="--gpus 1 or more")
    found = SearchResult([], 0, 0)
    fitting: list[Candidate] = []
    known: Blocks = {}
    for layout in layouts(work, devices, machine, found):
        for cut in _cut(work, layout, found):
            apart = cut.micro_batches > 1 and layout.zero > 0 and layout.pp == 1
            for how, kept in product(recomputes, ("local", "sharded") if apart else ("local",)):
                described = dataclasses.replace(cut, recompute=how, accumulate=kept)
                needed = memory(described, layout, gpu=machine.units > 0)
                if needed.total > machine.room:
                    choices = f"{cut.micro_batches} micro-batches, recompute {how}, {kept} sums"
                    found.drop(FULL, f"{layout}, {choices}: {needed.total / 1e9:.0f} GB of {machine.room / 1e9:.0f}")
                    continue
                found.tried += 1
                step = predict(described, layout, machine, simulated=False, known=known)
                fitting.append(Candidate(layout, described, needed, step))
                break  # it fits, and what recomputes more is slower
    found.fitting = len(fitting)
    fitting.sort(key=lambda one: one.step.seconds)
    best: list[Candidate] = []
    for one in fitting:
        problem = buildable(one.layout)
        if problem is not None:
            found.out.setdefault("a layout that the model refuses", Out(0, f"{one.layout}: {problem}")).count += 1
            found.fitting -= 1
            continue
        best.append(dataclasses.replace(one, step=predict(one.work, one.layout, machine)))
        if len(best) == SIMULATED:
            break
    best.sort(key=lambda one: one.step.seconds)
    found.best = best[:shown]
    if not best:
        reasons = "; ".join(f"{out.count} {reason} (such as {out.example})" for reason, out in found.out.items())
        fix = "another number of devices, or another batch"
        if FULL in found.out:
            fix = "more devices, a smaller or larger batch, shorter sequences, or devices with more memory"
        raise PlanError("IG276", seen=reasons or "no candidate", fix=fix, devices=devices, name=machine.name)
    return found


def layouts(work: Work, devices: int, machine: Machine, found: SearchResult) -> Iterator[Layout]:
    """All layouts of so many devices that divide the model; what does not is counted."""
    c = work.model
    kv = c.kv_heads or c.heads
    for tp in _divisors(devices):
        if tp > machine.devices:
            continue  # slower by far between nodes
        if c.heads % tp or (kv % tp and tp % kv):
            found.drop("attention heads that tp does not divide", f"tp{tp}: {c.heads} and {kv} heads")
            continue
        for cp in _divisors(devices // tp):
            if work.length // cp < SHORTEST and cp > 1:
                continue
            if work.length % (2 * cp) and cp > 1:
                found.drop("a sequence that cp does not divide", f"cp{cp}: {work.length} tokens")
                continue
            for pp in _divisors(devices // tp // cp):
                dp = devices // tp // cp // pp
                if pp > c.layers:
                    found.drop("fewer layers than pipeline stages", f"pp{pp}: {c.layers} layers")
                elif work.batch % dp:
                    found.drop("a batch that dp does not divide", f"dp{dp}: {work.batch} sequences")
                else:
                    yield from _of(work, machine, {"dp": dp, "cp": cp, "tp": tp, "pp": pp}, found)


def _of(work: Work, machine: Machine, sizes: dict[str, int], found: SearchResult) -> Iterator[Layout]:
    c, tp, cp, pp = work.model, sizes["tp"], sizes["cp"], sizes["pp"]
    data = sizes["dp"] * cp
    methods = ["ulysses"]
    if cp > 1:
        heads, near = c.heads // tp, max(1, machine.devices // tp)
        methods = [f"ulysses{u}" for u in sorted({1, min(cp, near), cp}) if u <= heads and cp % u == 0]
    chunks = [n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12) if pp * n <= c.layers] if pp > 1 else [1]
    stages = (0,) if data == 1 else (1, 3)  # 0 sends more than 1 and keeps more, 2 sends as much
    spread = [1]
    if c.experts is not None:
        spread = [ep for ep in _divisors(data * tp) if c.experts.number % ep == 0]
    for method in methods:
        for vpp in chunks:
            for ep in spread:
                for zero in stages:
                    for schedule in ("1f1b", "zb") if pp > 1 and vpp == 1 else ("1f1b",):
                        try:
                            yield Layout(
                                **sizes, cp_method=method, vpp=vpp, ep=ep, zero=zero, sp=tp > 1, schedule=schedule
                            )
                        except LayoutError as error:
                            found.drop("a layout that contradicts itself", error.what)


def _cut(work: Work, layout: Layout, found: SearchResult) -> Iterator[Work]:
    """Each way to cut a data rank's sequences into micro-batches, the config's own number of them among these."""
    rows = work.batch // layout.dp
    sizes = {size for size in range(1, LARGEST_ROWS + 1) if rows % size == 0 and size & (size - 1) == 0}
    own = {rows // work.micro_batches} if rows % work.micro_batches == 0 else set()
    for size in sorted(sizes | own):
        micro = rows // size
        if micro < layout.pp:
            found.drop("fewer micro-batches than pipeline stages", f"{layout}: {micro} micro-batches")
            continue
        if layout.sp and size * work.length // layout.cp % layout.tp:
            found.drop("tokens that sp does not divide", f"{layout}: {size * work.length // layout.cp} tokens")
            continue
        described = dataclasses.replace(work, micro_batches=micro)
        try:
            described.split(layout)
        except PipelineError as error:
            found.drop("layers that cannot be cut into stages", error.what)
            continue
        yield described


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
