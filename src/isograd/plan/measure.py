"""This computer as a Machine: what its CPU sustains, found by running products, copies, attention and messages.

A device of this machine is a core, with one thread and its share of the memory. All cores are measured at once, as they
work in a run: they share the memory's bandwidth and the clock. Then two ranks on each core are: what they lose beside
each other, and what their messages take. Numbers are medians of a few runs. The peak is the fastest product seen.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from isograd.comm import raw
from isograd.core.mesh import Mesh
from isograd.launcher.launch import World
from isograd.plan.machine import Crowded, Link, Machine, Rates

PRODUCT = {"fp32": 1024, "bf16": 256}  # rows of the matrices; 16 bits are slow on many CPUs
QUICK = ("small", "pause", "paced")  # less than a millisecond each
PAUSE = 256  # rows of the product between two messages
TYPICAL = (512, 256, 768)  # rows, inner and columns of a product of a model for a CPU
ELEMENTS = 1 << 20  # of an activation
COPIED = 1 << 26  # bytes, more than caches hold
QUERIES = (1, 4, 512, 64)  # rows, heads, length, features: of attention
ATTENTION = 2 * 4 * 512**2 * 64  # products and additions that its causal mask leaves
SENT = (1 << 10, 1 << 23)  # bytes of a small and of a large message
CHAIN = 100
MOST = 16  # ranks that are started
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(repeats: int = 5) -> Machine:
    """Run everything; takes about twenty seconds."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = max(2, min(cores, MOST))  # a single core has no neighbour to send to but a second rank
    with World(ranks, device="cpu") as world:
        found = _slowest(world.run(_rank, ranks, repeats))
    crowded = None
    if 2 * cores <= MOST:
        with World(2 * cores, device="cpu") as world:
            shared = _slowest(world.run(_rank, 2 * cores, repeats, True))
        slower = shared["fp32"] / found["fp32"] / (2 * cores / ranks)
        crowded = Crowded(slower=max(1.0, _short(slower)), link=_link(shared, 2 * cores))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    speeds = {name: 2 * rows**3 / found[name] for name, rows in PRODUCT.items()}
    copied = 2 * COPIED / found["copy"]
    rates = Rates(
        matmul={"fp32": _share(2 * math.prod(TYPICAL) / found["typical"] / speeds["fp32"]), "bf16": 1.0},
        attention=_share(ATTENTION / found["attention"] / speeds["fp32"]),
        memory=_share(8 * ELEMENTS / found["elements"] / copied), links=1.0,
        contention=1.0,  # the core that sends does not compute
        operator_us=_short(found["start"] / (2 * CHAIN) * 1e6), spread=0.3,
    )  # fmt: skip
    return Machine(
        name="here", about=f"this computer, measured: {cores} cores, one for each rank",
        memory_gb=round(whole / cores, 2), reserved_gb=0.3, memory_gb_s=_short(copied / 1e9),
        tflops={name: _short(speed / 1e12) for name, speed in speeds.items()}, devices=cores,
        inside=_link(found, ranks), crowded=crowded, rates=rates,
    )  # fmt: skip


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(found[name] for found in ranks) for name in ranks[0]}


def _link(found: dict[str, float], ranks: int) -> Link:
    """Of each rank, while all gather: it sends its part to every other. A message between two products can take
    longer than one after another: ranks that computed wait to be scheduled."""
    seconds = max(found["large"] - found["small"], 1e-9)
    small = max(found["small"], found["paced"] - found["pause"])
    latency = small / math.log2(ranks)
    return Link(gb_s=_short((ranks - 1) * SENT[1] / seconds / 1e9), latency_us=_short(latency * 1e6))


def _rank(ranks: int, repeats: int, crowded: bool = False) -> dict[str, float]:
    """On a rank of the world, at the same time as all others: seconds of each thing."""
    group = Mesh(f"dp{ranks}").group("dp")
    ones = torch.ones(1)
    a, b = (torch.ones(COPIED // 4) for _ in range(2))
    work: dict[str, Callable[[], object]] = {}
    for name, rows in PRODUCT.items():
        if name == "fp32" or not crowded:
            x, y = (torch.ones(rows, rows, dtype=TYPES[name]) for _ in range(2))
            work[name] = partial(torch.mm, x, y)
    if not crowded:
        q = torch.randn(*QUERIES)
        work["attention"] = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
        work["copy"] = partial(a.copy_, b)
        work["start"] = _chain
        work["elements"] = partial(F.silu, torch.ones(ELEMENTS))
        rows, inner, columns = TYPICAL
        work["typical"] = partial(torch.mm, torch.ones(rows, inner), torch.ones(inner, columns))
    for name, size in zip(("small", "large"), SENT, strict=True):
        part = torch.ones(size // 4)
        work[name] = partial(raw.all_gather, part, group, [part.numel()] * group.size)
    some = torch.ones(PAUSE, PAUSE)
    work["pause"] = partial(torch.mm, some, some)
    work["paced"] = lambda: (work["pause"](), work["small"]())
    found = {}
    for name, function in work.items():
        raw.all_gather(ones, group, [1] * group.size)  # all begin together
        function()
        times = []
        for _ in range(repeats * (5 if name in QUICK else 1)):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        found[name] = median(times)
    return found


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _share(value: float) -> float:
    """At most 1: something that was measured as slower than the fastest of its kind."""
    return min(1.0, _short(value))


def _chain() -> None:
    """CHAIN operators on almost nothing, and as many in backward."""
    y = torch.ones(8, requires_grad=True)
    for _ in range(CHAIN):
        y = y * 1.0
    y.sum().backward()
