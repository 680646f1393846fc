"""RMSNorm, rotary positions and the gate of SwiGLU have the values and gradients of their definitions, at odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.nn import MLP, RMSNorm
from isograd.nn.rotary import apply_rotary

EPS = 1e-3
Function = Callable[..., Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    layer = RMSNorm(len(weight), Mesh("1"), eps=EPS, dtype=weight.dtype)
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


def norm_defined(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turn(x: Tensor) -> Tensor:
    cos, sin = angles(len(x), x.shape[-1], x.dtype)
    return apply_rotary(x, cos, sin)


def turn_defined(x: Tensor) -> Tensor:
    """As products of complex numbers."""
    cos, sin = (t[..., : x.shape[-1] // 2] for t in angles(len(x), x.shape[-1], x.dtype))
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), -1)


class _Ends(nn.Module):
    """In the place of a linear map of an MLP: what it is given."""

    def __init__(self, value: Tensor | None = None) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x if self.value is None else self.value


def gated(gate: Tensor, up: Tensor) -> Tensor:
    layer = MLP(1, 1, Mesh("1"), key=rng.key(0, "mlp"), activation="silu", gated=True)
    layer.gate, layer.up, layer.down = _Ends(gate), _Ends(up), _Ends()
    return layer(gate)  # type: ignore[no-any-return]


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
    for heads, dims in [(3, 2), (1, 10)]:
        yield f"turn {heads, dims}", turn, turn_defined, (torch.randn(5, heads, dims, generator=source).double(),)
    for shape in [(7, 5), (1,), (0, 3)]:
        pair = torch.randn(2, *shape, generator=source, dtype=torch.float64).unbind()
        yield f"gated {shape}", gated, gated_defined, pair
    yield "turn of a part", turn, turn_defined, (torch.randn(5, 3, 8, generator=source).double()[..., :6],)


CASES = list(cases())


def differentiated(function: Function, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The value, and the gradients of a weighted sum of it."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    value = function(*leaves)
    seed = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return [value.detach(), *torch.autograd.grad(value, leaves, seed)]


@pytest.mark.parametrize(("function", "definition", "inputs"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_values_and_gradients_are_those_of_the_definition(
    function: Function, definition: Function, inputs: tuple[Tensor, ...]
) -> None:
    for found, expected in zip(differentiated(function, inputs), differentiated(definition, inputs), strict=True):
        assert found.shape == expected.shape
        assert float((found - expected).norm()) <= 1e-12 * max(1.0, float(expected.norm()))


@pytest.mark.parametrize(("function", "inputs"), [(c[1], c[3]) for c in CASES], ids=[c[0] for c in CASES])
def test_gradients_of_gradients_are_right(function: Function, inputs: tuple[Tensor, ...]) -> None:
    leaves = tuple(t.detach().clone().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_roundings_of_published_models(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 8).to(dtype), torch.randn(8).to(dtype)
    cos, sin = angles(5, 8, dtype)
    first, second = x.chunk(2, -1)
    assert torch.equal(apply_rotary(x, cos, sin), x * cos + torch.cat((-second, first), -1) * sin)
    wide = x.float()
    assert torch.equal(
        norm(x, weight), weight * (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(dtype)
    )
