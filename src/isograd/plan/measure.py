"""This computer as a Machine: what its CPU sustains, found by running products, copies, attention and messages.

Each rank of a world here gets one core, one thread and its share of the memory: a device of this machine is a core.
Numbers are medians of a few runs. The peak is the fastest product seen, so MFU is relative to what this computer was
seen to do. Nothing else should run meanwhile.
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
from isograd.comm.launch import World
from isograd.mesh import Mesh
from isograd.plan.machine import Link, Machine, Rates

PRODUCT = 1024  # rows of the matrices of the largest product
COPIED = 1 << 26  # bytes, more than caches hold
SENT = (1 << 10, 1 << 23)  # bytes of a small and of a large message


def measure(repeats: int = 5) -> Machine:
    """Run everything, on one thread; takes about ten seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        speeds = {
            name: _products(dtype, repeats) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        }
        memory, start = _copies(repeats), _start(repeats)
        attention = _attention(repeats) / speeds["fp32"]
    finally:
        torch.set_num_threads(threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gb_s, latency = _link()
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Machine(
        name="here", about=f"this computer, measured: {cores} cores, one for each rank",
        memory_gb=round(whole / cores, 2), reserved_gb=0.3, memory_gb_s=_short(memory / 1e9),
        tflops={name: _short(speed / 1e12) for name, speed in speeds.items()}, devices=cores,
        inside=Link(gb_s=_short(gb_s), latency_us=_short(latency * 1e6)),
        rates=Rates(
            matmul=dict.fromkeys(speeds, 1.0), attention=_short(attention), memory=1.0, links=1.0,
            operator_us=_short(start * 1e6), spread=0.3,
        ),
    )  # fmt: skip


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _seconds(function: Callable[[], object], repeats: int) -> float:
    function()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return median(found)


def _products(dtype: torch.dtype, repeats: int) -> float:
    """Products and additions per second."""
    a, b = (torch.ones(PRODUCT, PRODUCT, dtype=dtype) for _ in range(2))
    return 2 * PRODUCT**3 / _seconds(lambda: a @ b, repeats)


def _attention(repeats: int) -> float:
    """Of fused causal attention: those that its mask leaves, per second."""
    length, heads, d = 512, 4, 64
    q = torch.randn(1, heads, length, d)
    return (
        2 * length**2 * heads * d / _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), repeats)
    )


def _copies(repeats: int) -> float:
    """Bytes per second, read and written."""
    a, b = (torch.ones(COPIED // 4) for _ in range(2))
    return 2 * COPIED / _seconds(lambda: a.copy_(b), repeats)


def _start(repeats: int) -> float:
    """Seconds of an operator on almost nothing, with its share of autograd."""
    x = torch.ones(8, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(100):
            y = y * 1.0
        y.sum().backward()

    return _seconds(chain, repeats) / 200


def _messages() -> list[float]:
    """On a rank of two: seconds of each size's all-gather."""
    group, found = Mesh("dp2").group("dp"), []
    for size in SENT:
        x = torch.ones(size // 4)
        found.append(_seconds(partial(raw.all_gather, x, group, [x.numel()] * 2), 9))
    return found


def _link() -> tuple[float, float]:
    """(GB per second, seconds of a small message) between two ranks."""
    with World(2) as world:
        small, large = (max(times) for times in zip(*world.run(_messages), strict=True))
    return SENT[1] / max(large - small, 1e-9) / 1e9, min(small, math.inf)
