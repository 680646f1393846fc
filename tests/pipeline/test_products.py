"""Gradients that are handed out as products, delayed or at once, are autograd's own: same numbers, same hooks, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd.comm.launch import World
from isograd.engine import Engine
from isograd.mesh import Mesh
from isograd.models import Transformer, TransformerConfig
from isograd.pipeline.mail import Mail
from isograd.products import Behind, Deferred, Products

Forward = Callable[[nn.Module, Tensor], Tensor]


def run(deferred: Deferred) -> None:
    """W, as the ledger of a step runs it where somebody's hooks wait for a weight's gradient."""
    with torch.no_grad():
        for weight, a, b in deferred.products():
            torch.autograd.backward([weight], [a @ b])


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
    """(gradients after I, gradients after W). As the engine does: Tensor.backward would leave the mode."""
    deferred = Deferred()
    with deferred:
        y = forward(model, x)
    with deferred:
        torch.autograd.backward(y.square().sum())
    early = gradients(model, x)
    run(deferred)
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


def test_a_hook_fires_once_for_a_weight_used_once_and_not_before_w() -> None:
    layer, fired = nn.Linear(5, 7), []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    deferred = Deferred()
    with deferred:
        layer(needing(2, 5, dtype=torch.float32)).sum().backward()
    assert fired == ["bias"]
    run(deferred)
    assert fired == ["bias", "weight"]
    run(deferred)  # nothing is left
    assert fired == ["bias", "weight"]


def test_a_frozen_weight_a_vector_and_autocast_are_left_to_autograd() -> None:
    layer, x = nn.Linear(5, 7), torch.ones(2, 5, requires_grad=True)
    deferred = Deferred()
    with deferred, torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    with deferred:
        layer(x[0]).sum().backward()
    assert layer.weight.grad is not None
    layer.zero_grad()
    layer.weight.requires_grad_(False)
    with deferred:
        layer(x).sum().backward()
    run(deferred)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_a_computed_weight_is_left_to_autograd() -> None:
    base = nn.Parameter(torch.ones(7, 5))
    deferred = Deferred()
    with deferred:
        F.linear(torch.ones(2, 5, requires_grad=True), base * 2.0).sum().backward()
    assert base.grad is not None
    assert float(base.grad[0, 0]) == 4.0


def test_the_functional_form_takes_its_arguments_by_name_too() -> None:
    weight, bias = nn.Parameter(torch.ones(7, 5)), nn.Parameter(torch.ones(7))
    deferred = Deferred()
    with deferred:
        y = F.linear(torch.ones(2, 5, requires_grad=True), bias=bias, weight=weight)
        y.sum().backward()
    assert weight.grad is None
    run(deferred)
    assert torch.equal(weight.grad, torch.full((7, 5), 2.0))
    assert torch.equal(bias.grad, torch.full((7,), 2.0))


def test_half_precision_weights_have_half_precision_gradients() -> None:
    layer = nn.Linear(5, 7).bfloat16()
    deferred = Deferred()
    with deferred:
        layer(torch.ones(2, 3, 5, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert layer.weight.grad is None
    run(deferred)
    assert layer.weight.grad.dtype == torch.bfloat16
    assert torch.equal(layer.weight.grad, torch.full((7, 5), 6.0, dtype=torch.bfloat16))


class Sums:
    """A stand-in for the step's ledger: sums by parameter."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def product(self, weight: Tensor, a: Tensor, b: Tensor) -> None:
        self.of[id(weight)] = self.of.get(id(weight), torch.zeros_like(weight)) + a @ b

    def rows(self, weight: Tensor, rows: Tensor, values: Tensor) -> None:
        before = self.of.get(id(weight), torch.zeros_like(weight))
        self.of[id(weight)] = before.index_put((rows,), values, accumulate=True)


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_and_rows_handed_out_at_once_are_those_of_autograd(padding: int | None, recompute: bool) -> None:
    torch.manual_seed(0)
    words, layer = nn.Embedding(6, 5, padding_idx=padding, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64)
    torch.nn.init.normal_(words.weight)
    tokens = torch.tensor([[2, 5, 5], [0, 2, 1]])

    def forward() -> Tensor:
        body = lambda x: layer(torch.tanh(x))  # noqa: E731
        x = words(tokens)
        return (checkpoint(body, x, use_reentrant=False) if recompute else body(x)).square().sum()  # type: ignore

    forward().backward()
    truth = {p: p.grad for p in (words.weight, layer.weight, layer.bias)}
    words.zero_grad()
    layer.zero_grad()
    sums = Sums()
    products = Products(sums.product, sums.rows)
    with products:
        loss = forward()
    with products:
        torch.autograd.backward(loss)
    assert words.weight.grad is None
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, truth[layer.bias])
    for weight in (words.weight, layer.weight):
        assert float((sums.of[id(weight)] - truth[weight]).norm()) <= 1e-12 * float(truth[weight].norm())


