"""Micro-batches add up to one gradient, whichever of them sync, in either memory mode, in whatever loop one writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import Tensor, nn

from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine, reducer

from . import toys


def all_interleavings() -> None:
    """Three micro-batches on each of two ranks: each syncs or does not, at each stage."""
    truth = toys.one_device(6, 1, toys.adamw, 0.5)
    for pattern in product("ns", repeat=3):
        runs = [toys.engine_run(f"dp2 zero{zero}", 6, 1, unsynced="".join(pattern)) for zero in range(4)]
        for run in runs:
            toys.assert_same_training(run, truth)
            toys.assert_same_bits(run.gradients, runs[0].gradients)


def test_any_interleaving_of_synced_and_unsynced_backwards_gives_the_same_gradient(worlds) -> None:
    worlds(2).run(all_interleavings)


class Loss(nn.Module):
    """The toy as train_step calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = toys.Toy()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return toys.loss_of(self.toy, x, y), len(x)


Micros = list[tuple[Tensor, Tensor]]


def torch_style(engine: Engine, micros: Micros) -> None:
    """no_sync around all but the last."""
    for number, micro in enumerate(micros):
        with engine.no_sync() if number < len(micros) - 1 else nullcontext():
            engine.backward(*engine.model(*micro))
    engine.step()


def accelerate_style(engine: Engine, micros: Micros) -> None:
    """One loop over batches that steps each time `sync_gradients` is true."""
    for batch, micro in enumerate(micros):
        sync_gradients = (batch + 1) % len(micros) == 0
        with nullcontext() if sync_gradients else engine.no_sync():
            loss, rows = engine.model(*micro)
            engine.backward(loss, weight=rows)
        if sync_gradients:
            engine.step()


def every_backward_syncs(engine: Engine, micros: Micros) -> None:
    for micro in micros:
        engine.backward(*engine.model(*micro))
    engine.step()


def none_syncs(engine: Engine, micros: Micros) -> None:
    with engine.no_sync():
        for micro in micros:
            engine.backward(*engine.model(*micro))
    engine.step()


def train_step(engine: Engine, micros: Micros) -> None:
    engine.train_step(micros)


Loop = Callable[[Engine, Micros], None]
LOOPS: list[tuple[Loop, str]] = [
    (torch_style, "local"),
    (accelerate_style, "local"),
    (none_syncs, "local"),
    (train_step, "local"),
    (train_step, "sharded"),
    (every_backward_syncs, "sharded"),
]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank sends to reduce gradients."""
    sent: list[int] = []
    before = reducer.reduce_rows

    def counting(packing: Any, flat: Any, group: Any, **more: Any) -> Any:
        sent.append((len(flat) - packing.sizes[group.index]) * flat.itemsize)
        return before(packing, flat, group, **more)

    reducer.reduce_rows = counting  # type: ignore[assignment]
    try:
        yield sent
    finally:
        reducer.reduce_rows = before


def run_loop(zero: int, loop: Loop, mode: str) -> tuple[dict[str, Tensor], int, int]:
    """Whole parameters after two steps, the bytes that their reductions sent, and those of one reduction."""
    mesh, model = Mesh(f"dp2 zero{zero}"), Loss()
    engine = Engine(model, mesh, toys.sgd, accumulate=mode, bucket_mb=0.02)  # type: ignore[arg-type]
    others = sum(s.cuts[1] / s.cuts[-1] * s.parameter.numel() for s in engine.plan.slots)  # padded to the first owner's
    with counted() as sent:
        for step in range(2):
            micros = [toys.micro_batch(step, mesh.index(DATA) * 3 + j) for j in range(3)]
            loop(engine, micros)
    with engine.full_parameters():
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return parameters, sum(sent), round(others) * 8


def all_loops() -> None:
    truth = toys.one_device(6, 2, toys.sgd, None).parameters
    for zero, (loop, mode) in product(range(4), LOOPS):
        found, sent, once = run_loop(zero, loop, mode)
        for name, value in truth.items():
            error = float((found[f"toy.{name}"] - value).norm())
            assert error <= 1e-9 * float(value.norm()), f"zero{zero}, {loop.__name__}, {mode}: {name}: {error:.1e}"
        reductions = 2 * (1 if mode == "local" else 3)
        assert sent == reductions * once, f"zero{zero}, {loop.__name__}: {sent / once} reductions in two steps"


def test_torch_style_and_accelerate_style_loops_and_train_step_agree_and_local_reduces_once_a_step(worlds) -> None:
    worlds(2).run(all_loops)


def held_between_micro_batches(mode: str) -> tuple[int, int]:
    """Elements of whole gradients, and of gradients by rows, that are there after the first of two micro-batches."""
    mesh, model = Mesh("dp2 zero2"), Loss()
    engine = Engine(model, mesh, toys.sgd, accumulate=mode)  # type: ignore[arg-type]
    held: list[tuple[int, int]] = []

    def look(*_: object) -> None:
        assert not engine.step_state.reducer.under_way(), "packed gradients of the micro-batch before"
        whole = sum(gradient.numel() for gradient in engine.step_state.now.local.values())
        held.append((whole, sum(rows.numel() for rows in engine.step_state.reducer.reduced.values())))

    model.register_forward_pre_hook(look)
    engine.train_step([toys.micro_batch(0, 0), toys.micro_batch(0, 2)])
    return held[1]


@pytest.mark.parametrize("mode", ["local", "sharded"])
def test_local_keeps_whole_gradients_and_sharded_keeps_rows(worlds, mode: str) -> None:
    trainable = sum(p.numel() for n, p in toys.Toy().named_parameters() if p.requires_grad)
    unused = sum(p.numel() for p in toys.Toy().unused.parameters())
    found = worlds(2).run(partial(held_between_micro_batches, mode))
    assert sum(whole for whole, _ in found) == (2 * (trainable - unused) if mode == "local" else 0)
    assert sum(rows for _, rows in found) == (trainable if mode == "sharded" else 0)
