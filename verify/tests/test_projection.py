"""Sums along dimensions: what they are, that those of shards add up to the whole's, and what differences they show."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isograd_verify.record.sketch import COUNT, project, project_row, weights

from .recordings import numbers

SHAPES = ((5, 7), (37, 53), (3, 4, 5), (2, 3, 4, 5), (300, 1000))


def definition(values: Tensor, starts: tuple[int, ...]) -> dict[int, Tensor]:
    found = {}
    for d in range(values.dim()):
        weighted = values.double().expand(COUNT, *values.shape)
        for e in range(values.dim()):
            if e != d:
                shape = [COUNT, *(values.shape[e] if i == e else 1 for i in range(values.dim()))]
                weighted = weighted * weights(e, starts[e], values.shape[e]).reshape(shape)
        found[d] = weighted.sum([e + 1 for e in range(values.dim()) if e != d])
    return found


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-11 * float(b.norm()))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sums_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    values, starts = numbers(*shape), tuple(range(10, 10 + len(shape)))
    found = project(values, starts)
    assert found.shape == shape
    assert found.along.keys() == set(range(len(shape)))
    for d, sums in definition(values, starts).items():
        assert close(found.along[d], sums)


@given(st.integers(1, 11), st.integers(1, 8), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_sums_of_shards_add_up_to_the_whole_s_in_any_grid(a: int, b: int, c: int) -> None:
    whole = numbers(12, 9, 6)
    total = {d: torch.zeros(COUNT, size).double() for d, size in enumerate(whole.shape)}
    for spans in product(*([(0, cut), (cut, size)] for cut, size in zip((a, b, c), whole.shape, strict=True))):
        piece = project(whole[tuple(slice(*span) for span in spans)], tuple(start for start, _ in spans))
        for d, sums in piece.along.items():
            total[d][:, slice(*spans[d])] += sums
    for d, sums in project(whole).along.items():
        assert close(total[d], sums)


@given(st.lists(st.integers(0, 12 * 54), max_size=5))
@settings(max_examples=30, deadline=None)
def test_sums_of_elements_in_a_row_add_up_wherever_rows_are_cut(cuts: list[int]) -> None:
    whole = numbers(12, 9, 6)
    ends = [0, *sorted(cuts), whole.numel()]
    pieces = [project_row(whole.flatten()[a:b], (12, 9, 6), a) for a, b in pairwise(ends)]
    for d, sums in project(whole).along.items():
        assert close(torch.stack([piece.along[d] for piece in pieces]).sum(0), sums)


def test_rows_that_a_rank_holds_have_the_sums_of_these_rows_of_the_whole() -> None:
    whole, rows, columns = numbers(40, 30), (7, 3, 20, 21), (29, 0, 4)
    assert close(project(whole[list(rows)]).along[0], project(whole).select(0, rows).along[0])
    assert close(project(whole[:, list(columns)]).along[1], project(whole).select(1, columns).along[1])
    assert project(whole).select(1, columns).along.keys() == {1}


def test_weights_depend_on_the_place_alone_and_are_independent_of_one_another() -> None:
    drawn = torch.cat([weights(d, 0, 4096) for d in range(3)])
    assert torch.equal(weights(1, 100, 50), weights(1, 0, 200)[:, 100:150])
    assert float(drawn.abs().min()) >= 0.48
    products = drawn @ drawn.T / 4096
    assert float((products - torch.eye(len(drawn))).abs().max()) < 0.06  # standard error 1 / 64
    shifted = drawn[:, 1:] * drawn[:, :-1]
    assert float(shifted.mean(1).abs().max()) < 0.06


def test_the_norm_is_estimated() -> None:
    ratios = [float(project(numbers(64, 96, seed=s)).numbers.norm() / numbers(64, 96, seed=s).norm()) for s in range(8)]
    assert all(0.8 < ratio < 1.25 for ratio in ratios)
    assert sum(ratios) / 8 == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("pattern", ["one element", "two that cancel", "a square that cancels", "swapped rows"])
def test_differences_in_a_few_elements_are_seen(pattern: str) -> None:
    whole = numbers(70, 90)
    other = whole.clone()
    if pattern == "swapped rows":
        other[[3, 60]] = whole[[60, 3]]
    else:
        other[5, 6] += 0.125
        if pattern != "one element":
            other[5, 8] -= 0.125
        if pattern == "a square that cancels":
            other[9, 6] -= 0.125
            other[9, 8] += 0.125
    ours, theirs = project(other), project(whole)
    size = float((other - whole).norm())
    for d in (0, 1):
        assert float((ours.along[d] - theirs.along[d]).norm()) > 0.02 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_and_transposed_views_are_summed_in_double_precision(dtype: torch.dtype) -> None:
    values = numbers(50, 40, dtype=dtype)
    assert torch.equal(project(values).along[0], project(values.double()).along[0])
    assert close(project(values.T).along[1], definition(values.T, (0, 0))[1])


def test_a_shard_without_elements_has_sums_of_nothing() -> None:
    assert float(project(torch.empty(0, 5)).along[1].abs().sum()) == 0
    assert project(torch.empty(0, 5)).along[0].shape == (COUNT, 0)
