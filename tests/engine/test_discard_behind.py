"""`engine.discard()` in the handler of an exception, and behind it: no rank enters a gather that the others do not."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isograd as ig
from isograd.comm import threads, world
from isograd.core.mesh import Mesh
from isograd.engine.data_parallel import DataParallel

STEPS, BAD = 7, (1, 2, 4)
ERRORS = (ZeroDivisionError, KeyboardInterrupt, ig.IsogradError)


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    for parameter in model.parameters():  # ranks as threads share torch's generator
        parameter.data = torch.linspace(-0.5, 0.7, parameter.numel()).double().view(parameter.shape)
    return model


class Scored(nn.Module):
    """Returns what `train_step` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, fails: type | None = None) -> tuple[Tensor, int]:
        loss = self.net(x).mean()
        if fails is not None:
            loss.register_hook(partial(_raise, fails))
        return loss, len(x)


def _raise(kind: type, _: Tensor) -> None:
    raise kind


def rows(step: int, rank: int) -> Tensor:
    return torch.full((2 + rank, 4), 0.1 * (step + 1) + rank).double()


def exact(ranks: int, taken: list[int]) -> Tensor:
    """One device, which takes these steps."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in taken:
        optimizer.zero_grad()
        model(torch.cat([rows(step, rank) for rank in range(ranks)])).mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def behind(layout: str, way: str, handler: str) -> tuple[list[int], list[str], float]:
    """Steps that were taken, what was raised, and how far the weights are from one device's. The last rank fails in
    `BAD`; `handler`: where `discard` is called."""
    mesh, model = Mesh(layout), Scored()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_mb=1e-4)
    taken, said = list[int](), list[str]()

    kind = KeyboardInterrupt if way == "ctrl-c" else ZeroDivisionError

    def step_of(step: int, fails: type | None) -> None:
        x = rows(step, mesh.rank)
        if way == "loader" and fails is not None:
            raise fails
        if way in ("train_step", "ctrl-c"):
            engine.train_step((x, fails), 1)
            return
        engine.backward(*model(x, fails))
        if way == "after" and fails is not None:
            raise fails
        for number, _ in enumerate(engine.grads().items() if way == "grads" else ()):
            if number == 1 and fails is not None:
                raise fails
        engine.step()

    for step in range(STEPS):
        failed = False
        try:
            step_of(step, kind if step in BAD and mesh.rank == mesh.size("world") - 1 else None)
            taken.append(step)
        except ERRORS as error:
            said.append(type(error).__name__)
            failed = True
            if handler in ("inside", "both"):
                engine.discard()
        if failed and handler in ("behind", "both"):
            engine.discard()
    with engine.full_parameters():
        found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return taken, said, float((found - exact(mesh.size("world"), taken)).abs().max())


PLACES = [
    (way, where)
    for way in ("backward", "train_step", "ctrl-c", "after", "loader", "grads")
    for where in ("inside", "behind", "both")
]


@pytest.mark.parametrize(("way", "handler"), [*PLACES, ("train_step", "nowhere")])
@pytest.mark.parametrize("layout", ["dp2", "dp3 zero1", "dp2 zero3"])
def test_discard_drops_one_step_wherever_it_is_called(layout: str, way: str, handler: str) -> None:
    """Behind the handler, a rank whose step was refused entered a second gather, which dropped the next step."""
    began, ranks = time.monotonic(), int(layout[2])
    found = threads.run(behind, ranks, layout, way, handler, timeout=20)
    for rank, (taken, said, off) in enumerate(found):
        own = "KeyboardInterrupt" if way == "ctrl-c" else "ZeroDivisionError"
        expected = [step for step in range(STEPS) if step not in BAD], [own if rank == ranks - 1 else "EngineError"] * 3
        assert (taken, said) == expected, (rank, taken, said)
        assert off < 1e-12
    assert time.monotonic() - began < 10


def agreed() -> tuple[list[int], float]:
    """After a refusal: a batch that all ranks agree to drop, for which rank 1 has no rows; twice."""
    mesh, model = Mesh("dp2"), Scored()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    taken = list[int]()
    for step in range(6):
        failed = False
        try:
            if not (step in (2, 3) and mesh.rank == 1):
                engine.backward(
                    *model(rows(step, mesh.rank), ZeroDivisionError if step == 1 and mesh.rank == 0 else None)
                )
            if step not in (2, 3):
                engine.step()
                taken.append(step)
        except ERRORS:
            failed = True
        if failed or step in (2, 3):
            engine.discard()
    found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return taken, float((found - exact(2, taken)).abs().max())


def test_batches_that_all_ranks_drop_behind_a_refusal_are_dropped_on_all() -> None:
    for taken, off in threads.run(agreed, 2, timeout=20):
        assert taken == [0, 4, 5] and off < 1e-12


def front() -> list[str]:
    model = DataParallel(net())
    said, rank = list[str](), world.world()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        failed = False
        optimizer.zero_grad()
        try:
            loss = model(rows(step, rank)).mean()
            if step in BAD and rank == 1:
                loss.register_hook(partial(_raise, ZeroDivisionError))
            loss.backward()
            optimizer.step()
        except ERRORS as error:
            said.append(f"{step} {type(error).__name__}")
            failed = True
        if failed:
            model.discard()
    return said


def test_behind_the_handler_of_data_parallel_too() -> None:
    first, second = threads.run(front, 2, timeout=20)
    assert first == [f"{step} EngineError" for step in BAD]
    assert second == [f"{step} ZeroDivisionError" for step in BAD]


def layered(layout: str) -> tuple[list[str], float]:
    """A model of layers in which ranks wait for each other; the last rank raises in its first layer."""
    mesh, said, began = Mesh(layout), list[str](), 0.0
    options = ig.nn.ExpertOptions(number=4, per_token=2, width=8) if "ep" in layout else None
    config = ig.models.TransformerConfig(vocab=17, hidden=16, layers=2, heads=2, mlp=12, experts=options)
    model = ig.models.Transformer(config, mesh)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    tokens = torch.arange(24).reshape(4, 6) % 17

    def fails(*_: Any) -> None:
        nonlocal began
        began = time.monotonic()
        raise ZeroDivisionError

    for step in range(4):
        hook = None
        if step == 1 and mesh.rank == mesh.size("world") - 1:
            hook = next(m for m in model.modules() if isinstance(m, ig.nn.RMSNorm)).register_forward_pre_hook(fails)
        failed, began = False, began or time.monotonic() * (step == 1)
        try:
            engine.train_step({"tokens": tokens, "labels": tokens}, 2)
            said.append("stepped")
        except ERRORS as error:
            said.append(type(error).__name__)
            failed = True
        if hook is not None:
            hook.remove()
        try:
            if failed:
                engine.discard()
        except ig.IsogradError as error:
            said.append(error.code)
    return said, time.monotonic() - began


@pytest.mark.parametrize("layout", ["tp2", "cp2 ring", "pp2", "dp2 ep2", "dp2 pp2 zero3"])
def test_where_layers_wait_it_is_refused_within_ten_seconds(layout: str) -> None:
    ranks = 4 if "pp2 zero3" in layout else 2
    for rank, (said, took) in enumerate(threads.run(layered, ranks, layout, timeout=30)):
        assert said[0] == "stepped" and "stepped" not in said[1:] and took < 10, (rank, said, took)


def inside_then_agreed() -> tuple[list[int], float]:
    """The rank that failed discards in its handler, the other one nowhere. Then all drop a batch, as a Trainer does
    at a further `train`."""
    mesh, model = Mesh("dp2"), Scored()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    taken = list[int]()
    for step in range(5):
        if step == 2:
            engine.discard()
        try:
            engine.backward(*model(rows(step, mesh.rank), ZeroDivisionError if step == mesh.rank == 1 else None))
            engine.step()
            taken.append(step)
        except ZeroDivisionError:
            engine.discard()
        except ig.IsogradError:
            pass
    found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return taken, float((found - exact(2, taken)).abs().max())


def test_a_discard_of_all_ranks_behind_one_in_a_handler_is_no_repetition() -> None:
    for taken, off in threads.run(inside_then_agreed, 2, timeout=20):
        assert taken == [0, 2, 3, 4] and off < 1e-12


def looks_or_steps(stage: int) -> list[str]:
    """Rank 0 looks at gradients, as in `if rank == 0: log(engine.grads())`; then all step, and step again."""
    mesh, model = Mesh(f"dp2 zero{stage}"), Scored()
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    said = list[str]()
    for step in range(2):
        engine.backward(*model(rows(step, mesh.rank)))
        try:
            if step == mesh.rank == 0:
                engine.grads()
            engine.step()
            said.append("stepped")
        except ig.IsogradError as error:
            said.append(error.code)
    return said


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_that_one_rank_looks_at_are_refused_on_all(stage: int) -> None:
    """It hung, or ended the process where gloo met messages of unequal sizes."""
    assert threads.run(looks_or_steps, 2, stage, timeout=20) == [["IG555", "stepped"]] * 2
