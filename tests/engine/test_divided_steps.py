"""A fused optimizer divides gradients in the pass that steps them: the step is what it is when the engine divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine, zero
from isograd.engine.muon import ChainedOptimizer, members
from tests.engine import toys

STEPS, MICROS = 3, 2


def fused_adamw(ps: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ps, lr=1e-2, fused=True)


def fused_sgd(ps: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True)


def joined(ps: Any) -> torch.optim.Optimizer:
    half = len(ps) // 2
    return ChainedOptimizer(torch.optim.Adam(ps[:half], lr=1e-2, fused=True), fused_sgd(ps[half:]))


MAKE = {"adamw": fused_adamw, "sgd": fused_sgd, "joined": joined}


def trained(layout: str, name: str, divides: bool, dtype: torch.dtype, clip: float | None) -> dict[str, Tensor]:
    """Parameters after some steps of uneven micro-batches; `divides`: whether the optimizer may divide."""
    mesh, model = Mesh(layout), toys.Toy(dtype)
    engine = Engine(model, mesh, MAKE[name], clip=clip)
    seen: list[bool] = []
    own = engine._sharded_optimizer._divides
    engine._sharded_optimizer._divides = lambda scale: seen.append(own(scale)) or (divides and own(scale))  # type: ignore[method-assign, func-returns-value]
    each = MICROS * 2 // mesh.size(DATA)
    for step in range(STEPS):
        for micro in range(each):
            x, y = toys.micro_batch(step, mesh.index(DATA) * each + micro)
            engine.backward(toys.loss_of(model, x, y), weight=len(x))
        assert not engine.step().skipped
        assert not any(hasattr(one, "grad_scale") for one in members(engine.optimizer))
    assert seen == [dtype == torch.float32] * STEPS
    with engine.full_parameters():
        return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.medium
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", MAKE)
def test_parameters_are_those_of_an_engine_that_divides_itself(worlds: Any, name: str, clip: float | None) -> None:
    truth = trained("dp1", name, False, torch.float32, clip)
    first = None
    for layout in ("dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3"):
        for found in worlds(2).run(trained, layout, name, True, torch.float32, clip):
            for parameter, value in truth.items():
                # fp32 on both sides: the quotient is rounded once more or less, and Adam's root passes on some of it
                torch.testing.assert_close(found[parameter], value, rtol=2e-5, atol=2e-6)
            first = first or found
            toys.assert_same_bits(found, first)
    alone = trained("dp1", name, True, torch.float32, clip)
    for parameter, value in truth.items():
        torch.testing.assert_close(alone[parameter], value, rtol=2e-5, atol=2e-6)


def test_in_fp64_the_engine_divides_itself(worlds: Any) -> None:
    trained("dp1", "adamw", True, torch.float64, None)


class Gradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))


def stepped(prepare: Callable[[Engine], None], make: Any = fused_sgd) -> tuple[Engine, Gradients]:
    model = Gradients()
    engine = Engine(model, Mesh("dp1"), make)
    prepare(engine)
    for weight in (3, 4):
        engine.backward(model.w.sum() * weight, weight=weight)
    engine.step()
    return engine, model


def test_a_hook_before_the_step_sees_divided_gradients() -> None:
    seen: list[Tensor] = []

    def prepare(engine: Engine) -> None:
        def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
            seen.append(optimizer.param_groups[0]["params"][0].grad.clone())

        engine.optimizer.register_step_pre_hook(hook)

    _, model = stepped(prepare)
    assert seen[0].tolist() == pytest.approx([25 / 7] * 3)
    assert model.w.tolist() == pytest.approx([-2.5 / 7] * 3)


def test_a_hook_after_the_step_sees_divided_gradients() -> None:
    seen: list[Tensor] = []

    def prepare(engine: Engine) -> None:
        def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
            seen.append(optimizer.param_groups[0]["params"][0].grad.clone())

        engine.optimizer.register_step_post_hook(hook)

    stepped(prepare)
    assert seen[0].tolist() == pytest.approx([25 / 7] * 3)


def test_a_hook_of_all_optimizers_sees_divided_gradients() -> None:
    seen: list[Tensor] = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].grad.clone())
    )
    try:
        stepped(lambda engine: None)
    finally:
        handle.remove()
    assert seen[0].tolist() == pytest.approx([25 / 7] * 3)


def test_a_step_of_somebodys_own_sees_divided_gradients_and_a_schedules_does_not_matter() -> None:
    seen: list[Tensor] = []

    def watched(engine: Engine) -> None:
        optimizer, own = engine.optimizer, engine.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            seen.append(optimizer.param_groups[0]["params"][0].grad.clone())
            return own(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]

    _, model = stepped(watched)
    assert seen[0].tolist() == pytest.approx([25 / 7] * 3)
    assert model.w.tolist() == pytest.approx([-2.5 / 7] * 3)

    def scheduled(engine: Engine) -> None:
        torch.optim.lr_scheduler.ConstantLR(engine.optimizer, factor=0.5)
        assert engine._sharded_optimizer._divides(1.0)

    _, model = stepped(scheduled)
    assert model.w.tolist() == pytest.approx([-1.25 / 7] * 3)


@pytest.mark.parametrize("clip", [0.0, 1e-20])
def test_a_divisor_beyond_fp32_is_the_engines(clip: float) -> None:
    model = Gradients()
    engine = Engine(model, Mesh("dp1"), fused_sgd, clip=clip)
    engine.backward(model.w.sum() * 1e15, weight=1)
    assert not engine.step().skipped
    assert model.w.tolist() == pytest.approx([-0.1 * clip / 3**0.5] * 3, rel=1e-5)


def test_a_subclass_and_a_plain_optimizer_are_given_divided_gradients() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert self.param_groups[0]["params"][0].grad.tolist() == pytest.approx([25 / 7] * 3)
            return super().step(closure)

    for make in (lambda ps: Mine(ps, lr=0.1, fused=True), lambda ps: torch.optim.SGD(ps, lr=0.1)):
        _, model = stepped(lambda engine: None, make)
        assert model.w.tolist() == pytest.approx([-2.5 / 7] * 3)


def test_a_step_that_raises_leaves_no_divisor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(engine: Engine) -> None:
        def fails(*_: object, **__: object) -> None:
            assert float(engine.optimizer.grad_scale) == 7  # type: ignore[attr-defined]
            raise OSError("no")

        monkeypatch.setattr(torch.optim.SGD, "step", fails)
        found.append(engine)

    found: list[Engine] = []
    with pytest.raises(OSError, match="no"):
        stepped(prepare)
    assert not hasattr(found[0].optimizer, "grad_scale")


def test_each_optimizer_that_divides_does_so_by_what_torchs_scaler_gives_it() -> None:
    for kind in zero.DIVIDES:
        ends = []
        for divisor in (1.0, 7.0):
            p = nn.Parameter(torch.ones(5))
            one = kind([p], lr=0.1, fused=True)  # type: ignore[call-arg]
            p.grad = torch.arange(1.0, 6.0) * divisor
            one.grad_scale = torch.tensor(divisor)  # type: ignore[attr-defined]
            one.step()
            ends.append(p.detach().clone())
            torch.testing.assert_close(p.grad, torch.arange(1.0, 6.0))
        torch.testing.assert_close(*ends)
