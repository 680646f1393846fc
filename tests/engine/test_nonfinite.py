"""A skipped step says which rank's loss and which parameters' gradients were not finite, alike on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.engine.nonfinite import NonFiniteReport


class Broken(torch.autograd.Function):
    """Finite forward, NaN backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g * float("nan")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, broken: bool) -> Tensor:
        y = self.first(x)
        return self.second(Broken.apply(y) if broken else y).square().mean()


def skipped(zero: int) -> list[NonFiniteReport | None]:
    mesh = Mesh(f"dp3 zero{zero}")
    torch.manual_seed(0)
    model = Model()
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    found = []
    for fault in ("none", "loss", "backward", "none"):
        mine = mesh.rank == 1
        loss = model(torch.ones(4, 3) + mesh.rank, mine and fault == "backward")
        engine.backward(loss * float("inf") if mine and fault == "loss" else loss)
        found.append(engine.step().nonfinite)
    return found


def named(zero: int, reproducible: bool) -> list[tuple[int, ...]]:
    """Who is named when the backward of each rank in turn is not finite."""
    mesh = Mesh(f"dp4 zero{zero}")
    torch.manual_seed(0)
    model = Model()
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1), reproducible=reproducible)
    found = []
    for bad in ((0,), (1,), (2,), (3,), ()):
        engine.backward(model(torch.ones(4, 3), mesh.rank in bad))
        nonfinite = engine.step().nonfinite
        found.append(nonfinite.born if nonfinite else ())
    return found


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_each_rank_alone_is_named_wherever_its_gradients_are_added(worlds, zero: int, reproducible: bool) -> None:
    for found in worlds(4).run(named, zero, reproducible):
        assert found == [(0,), (1,), (2,), (3,), ()]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_rank_and_the_parameters_of_a_skipped_step_are_named(worlds, zero: int) -> None:
    everything = {"first.weight", "first.bias", "second.weight", "second.bias"}
    for first, loss, backward, last in worlds(3).run(skipped, zero):
        assert first is None
        assert last is None
        assert (loss.ranks, set(loss.parameters)) == ((1,), everything)
        assert (backward.ranks, set(backward.parameters)) == ((), {"first.weight", "first.bias"})
        assert backward.born == loss.born == (1,)  # FAILURES B4: the rank was not named
        assert "rank 1" in str(loss)
        assert "every loss was finite; the backward of rank 1 was not; gradients of" in str(backward)
