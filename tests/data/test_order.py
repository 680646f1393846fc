"""The order is a bijection, the blend keeps its proportions in every prefix: by hypothesis, against plain counting."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd.data.order import Blend, shuffled
from isograd.errors import DataError


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), key=st.binary(min_size=1, max_size=16))
def test_a_shuffle_meets_every_number_once(size: int, key: bytes) -> None:
    assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 2**60), data=st.data())
def test_a_shuffle_of_any_size_stays_inside_and_sends_different_numbers_apart(size: int, data: st.DataObject) -> None:
    some = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    sent = [shuffled(i, size, b"key") for i in some]
    assert len(set(sent)) == len(some)
    assert all(0 <= place < size for place in sent)


def test_a_shuffle_is_none_of_the_orders_that_it_would_be_by_mistake() -> None:
    size = 1000
    one, other = ([shuffled(i, size, key) for i in range(size)] for key in (b"1", b"2"))
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 10  # another key, another order: about 1 is alike
    assert sum(b - a in (1, -1) for a, b in pairwise(one)) < 12  # neighbours part: about 2 do not
    assert 200 < sum(i < 500 for i in one[:500]) < 300  # the first half comes from everywhere: about 250


def test_the_positions_of_a_number_over_many_keys_are_even() -> None:
    """Chi-square over 13 places: above 40 has odds below 1 in 10,000, and the keys are fixed."""
    rounds = 2600
    counts = Counter(shuffled(4, 13, str(key).encode()) for key in range(rounds))
    assert sum((counts[place] - rounds / 13) ** 2 / (rounds / 13) for place in range(13)) < 40


WEIGHTS = st.lists(st.integers(1, 60).map(lambda n: n / 20), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**15))
def test_every_prefix_of_a_blend_is_within_one_sample_of_the_weights(weights: list[float], start: int) -> None:
    blend = Blend(weights)
    counts = [0] * len(weights)
    for sample in range(2 * blend.period + 3):
        source, before = blend.at(sample)
        assert before == counts[source], "a source's samples are numbered without gaps"
        counts[source] += 1
        assert all(abs(c - (sample + 1) * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))
    source, before = blend.at(start)
    assert abs(before - start * weights[source] / sum(weights)) < 1 + 1e-3  # fp: start * w is near 10**15


def test_weights_are_the_decimals_that_people_write() -> None:
    assert Blend([0.7, 0.2, 0.1]).parts == [7, 2, 1]
    assert Blend([3, 1.5]).parts == [2, 1]
    assert Blend([1e-3, 1]).parts == [1, 1000]
    assert Blend([5.0]).parts == [1]


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0], [float("nan")], [float("inf")], [True], ["1"]])
def test_weights_that_are_no_proportions_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="weights that are no proportions"):
        Blend(weights)


def test_a_blend_that_hardly_ever_repeats_is_refused_with_one_that_does() -> None:
    with pytest.raises(DataError) as caught:
        Blend([0.123456789, 0.5])
    assert caught.value.code == "IG907"
    assert "1980, 8020" in str(caught.value)
    assert Blend([1980, 8020]).period == 500