def test_weights_that_are_not_taken_and_options_of_lookups_are_left_to_autograd() -> None:
    words, layer = nn.Embedding(6, 5, scale_grad_by_freq=True), nn.Linear(5, 3)
    sums = Sums()
    with Products(sums.product, sums.rows, lambda weight: weight is not layer.weight):
        layer(words(torch.tensor([1, 1]))).sum().backward()
    assert not sums.of
    assert words.weight.grad is not None
    assert layer.weight.grad is not None


@pytest.mark.parametrize("forward", [direct, recomputed, recomputed_reentrant])
def test_products_wait_for_the_stages_input_but_for_those_of_a_recomputed_forward(forward: Forward) -> None:
    model, x, truth = Model(), needing(4, 5), Model()
    truth(inputs(4, 5).requires_grad_()).square().sum().backward()
    sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def add(weight: Tensor, a: Tensor, b: Tensor) -> None:
        sums[weight] = sums[weight] + a @ b if weight in sums else a @ b

    behind = Behind(add, None, lambda weight: True)
    with behind:
        y = forward(model, x)
    with behind:
        torch.autograd.backward(y.square().sum())
    early = len(sums)
    for product in behind.products():
        add(*product)
    assert early == (0 if forward is direct else 3) and len(sums) == 3
    for name in ("first", "twice", "last"):
        own = getattr(model, name).weight
        found = sums[own] if own.grad is None else sums[own] + own.grad
        expected = getattr(truth, name).weight.grad
        assert expected is not None
        assert float((found - expected).norm()) <= 1e-12 * float(expected.norm()), name


def order_of_backward() -> list[str]:
    """What a stage of 1f1b does in its backwards."""
    config = TransformerConfig(vocab=16, hidden=8, layers=4, heads=2, mlp=16)
    model = Transformer(config, mesh := Mesh("pp2"))
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    done: list[str] = []
    add, send = engine.ledger.of_product, Mail.send
    engine.ledger.of_product = lambda *of, **how: (done.append("product"), add(*of, **how))[1]  # type: ignore[method-assign, func-returns-value]
    tokens = torch.arange(24).view(3, 8) % 16
    try:
        Mail.send = lambda mail, action, out: (done.append(action.kind), send(mail, action, out))[1]  # type: ignore[method-assign, func-returns-value]
        engine.train_step((tokens, tokens), 3)
    finally:
        Mail.send = send  # type: ignore[method-assign]
    return done


def test_a_stage_sends_its_inputs_gradient_before_it_makes_those_of_weights(
    worlds: Callable[[int], World],
) -> None:
    first, second = worlds(2).run(order_of_backward)
    assert first[:2] == ["F", "F"] and set(first) == {"F", "product"}  # nobody waits for a gradient of its input
    products = second.count("product") // 2
    assert products == 15  # seven linear maps in each of two layers, and the head
    assert second == (["B"] + ["product"] * products) * 2 + ["B"]  # the last micro-batch's come by autograd


def test_functions_are_put_back_after_an_exception_and_the_inner_one_counts() -> None:
    plain, sums, inner = (F.linear, F.embedding), Sums(), Sums()
    layer, x = nn.Linear(5, 3), needing(2, 5, dtype=torch.float32)
    with pytest.raises(ZeroDivisionError), Products(sums.product):
        with Products(inner.product):
            layer(x).sum().backward()
        raise ZeroDivisionError
    assert (F.linear, F.embedding) == plain
    assert not sums.of
    assert list(inner.of) == [id(layer.weight)]
