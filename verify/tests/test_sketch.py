"""Sketches add up as the tensors do, and content hashes as their shards do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd_verify.record.sketch import _ROWS_AT_ONCE, WIDTH, content_hash, sketch

from .recordings import numbers

SIZES = (1, 7, WIDTH - 1, WIDTH, WIDTH + 1, 1000, 70_001)


@pytest.mark.parametrize("size", SIZES)
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(size: int) -> None:
    a, b = numbers(size, seed=1), numbers(size, seed=2)
    expected = sketch(a) + 2.5 * sketch(b)
    assert torch.allclose(sketch(a + 2.5 * b), expected, rtol=1e-12, atol=1e-12 * float(expected.norm()))


@pytest.mark.parametrize("size", [1, 7, WIDTH - 1, WIDTH])
def test_a_small_tensor_is_its_own_sketch_up_to_one_sign(size: int) -> None:
    values = numbers(size)
    found = sketch(values)
    assert found.shape == (WIDTH,)
    assert torch.equal(found[:size], values) or torch.equal(found[:size], -values)
    assert torch.equal(found[size:], torch.zeros(WIDTH - size, dtype=torch.float64))


def test_a_sketch_keeps_the_norm_of_a_large_tensor_on_average() -> None:
    norms = [float(sketch(numbers(70_001, seed=s)).norm() / numbers(70_001, seed=s).norm()) for s in range(8)]
    assert sum(norms) / len(norms) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("at", [0, WIDTH - 1, WIDTH, 999, 70_000])
def test_one_changed_element_changes_the_sketch_by_as_much(at: int) -> None:
    values = numbers(70_001)
    other = values.clone()
    other[at] += 0.125
    assert float((sketch(other) - sketch(values)).norm()) == pytest.approx(0.125, rel=1e-9)


@given(st.lists(st.integers(0, 3000), max_size=5), st.integers(0, 3 * WIDTH))
@settings(max_examples=60, deadline=None)
def test_sketches_of_slices_add_up_to_that_of_the_whole(cuts: list[int], start: int) -> None:
    whole = numbers(3000)
    ends = [0, *sorted(cuts), 3000]
    parts = [sketch(whole[a:b], start + a) for a, b in pairwise(ends)]
    assert torch.allclose(torch.stack(parts).sum(0), sketch(whole, start), rtol=1e-12, atol=1e-12)


def test_slices_on_both_sides_of_a_block_of_rows_add_up() -> None:
    border = WIDTH * _ROWS_AT_ONCE
    values = numbers(5 * WIDTH + 3)
    start = border - 2 * WIDTH - 5
    apart = sketch(values[:700], start) + sketch(values[700:], start + 700)
    assert torch.allclose(apart, sketch(values, start), rtol=1e-12, atol=1e-12)


def test_rows_of_a_matrix_and_transposed_views_are_sketched_as_they_are_read() -> None:
    matrix = numbers(37, 53)
    rows = sketch(matrix[:20]) + sketch(matrix[20:], 20 * 53)
    assert torch.allclose(rows, sketch(matrix), rtol=1e-12, atol=1e-12)
    assert torch.equal(sketch(matrix.T), sketch(matrix.T.contiguous()))
    assert not torch.equal(sketch(matrix.T), sketch(matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_numbers_are_added_up_in_double_precision(dtype: torch.dtype) -> None:
    values = numbers(70_001, dtype=dtype)
    assert sketch(values).dtype == torch.float64
    assert torch.equal(sketch(values), sketch(values.double()))


def test_an_empty_tensor_has_the_sketch_of_nothing() -> None:
    assert torch.equal(sketch(torch.empty(0, 5)), torch.zeros(WIDTH, dtype=torch.float64))


# -- content hashes ------------------------------------------------------------------------------------------------

VALUES = {
    "tokens": torch.randint(50_000, (11, 13), generator=torch.Generator().manual_seed(3)),
    "fp64": numbers(11, 13),
    "bf16": numbers(11, 13, dtype=torch.bfloat16),
    "mask": numbers(11, 13) > 0,
}


@given(st.sampled_from(sorted(VALUES)), st.lists(st.integers(0, 143), max_size=4), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_the_content_hash_adds_up_over_any_sharding_in_any_order(kind: str, cuts: list[int], seed: int) -> None:
    flat = VALUES[kind].reshape(-1)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    ends = [0, *sorted(cuts), len(flat)]
    shards = [flat[order][a:b] for a, b in pairwise(ends)]
    assert sum(map(content_hash, shards)) % 2**64 == content_hash(VALUES[kind])


@given(st.integers(0, 142), st.integers(1, 2**40))
@settings(max_examples=100, deadline=None)
def test_the_content_hash_sees_any_changed_token(at: int, by: int) -> None:
    changed = VALUES["tokens"].reshape(-1).clone()
    changed[at] += by
    assert content_hash(changed) != content_hash(VALUES["tokens"])


@given(st.integers(0, 142))
@settings(max_examples=50, deadline=None)
def test_the_content_hash_sees_a_change_of_the_last_bit(at: int) -> None:
    changed = VALUES["fp64"].reshape(-1).clone()
    changed[at] = torch.nextafter(changed[at], torch.tensor(9.0, dtype=torch.float64))
    assert content_hash(changed) != content_hash(VALUES["fp64"])


def test_the_content_hash_sees_which_of_two_values_is_there_twice_and_what_is_missing() -> None:
    twice, thrice = torch.tensor([3, 3, 8]), torch.tensor([3, 8, 8])
    assert content_hash(twice) != content_hash(thrice)
    assert content_hash(torch.tensor([3, 8])) != content_hash(torch.tensor([3, 8, 0]))
    assert content_hash(torch.tensor([1, 4])) != content_hash(torch.tensor([2, 3]))


def test_equal_numbers_hash_alike_in_whatever_precision_they_are_stored() -> None:
    narrow = VALUES["bf16"]
    assert content_hash(narrow) == content_hash(narrow.float()) == content_hash(narrow.double())
    assert content_hash(VALUES["tokens"].int()) == content_hash(VALUES["tokens"])
