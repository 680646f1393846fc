"""Weight gradients that are delayed are autograd's own: same numbers, same hooks, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd.nn.split_backward import SplitBackward, linear, split_linears

Forward = Callable[[nn.Module, Tensor], Tensor]


@contextmanager
def splitting(model: nn.Module, split: SplitBackward) -> Iterator[None]:
    """As a pipeline does it, around the forward and the backward of a micro-batch."""
    with split_linears(model), split:
        yield


def run(split: SplitBackward) -> None:
    """W, as the step runs it."""
    with torch.no_grad():
        for weight, gradient in split.weight_grads():
            torch.autograd.backward([weight], [gradient])


class Model(nn.Module):
    """Linear maps with and without bias, one used twice, one whose weight is used beside F.linear, and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        return self.last(self.norm(x)) + x @ self.last.weight.t()  # type: ignore[no-any-return]


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def needing(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """As what the stage before passes on."""
    return inputs(*shape, dtype=dtype).requires_grad_()


def direct(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed_reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | ({"x": x.grad.clone()} if x.grad is not None else {})


def put_off(model: nn.Module, x: Tensor, forward: Forward) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients after I, gradients after W)."""
    split = SplitBackward(model.parameters())
    with splitting(model, split):
        y = forward(model, x)
    with splitting(model, split):
        torch.autograd.backward(y.square().sum())
    early = gradients(model, x)
    run(split)
    return early, gradients(model, x)


@pytest.mark.parametrize("forward", [direct, recomputed, recomputed_reentrant])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (0, 5)])
def test_gradients_put_off_are_those_of_autograd(forward: Forward, shape: tuple[int, ...]) -> None:
    model, x = Model(), needing(*shape)
    model(x).square().sum().backward()
    truth = gradients(model, x)
    other, y = Model(), needing(*shape)
    early, late = put_off(other, y, forward)
    assert late.keys() == truth.keys()
    for name, expected in truth.items():
        assert float((late[name] - expected).norm()) <= 1e-12 * float(expected.norm()), name
    assert {"first.weight", "twice.weight"}.isdisjoint(early)  # what only linear maps use has waited
    for name in ("x", "first.bias", "norm.weight", "norm.bias", "last.bias"):
        assert torch.equal(early[name], late[name])  # and what others wait for has not


def test_an_input_without_gradient_gets_none() -> None:
    model, x = Model(), inputs(4, 5)
    early, late = put_off(model, x, direct)
    model.zero_grad()
    model(x).square().sum().backward()
    assert "x" not in late
    assert "first.weight" in early  # its I would be empty
    assert "twice.weight" not in early
    assert float((late["first.weight"] - model.first.weight.grad).norm()) < 1e-12


def test_several_micro_batches_add_up() -> None:
    model, parts = Model(), inputs(6, 5).split([1, 3, 2])
    for part in parts:
        put_off(model, part, direct)
    found = gradients(model, parts[0])
    model.zero_grad()
    model(torch.cat(parts)).square().sum().backward()
    for name, expected in gradients(model, parts[0]).items():
        assert float((found[name] - expected).norm()) <= 1e-12 * float(expected.norm()), name


def test_a_hook_fires_once_for_a_weight_used_twice_and_not_before_w() -> None:
    layer, fired = nn.Linear(5, 5), []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    split = SplitBackward(layer.parameters())
    with splitting(layer, split):
        layer(layer(needing(2, 5, dtype=torch.float32))).sum().backward()
    assert fired == ["bias"]
    run(split)
    assert fired == ["bias", "weight"]
    run(split)  # nothing is left
    assert fired == ["bias", "weight"]


def test_a_frozen_weight_a_vector_autocast_and_a_refused_weight_are_left_to_autograd() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(2, 5, requires_grad=True)
    split = SplitBackward(layer.parameters())
    with splitting(layer, split), torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    with splitting(layer, split):
        layer(x[0]).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    with splitting(layer, SplitBackward(layer.parameters(), lambda weight: False)):
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    layer.weight.requires_grad_(False)
    with splitting(layer, split):
        layer(x).sum().backward()
    run(split)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_weights_of_another_model_and_computed_weights_are_left_to_autograd() -> None:
    layer, other, x = nn.Linear(5, 7), nn.Linear(5, 7), torch.ones(2, 5, requires_grad=True)
    split = SplitBackward(layer.parameters())
    with splitting(layer, split):
        other(x).sum().backward()
        linear(x, layer.weight * 2.0).sum().backward()
    assert other.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((7, 5), 4.0))
    assert not list(split.weight_grads())


def test_a_gradient_of_inputs_alone_collects_nothing() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(2, 5, requires_grad=True)
    split = SplitBackward(layer.parameters())
    with splitting(layer, split):
        y = layer(x).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        assert not split._factors
        y.backward()
    run(split)
    assert torch.equal(layer.weight.grad, torch.full((7, 5), 2.0))


def test_half_precision_weights_have_half_precision_gradients() -> None:
    layer = nn.Linear(5, 7).bfloat16()
    split = SplitBackward(layer.parameters())
    with splitting(layer, split):
        layer(torch.ones(2, 3, 5, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert layer.weight.grad is None
    run(split)
    assert layer.weight.grad.dtype == torch.bfloat16
    assert torch.equal(layer.weight.grad, torch.full((7, 5), 6.0, dtype=torch.bfloat16))


class Doubled(nn.Linear):
    """A linear map with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_only_plain_linears_get_another_forward_and_all_lose_it_after_an_exception() -> None:
    model = nn.ModuleList([nn.Linear(5, 5), Doubled(5, 5), nn.Linear(5, 5)])
    own = model[2].forward = lambda x: x  # type: ignore[method-assign]
    functions = F.linear, nn.Linear.forward
    with pytest.raises(ZeroDivisionError), split_linears(model):
        assert ["forward" in vars(layer) for layer in model] == [True, False, True]
        assert model[2].forward is own
        assert (F.linear, nn.Linear.forward) == functions
        raise ZeroDivisionError
    assert ["forward" in vars(layer) for layer in model] == [False, False, True]
    assert model[2].forward is own


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)])
def test_what_a_map_returns_can_be_changed_in_place(shape: tuple[int, ...]) -> None:
    """As by nn.ReLU(inplace=True). What a Function returns as a view cannot be."""
    model, x = Model(), needing(*shape)
    truth = torch.autograd.grad(model.first(x).relu_().sum(), [model.first.weight, x])
    split = SplitBackward(model.parameters())
    with splitting(model, split):
        model.first(x).relu_().sum().backward()
    assert model.first.weight.grad is None
    run(split)
    for found, exact in zip((model.first.weight.grad, x.grad), truth, strict=True):
        assert found is not None
        torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)
