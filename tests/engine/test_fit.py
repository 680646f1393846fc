"""Models whose gradients the engine would mistake are refused by the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from isograd.core.mesh import Mesh
from isograd.engine import DataParallel, Engine
from isograd.errors import EngineError

from . import toys


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(2, 2)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def tables() -> nn.Module:
    return nn.ModuleDict({"ids": nn.Embedding(5, 2, sparse=True), "bag": nn.EmbeddingBag(5, 2, sparse=True)})


@pytest.mark.parametrize(
    "hold", [lambda m: Engine(m, Mesh("1"), toys.sgd), DataParallel], ids=["Engine", "DataParallel"]
)
@pytest.mark.parametrize(
    ("make", "code", "named"), [(Waves, "IG541", "['phase']"), (tables, "IG544", "['ids.weight', 'bag.weight']")]
)
def test_complex_and_sparse_parameters_are_refused_by_name(
    hold: Callable[[nn.Module], object], make: Callable[[], nn.Module], code: str, named: str
) -> None:
    """FAILURES A12: the imaginary part was dropped, silently."""
    with pytest.raises(EngineError) as caught:
        hold(make())
    assert caught.value.code == code
    assert named in str(caught.value)


def test_what_is_frozen_may_be_complex_or_sparse() -> None:
    model = Waves()
    model.phase.requires_grad_(False)
    model.table = nn.Embedding(5, 2, sparse=True).requires_grad_(False)
    Engine(model, Mesh("1"), toys.sgd)


def complex_on_one_rank() -> str:
    mesh = Mesh("dp2")
    try:
        Engine(Waves() if mesh.rank else nn.Linear(2, 2), mesh, toys.sgd)
    except EngineError as error:
        return f"{error.code} {error.seen}"
    return ""


def test_all_ranks_refuse_what_one_rank_has(worlds) -> None:
    assert worlds(2).run(complex_on_one_rank) == ["IG541 complex: ['phase']"] * 2


def takes_away(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize(
    "hold", [lambda m: Engine(m, Mesh("1"), toys.sgd), DataParallel], ids=["Engine", "DataParallel"]
)
def test_hooks_for_accumulated_gradients_are_refused_by_name(hold: Callable[[nn.Module], object]) -> None:
    """Before ours, such a hook changes what is summed; after ours, it finds None where a gradient should be."""
    model = nn.Linear(2, 2)
    hook = model.bias.register_post_accumulate_grad_hook(takes_away)
    with pytest.raises(EngineError, match=r"IG545.*\n.*'bias'"):
        hold(model)
    hook.remove()
    hold(model)
    hold(model)  # the hook of the engine before is no hook of the program


def test_a_hook_for_accumulated_gradients_that_comes_later_is_refused_at_the_step() -> None:
    model = nn.Linear(2, 2)
    engine = Engine(model, Mesh("1"), toys.sgd)
    model.bias.register_post_accumulate_grad_hook(takes_away)
    engine.backward(model(torch.ones(3, 2)).square().mean(), weight=3)
    with pytest.raises(EngineError, match=r"IG517.*\n.*'bias'"):
        engine.step()
