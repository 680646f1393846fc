"""Rounding is told from bugs, and a gradient from what the loss itself says of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.compare.numerics import (
    Associated,
    Noise,
    direction,
    scale_of,
    slope_along,
    taylor,
    verdict,
)
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS
from isograd_verify.tolerances import NOISE

from .recordings import numbers

LOW, HIGH = NOISE


def small_net() -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, 5)).double()
    x, y = numbers(13, 7), torch.arange(13) % 5
    return dict(net.named_parameters()), lambda: F.cross_entropy(net(x), y)


def gradients_of(parameters: dict[str, Tensor], loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss(), list(parameters.values())), strict=True))


# -- the Taylor test -----------------------------------------------------------------------------------------------


def test_a_right_gradient_is_the_slope_of_the_loss() -> None:
    parameters, loss = small_net()
    gradients = gradients_of(parameters, loss)
    assert taylor(lambda: float(loss()), parameters, gradients) < 1e-7


@pytest.mark.parametrize("factor", [1.001, 0.999, 2.0, 0.0, -1.0])
def test_a_gradient_that_is_wrong_by_a_thousandth_is_seen(factor: float) -> None:
    parameters, loss = small_net()
    gradients = {name: factor * g for name, g in gradients_of(parameters, loss).items()}
    assert taylor(lambda: float(loss()), parameters, gradients) == pytest.approx(abs(factor - 1), rel=1e-4)


def test_one_wrong_tensor_is_seen_along_its_own_direction() -> None:
    parameters, loss = small_net()
    gradients = gradients_of(parameters, loss)
    gradients["2.weight"] = 1.001 * gradients["2.weight"]
    for name, parameter in parameters.items():
        along = {name: direction(name, parameter) * scale_of(parameter)}
        error = taylor(lambda: float(loss()), parameters, gradients, along)
        assert error < 1e-7 if name != "2.weight" else error == pytest.approx(1e-3, rel=1e-3)


def test_a_missing_gradient_counts_as_zero() -> None:
    parameters, loss = small_net()
    gradients = gradients_of(parameters, loss)
    del gradients["0.weight"]
    assert taylor(lambda: float(loss()), parameters, gradients) > 1e-3


def test_parameters_are_left_as_they_were_bit_by_bit() -> None:
    parameters, loss = small_net()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    steps = {name: direction(name, p) for name, p in parameters.items()}
    slope_along(lambda: float(loss()), parameters, steps, h=1e-2)
    assert all(torch.equal(parameters[name], old) for name, old in before.items())


def test_the_slope_of_a_cubic_is_exact() -> None:
    w = {"w": torch.tensor([2.0, -1.0], dtype=torch.float64)}
    slope = slope_along(lambda: float((w["w"] ** 3).sum()), w, {"w": torch.tensor([1.0, 2.0]).double()}, h=0.5)
    assert slope == pytest.approx(3 * 4 * 1 + 3 * 1 * 2, rel=1e-12)


def test_a_direction_depends_on_name_shape_and_seed_alone() -> None:
    shape = torch.zeros(5, 3)
    torch.manual_seed(1)
    first = direction("a.weight", shape)
    torch.manual_seed(2)
    assert torch.equal(direction("a.weight", shape.half() + 1), first)
    assert not torch.equal(direction("b.weight", shape), first)
    assert not torch.equal(direction("a.weight", shape, seed=1), first)
    assert direction("a.weight", torch.zeros(7)).shape == (7,)


def test_the_scale_of_a_parameter_is_its_typical_element_and_never_zero() -> None:
    assert scale_of(torch.full((11, 3), 4.0)) == pytest.approx(4, rel=1e-3)
    assert 0 < scale_of(torch.zeros(9)) < 1e-3


# -- the noise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.0, PASS), (LOW, PASS), (LOW * 1.001, INCONCLUSIVE), (HIGH, INCONCLUSIVE), (HIGH * 1.001, BUG),
        (1e9, BUG), (math.inf, BUG), (math.nan, BUG),
    ],
)  # fmt: skip
def test_errors_are_judged_in_units_of_the_noise(ratio: float, expected: str) -> None:
    assert verdict(ratio) == expected
    assert (LOW, HIGH) == (3.0, 8.0)


def whole(t: Tensor) -> Tensor:
    return t


def noise_of(mean: Tensor, spread: float) -> Noise:
    """Every element with this standard deviation."""
    return Noise("fp64", {"w": mean}, {"w": torch.full_like(mean, spread**2)}, 1e-6)


def test_the_ratio_is_the_distance_in_units_of_the_spread() -> None:
    mean = numbers(12, 5)
    noise = noise_of(mean, 0.01)
    found = (mean + 0.05).float()
    assert noise.ratio("w", found, whole, float(mean.norm())) == pytest.approx(5.0, rel=1e-4)
    assert noise.ratio("w", mean.float(), whole, float(mean.norm())) < 1e-3


def test_a_shard_is_judged_by_its_own_part_of_the_noise() -> None:
    mean = numbers(12, 5)
    variance = torch.full_like(mean, 1e-8)
    variance[:6] = 1e-2
    noise = Noise("fp64", {"w": mean}, {"w": variance}, 1e-6)
    found = (mean + 1e-3).float()
    assert noise.ratio("w", found[:6], lambda t: t[:6], 1.0) == pytest.approx(0.01, rel=1e-2)
    assert noise.ratio("w", found[6:], lambda t: t[6:], 1.0) == pytest.approx(10.0, rel=1e-2)


def test_a_tensor_without_noise_is_held_to_its_format() -> None:
    mean = numbers(12, 5)
    size = float(mean.norm())
    noise = noise_of(mean, 0.0)
    assert noise.ratio("w", mean.float(), whole, size) < LOW
    off = (1 + 100 * torch.finfo(torch.float32).eps) * mean
    assert noise.ratio("w", off.float(), whole, size) == pytest.approx(200, rel=0.02)
    assert noise.ratio("w", (1.01 * mean).float(), whole, size) > HIGH


def test_a_gradient_that_is_zero_but_for_noise_is_judged_on_the_whole() -> None:
    noise = Noise("fp64", {"k.bias": torch.zeros(9).double()}, {"k.bias": torch.zeros(9).double()}, 1e-6)
    assert noise.ratio("k.bias", 1e-11 * numbers(9).float(), whole, 1.0) < LOW
    assert noise.ratio("k.bias", 1e-3 * numbers(9).float(), whole, 1.0) > HIGH


# -- re-association ------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b, c: a @ b,
    "addmm": lambda a, b, c: F.linear(a, b.T.contiguous(), c),
    "bmm": lambda a, b, c: torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)),
    "matmul of three dimensions": lambda a, b, c: a.reshape(3, 3, 257) @ b,
}


@pytest.mark.parametrize("terms", [2, 3, 5])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_really_added_up_in_another_order(name: str, terms: int) -> None:
    operands = numbers(9, 257), numbers(257, 31, seed=1), numbers(31, seed=2)
    product = PRODUCTS[name]
    with Associated(terms):
        narrow = product(*(t.float() for t in operands))
        exact = product(*operands)
    assert not torch.equal(narrow, product(*(t.float() for t in operands)))
    # The same 257 products in fp32, in another order: each sum is off by up to about 257 roundings of 6e-8.
    assert torch.allclose(narrow, product(*operands).float(), rtol=1e-4, atol=1e-4)
    expected = product(*operands)
    assert float((exact - expected).norm() / expected.norm()) < 1e-12


def test_one_term_changes_nothing() -> None:
    a, b = numbers(9, 257).float(), numbers(257, 31, seed=1).float()
    with Associated(1):
        assert torch.equal(a @ b, torch.mm(a, b))
        once = a @ b
    assert torch.equal(once, a @ b)


def test_backward_is_added_up_in_another_order_too() -> None:
    x, weight = numbers(257, 9).float(), numbers(9, 5, seed=1).float().requires_grad_()

    def gradient(terms: int) -> Tensor:
        with Associated(terms):
            ((x @ weight) ** 2).sum().backward()
        assert weight.grad is not None
        found, weight.grad = weight.grad, None
        return found

    plain, other = gradient(1), gradient(3)
    assert not torch.equal(plain, other)
    assert torch.allclose(plain, other, rtol=1e-4)  # fp32, the same terms in another order: roundings of 6e-8 add up


def test_more_terms_than_numbers_are_no_error() -> None:
    a, b = numbers(4, 3), numbers(3, 2, seed=1)
    with Associated(8):
        found = a @ b
    assert torch.allclose(found, a @ b, rtol=1e-12)
