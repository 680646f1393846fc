"""One rank's backward runs out of memory: every rank raises within ten seconds, and the rank is named.

On data axes all ranks drop the step, and the next one is right. Where layers wait for each other (and at ZeRO 3, whose
gathers are layers' messages), kernels of the other ranks wait for what will not come: all connections are closed.
"""

from __future__ import annotations

import time

import pytest
import torch

from tests.parity import cases

from . import device, run
from .on_cards import engine_of, micro_batch

ROBBED = 1  # the rank whose card is full
SECONDS = 10.0


def fill_card() -> None:
    """The next allocation fails; on a real card, this one."""
    if device.lib is not None:
        device.lib.fail_allocation(1)
    else:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def robbed(layout: str) -> tuple[float, str, dict[str, torch.Tensor]]:
    """(seconds until this rank knew, what it was told, gradients of the step after it if there is one)."""
    engine = engine_of(layout, dtype=torch.float64, experts="ep" in layout, clip=cases.CLIP)
    batch = lambda step: [micro_batch(engine, step, place, 2) for place in range(2)]  # noqa: E731
    engine.accumulate(batch(0))  # connections are made
    engine.discard()
    torch.cuda.synchronize()
    armed = [engine.mesh.rank == ROBBED]
    first = next(p for n, p in engine.model.named_parameters() if n.endswith("norm2.weight"))
    first.register_hook(lambda g: fill_card() if armed and armed.pop() else None)
    began, told = time.monotonic(), ""
    for _ in range(2):  # a rank that only fails says so when it comes to the next step
        try:
            engine.train_step(batch(0))
            break
        except Exception as error:
            told += f"{type(error).__name__}: {error}\n"
    seconds = time.monotonic() - began
    if "IG213" in told or "IG214" in told or "IG207" in told:
        return seconds, told, {}
    engine.accumulate(batch(1))
    return seconds, told, {name: g.cpu() for name, g in engine.grads().items()}


def told_in_time(layout: str) -> list[tuple[int, str, dict[str, torch.Tensor]]]:
    """Of each rank: (rank, what it was told, gradients)."""
    results = run(robbed, 2, layout, join=False, seconds=20)
    for result in results:
        assert not result.error, result.error
        assert result.value[0] < SECONDS
    return [(result.rank, *result.value[1:]) for result in results]


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero2"])
def test_data_ranks_drop_the_step_and_the_next_one_is_right(layout: str) -> None:
    truth = cases.one_device("llama", 4).gradients[1]
    for rank, told, gradients in told_in_time(layout):
        assert "OutOfMemoryError" in told if rank == ROBBED else f"rank {ROBBED}: OutOfMemoryError" in told
        assert gradients.keys() == truth.keys()
        assert all((gradients[n] - true).norm() < 1e-9 * true.norm() + 1e-12 for n, true in truth.items())


@pytest.mark.parametrize("layout", ["dp2 zero3", "tp2", "tp2 sp", "cp2", "pp2", "dp2 ep2"])
def test_where_layers_wait_every_rank_is_told_who_has_failed(layout: str) -> None:
    for rank, told, gradients in told_in_time(layout):
        assert not gradients
        assert "OutOfMemoryError" in told, told
        assert rank == ROBBED or f"rank {ROBBED}" in told, told


def discarding(alone: bool) -> str:
    """After a backward that ended well, rank 1 drops the step: alone, or with the others. What this rank is told."""
    engine = engine_of("tp2 sp", dtype=torch.float64)
    batch = [micro_batch(engine, 0)]
    engine.accumulate(batch)
    try:
        if engine.mesh.rank == ROBBED or not alone:
            engine.discard()
            engine.accumulate(batch)
        return f"skipped: {engine.step().skipped}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_where_layers_wait_one_rank_cannot_drop_a_step_alone_and_all_can() -> None:
    """On cards nobody knows in which layer the others' kernels stand."""
    told = [result.value or result.error for result in run(discarding, 2, True, join=False, seconds=20)]
    assert "IG558" in told[0] and f"[{ROBBED}]" in told[0], told
    assert "IG214" in told[1], told
    together = [result.value or result.error for result in run(discarding, 2, False, join=False, seconds=20)]
    assert together == ["skipped: False"] * 2
