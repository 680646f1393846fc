"""Coefficients are found from sketches, or it is said that they cannot be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.contributions import fit
from isograd_verify.record.events import Key
from isograd_verify.record.sketch import WIDTH, sketch

from .recordings import numbers

TIGHT = tolerances.FIT["float64"]


def parts_of(ranks: int, micros: int, size: int = 1001) -> dict[Key, Tensor]:
    """A different contribution of each rank and micro-batch, sketched."""
    return {(k, m): sketch(numbers(size, seed=100 * k + m)) for k in range(ranks) for m in range(micros)}


def mixed(parts: dict[Key, Tensor], coefficients: dict[Key, float]) -> Tensor:
    return torch.stack([coefficients[k] * p for k, p in parts.items()]).sum(0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("c", [1.0, 0.5, -2.0, 1 / 3])
def test_one_coefficient_that_explains_everything_is_found_at_once(ranks: int, micros: int, c: float) -> None:
    parts = parts_of(ranks, micros)
    found = fit(mixed(parts, dict.fromkeys(parts, c)), parts, TIGHT)
    assert found is not None
    assert found.uniform
    assert found.determined
    assert found.residual < 1e-12
    assert found.coefficients == pytest.approx(dict.fromkeys(parts, c), rel=1e-12)


@pytest.mark.parametrize(
    "wanted",
    [
        (1.0, 1.0, 0.0, 0.0),
        (4.0, 2.0, 1.0, 1.0),
        (1 / 3, 1 / 4, 2 / 3, 1.0),
        (-1.0, 1.0, 1.0, 1.0),
        (0.1234567, 0.7654321, 1.5, 0.0),
    ],
)
def test_unequal_coefficients_are_recovered(wanted: tuple[float, ...]) -> None:
    parts = parts_of(2, 2)
    expected = dict(zip(parts, wanted, strict=True))
    found = fit(mixed(parts, expected), parts, TIGHT)
    assert found is not None
    assert not found.uniform
    assert found.determined
    assert found.residual < 1e-12
    assert found.coefficients == pytest.approx(expected, abs=1e-9)


def test_coefficients_near_a_small_fraction_are_shown_as_that_fraction() -> None:
    parts = parts_of(2, 1)
    found = fit(mixed(parts, {(0, 0): 1 / 3 + 1e-9, (1, 0): 1.0}), parts, TIGHT)
    assert found is not None
    assert found.coefficients == {(0, 0): 1 / 3, (1, 0): 1.0}


def test_equal_contributions_of_several_ranks_count_as_one_class_under_the_own_rank() -> None:
    shared, other = sketch(numbers(1001, seed=1)), sketch(numbers(1001, seed=2))
    parts = {(0, 0): shared, (1, 0): shared.clone(), (2, 0): other}
    found = fit(2 * shared + other, parts, TIGHT)
    assert found is not None
    assert found.classes == {(0, 0): ((0, 0), (1, 0)), (2, 0): ((2, 0),)}
    assert found.coefficients == {(0, 0): 2.0, (2, 0): 1.0}
    mine = fit(2 * shared + other, parts, TIGHT, own=1)
    assert mine is not None
    assert mine.classes == {(1, 0): ((1, 0), (0, 0)), (2, 0): ((2, 0),)}


def test_equal_micro_batches_of_one_rank_stay_apart_and_cannot_be_told() -> None:
    shared, other = sketch(numbers(1001, seed=1)), sketch(numbers(1001, seed=2))
    parts = {(0, 0): shared, (0, 1): shared.clone(), (0, 2): other}
    found = fit(2 * shared, parts, TIGHT)
    assert found is not None
    assert set(found.coefficients) == set(parts)
    assert not found.determined


def test_zero_contributions_say_nothing_and_are_dropped() -> None:
    parts = parts_of(2, 2)
    parts[1, 1] = torch.zeros(WIDTH, dtype=torch.float64)
    parts[1, 0] = parts[1, 0] * 1e-15  # nothing, beside the others
    found = fit(mixed(parts, dict.fromkeys(parts, 1.0)), parts, TIGHT)
    assert found is not None
    assert set(found.coefficients) == {(0, 0), (0, 1)}
    assert found.uniform


def test_more_contributions_than_numbers_are_not_determined() -> None:
    parts = {(k, 0): sketch(numbers(3, seed=k)) for k in range(5)}
    found = fit(mixed(parts, {k: 1.0 + k[0] for k in parts}), parts, TIGHT)
    assert found is not None
    assert not found.determined
    assert not found.uniform


def test_contributions_that_are_sums_of_others_are_not_determined() -> None:
    parts = parts_of(3, 1)
    parts[2, 0] = parts[0, 0] + 2 * parts[1, 0]
    found = fit(parts[0, 0], parts, TIGHT)
    assert found is not None
    assert not found.determined


def test_a_scalar_parameter_with_one_contribution_is_determined_and_with_two_it_is_not() -> None:
    one = {(0, 0): sketch(torch.tensor([3.0]))}
    two = {**one, (1, 0): sketch(torch.tensor([5.0]))}
    alone, together = fit(sketch(torch.tensor([6.0])), one, TIGHT), fit(sketch(torch.tensor([6.0])), two, TIGHT)
    assert alone is not None
    assert together is not None
    assert alone.determined
    assert alone.coefficients == pytest.approx({(0, 0): 2.0})
    assert not together.determined


def test_what_is_no_sum_of_contributions_is_left_over() -> None:
    parts = parts_of(2, 2)
    alien = sketch(numbers(1001, seed=999))
    truth = mixed(parts, dict.fromkeys(parts, 1.0))
    found = fit(truth + alien, parts, TIGHT)
    assert found is not None
    assert 0.5 * float(alien.norm()) < found.residual * float((truth + alien).norm()) <= float(alien.norm())


def test_elements_that_no_contribution_reaches_are_left_over() -> None:
    part = torch.zeros(WIDTH, dtype=torch.float64)
    part[:5] = torch.arange(1.0, 6.0)
    gradient = part.clone()
    gradient[9] = 3.0
    found = fit(gradient, {(0, 0): part}, TIGHT)
    assert found is not None
    assert found.residual == pytest.approx(3.0 / float(gradient.norm()))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_explain_nothing(value: float) -> None:
    parts = parts_of(2, 1)
    bad = parts[0, 0].clone()
    bad[3] = value
    assert fit(bad, parts, TIGHT) is None
    assert fit(parts[0, 0], {**parts, (1, 0): bad}, TIGHT) is None


def test_without_contributions_there_is_nothing_to_explain_with() -> None:
    gradient = sketch(numbers(9))
    assert fit(gradient, {}, TIGHT) is None
    assert fit(gradient, {(0, 0): torch.zeros(WIDTH, dtype=torch.float64)}, TIGHT) is None


def test_a_zero_gradient_of_contributions_that_are_not_has_the_coefficient_zero() -> None:
    parts = parts_of(2, 1)
    found = fit(torch.zeros(WIDTH, dtype=torch.float64), parts, TIGHT)
    assert found is not None
    assert found.uniform
    assert set(found.coefficients.values()) == {0.0}


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-6), ("bfloat16", 4e-3)])
def test_rounding_of_the_gradients_own_precision_stays_uniform(dtype: str, noise: float) -> None:
    parts = parts_of(3, 2)
    truth = mixed(parts, dict.fromkeys(parts, 1.0))
    rounded = truth + noise * float(truth.norm()) / WIDTH**0.5 * numbers(WIDTH, seed=77)
    found = fit(rounded, parts, tolerances.FIT[dtype])
    assert found is not None
    assert found.uniform
    strict = fit(rounded, parts, TIGHT)
    assert strict is not None
    assert not strict.uniform
