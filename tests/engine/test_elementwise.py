"""Torch's elementwise optimizers step rows; any other steps whole tensors, is vouched for, or is refused at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.engine import ChainedOptimizer, Engine, Shards
from isograd.engine.elementwise import KNOWN
from isograd.errors import IsogradError

from . import toys


class Own(torch.optim.Optimizer):
    """As users write them: p -= lr * direction(m), with a momentum m."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(group["momentum"]).add_(p.grad)
                    p.sub_(group["lr"] * self.direction(p, m))

    def direction(self, p: Tensor, m: Tensor) -> Tensor:
        return m.sign()


class Lamb(Own):
    def direction(self, p: Tensor, m: Tensor) -> Tensor:
        return m * (p.norm() / m.norm())


class Closure(Own):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


SHAPES, CUTS = ((2, 64), (129, 250), (5,)), (1, 61, 2)


@torch.no_grad()
def stepped(kind: Callable[..., torch.optim.Optimizer], ranks: Sequence[Sequence[slice]]) -> list[Tensor]:
    """Tensors after three steps. `ranks`: of each tensor, the rows that each rank steps."""
    draw = torch.Generator().manual_seed(0)
    start, *gradients = [[torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(4)]
    for rows in ranks:
        mine = [nn.Parameter(t[r].clone()) for t, r in zip(start, rows, strict=True)]
        optimizer = kind(mine, lr=0.1)
        for step in gradients:
            for p, gradient, r in zip(mine, step, rows, strict=True):
                p.grad = gradient[r].clone()
            optimizer.step()
        for t, r, p in zip(start, rows, mine, strict=True):
            t[r] = p
    return start


@pytest.mark.parametrize("kind", [*sorted(KNOWN, key=lambda k: k.__name__), Lamb], ids=lambda k: k.__name__)
def test_each_of_torchs_listed_optimizers_is_elementwise(kind: Callable[..., torch.optim.Optimizer]) -> None:
    whole = stepped(kind, [[slice(None)] * 3])
    parts = stepped(kind, [[slice(cut) for cut in CUTS], [slice(cut, None) for cut in CUTS]])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(whole, parts, strict=True)) == (kind in KNOWN)


def refusals(layout: str, *cases: tuple[Any, dict[str, Any]]) -> list[tuple[str, str]]:
    found = []
    for make, options in cases:
        try:
            Engine(toys.Toy(), Mesh(layout), make, **options)
            found.append(("", ""))
        except IsogradError as error:
            found.append((error.code, str(error)))
    return found


def chained_with(kind: type[Own]) -> Callable[[Shards], ChainedOptimizer]:
    return lambda shards: ChainedOptimizer(kind(shards.matrices), toys.adamw(shards.rest))


def refused_by_rows(layout: str) -> None:
    matrices = {"matrices": ["first.*", "twice.*", "last.*", "unused.*", "out.*"]}
    own, adafactor, chained, closure, *allowed = refusals(
        layout, (Own, {}), (torch.optim.Adafactor, {}), (chained_with(Lamb), matrices), (Closure, {}),
        (Own, {"elementwise": True}), (chained_with(Lamb), matrices | {"elementwise": True}),
    )  # fmt: skip
    for (code, text), kind in ((own, "Own"), (adafactor, "Adafactor")):
        assert code == "IG542"
        assert f"{kind} is not known to be elementwise, so it cannot step ZeRO shards" in text
        assert "elementwise=True, where the engine is made, if" in text and "else zero0 without tp and ep" in text
    assert closure[0] == "IG543"
    assert [code for code, _ in (chained, *allowed)] == ["", "", ""]  # Lamb has whole matrices


def an_elementwise_optimizer_of_ones_own(layout: str) -> None:
    truth = toys.one_device(4, 3, Own, 0.5)
    toys.assert_same_training(toys.engine_run(layout, 4, 3, Own, elementwise=True), truth)


def whole_at_zero0() -> None:
    """Adafactor sees whole tensors and trains as on one device; a closure is refused at every stage."""
    truth = toys.one_device(4, 3, torch.optim.Adafactor, 0.5)
    toys.assert_same_training(toys.engine_run("dp2 zero0", 4, 3, torch.optim.Adafactor), truth)
    closures = refusals("dp2 zero0", (Closure, {}), (torch.optim.LBFGS, {}))
    assert [code for code, _ in closures] == ["IG543", "IG543"]
    assert "LBFGS" in closures[1][1]
    assert refusals("tp2", (Lamb, {}))[0][0] == ""  # nothing of this model is cut over tp


def test_parts_are_refused_to_optimizers_that_are_not_known_and_whole_tensors_are_not(worlds) -> None:
    """FAILURES A11: Adafactor and LAMB at zero1 to 3 were 1.2 % off after one step, silently; LBFGS a TypeError."""
    for layout in ("dp2 zero1", "dp2 zero3"):
        worlds(2).run(refused_by_rows, layout)
        worlds(2).run(an_elementwise_optimizer_of_ones_own, layout)
    worlds(2).run(whole_at_zero0)


def test_one_rank_steps_whole_tensors_at_every_stage() -> None:
    Engine(toys.Toy(), Mesh("zero1"), Lamb)
