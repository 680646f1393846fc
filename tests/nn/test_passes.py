"""What is done in few passes over memory has the values and gradients of its definition, at odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.nn import passes

EPS = 1e-3
Function = Callable[..., Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return passes.rms_norm(x, weight, EPS)


def norm_seen_turned(x: Tensor, weight: Tensor) -> Tensor:
    """The gradient comes as heads of sequences, with which norms of queries and keys meet attention under Ulysses."""
    return norm(x, weight).transpose(0, 1).contiguous()


def norm_seen_turned_defined(x: Tensor, weight: Tensor) -> Tensor:
    return norm_defined(x, weight).transpose(0, 1).contiguous()


def norm_defined(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turn(x: Tensor) -> Tensor:
    cos, sin = angles(len(x), x.shape[-1], x.dtype)
    return passes.turn(x, cos, sin)


def turn_defined(x: Tensor) -> Tensor:
    """As products of complex numbers."""
    cos, sin = (t[..., : x.shape[-1] // 2] for t in angles(len(x), x.shape[-1], x.dtype))
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), -1)


def gated_defined(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def angles(tokens: int, dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    found = torch.arange(tokens)[:, None] / (1.0 + torch.arange(dims // 2, dtype=torch.float64))
    both = torch.cat((found, found), 1)[:, None]
    return both.cos().to(dtype), both.sin().to(dtype)


def cases() -> Iterator[tuple[str, Function, Function, tuple[Tensor, ...]]]:
    source = torch.Generator().manual_seed(0)
    for shape in [(7, 5), (3, 2, 9), (1, 1), (0, 4)]:
        x, weight = (torch.randn(s, generator=source, dtype=torch.float64) for s in (shape, shape[-1:]))
        yield f"norm {shape}", norm, norm_defined, (x, weight)
    strided = torch.randn(6, 4, generator=source, dtype=torch.float64).t()
    yield "norm of a transposed", norm, norm_defined, (strided, torch.randn(6, generator=source, dtype=torch.float64))
    many, weight = (torch.randn(s, generator=source, dtype=torch.float64) for s in ((3, 2, 5), (5,)))
    yield "norm of heads", norm_seen_turned, norm_seen_turned_defined, (many, weight)
    for heads, dims in [(3, 2), (1, 10)]:
        yield f"turn {heads, dims}", turn, turn_defined, (torch.randn(5, heads, dims, generator=source).double(),)
    for shape in [(7, 5), (1,), (0, 3)]:
        pair = torch.randn(2, *shape, generator=source, dtype=torch.float64).unbind()
        yield f"gated {shape}", passes.gated, gated_defined, pair
    yield "turn of a part", turn, turn_defined, (torch.randn(5, 3, 8, generator=source).double()[..., :6],)


CASES = list(cases())


def differentiated(function: Function, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The value, and the gradients of a weighted sum of it."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    value = function(*leaves)
    seed = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return [value.detach(), *torch.autograd.grad(value, leaves, seed)]


def near(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).norm()) <= 1e-12 * max(1.0, float(expected.norm()))


@pytest.mark.parametrize(("function", "definition", "inputs"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_values_and_gradients_are_those_of_the_definition(
    function: Function, definition: Function, inputs: tuple[Tensor, ...]
) -> None:
    for found, expected in zip(differentiated(function, inputs), differentiated(definition, inputs), strict=True):
        assert found.shape == expected.shape
        assert near(found, expected)


@pytest.mark.parametrize(("function", "inputs"), [(c[1], c[3]) for c in CASES], ids=[c[0] for c in CASES])
def test_gradients_of_gradients_are_right(function: Function, inputs: tuple[Tensor, ...]) -> None:
    leaves = tuple(t.detach().clone().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    x, weight = torch.randn(4, 3), torch.randn(3)
    expected = differentiated(norm_defined, (x, weight))
    for place, inputs in enumerate([(x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())]):
        value = norm(*inputs)
        value.backward(torch.linspace(-1, 2, value.numel()).view(value.shape))
        assert inputs[1 - place].grad is None
        assert torch.allclose(inputs[place].grad, expected[1 + place], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_roundings_of_published_models(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 8).to(dtype)
    cos, sin = angles(5, 8, dtype)
    first, second = x.chunk(2, -1)
    assert torch.equal(passes.turn(x, cos, sin), x * cos + torch.cat((-second, first), -1) * sin)


@pytest.mark.parametrize(("function", "inputs"), [(norm, CASES[0][3]), (turn, CASES[-1][3])], ids=["norm", "turn"])
def test_compiled_and_mapped_they_are_the_same(function: Function, inputs: tuple[Tensor, ...]) -> None:
    expected = differentiated(function, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for found, true in zip(differentiated(compiled, inputs), expected, strict=True):
        assert near(found, true)
    tangents = torch.func.jacrev(function)(*inputs)
    assert tangents.shape == (*expected[0].shape, *inputs[0].shape)


def test_less_is_kept_for_backward_than_by_torch() -> None:
    x, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    held = {}
    for name, function in {"ours": norm, "torch": lambda x, w: F.rms_norm(x, w.shape, w, EPS)}.items():
        kept: dict[int, int] = {}
        note = lambda t, kept=kept: kept.update({t.data_ptr(): t.nbytes}) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            function(x, weight)
        held[name] = sum(kept.values()) - weight.nbytes
    assert held["ours"] == x.nbytes + x.nbytes // 32
    assert held["torch"] >= 2 * x.nbytes
