"""Splits: no stage dearer than it must be, every layer once, and what cannot be cut is refused."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isograd.errors import PipelineError
from isograd.pipeline.split import balanced, ranges

COSTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=7)


def dearest(layers: list[float], sizes: tuple[int, ...], first: float, last: float) -> float:
    sums, at = [], 0
    for size in sizes:
        sums.append(sum(layers[at : at + size]))
        at += size
    sums[0] += first
    sums[-1] += last
    return max(sums)


@given(COSTS, st.integers(1, 4), st.floats(0, 10), st.floats(0, 10))
def test_the_dearest_stage_is_as_cheap_as_can_be(layers: list[float], stages: int, first: float, last: float) -> None:
    """Against all ways to cut."""
    stages = min(stages, len(layers))
    sizes = balanced(layers, stages, first=first, last=last)
    assert len(sizes) == stages
    assert sum(sizes) == len(layers)
    assert min(sizes) >= 1
    every = []
    for ends in combinations(range(1, len(layers)), stages - 1):
        cuts = [0, *ends, len(layers)]
        every.append(tuple(b - a for a, b in pairwise(cuts)))
    best = min(dearest(layers, cut, first, last) for cut in every)
    assert dearest(layers, sizes, first, last) == pytest.approx(best)


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "sizes"),
    [
        (8, 4, (0, 0), (2, 2, 2, 2)),
        (9, 4, (0, 0), (2, 2, 2, 3)),
        (9, 4, (0, 1), (2, 2, 3, 2)),  # the head takes the place of a layer
        (9, 4, (1, 1), (2, 3, 2, 2)),
        (12, 4, (0, 3), (4, 4, 3, 1)),
        (3, 3, (5, 5), (1, 1, 1)),
    ],
)
def test_layers_that_do_not_divide_go_where_they_cost_least(
    layers: int, stages: int, ends: tuple[float, float], sizes: tuple[int, ...]
) -> None:
    found = balanced([1.0] * layers, stages, first=ends[0], last=ends[1])
    costs = [1.0] * layers
    assert dearest(costs, found, *ends) == dearest(costs, sizes, *ends)
    assert max(found) == max(sizes)


def test_measured_costs_move_the_cuts() -> None:
    assert balanced([1, 1, 1, 1, 4, 4], 3) == (4, 1, 1)


def test_ranges_are_the_layer_numbers_of_each_stage() -> None:
    assert ranges((2, 3, 1), 3, 6) == (range(2), range(2, 5), range(5, 6))
    assert ranges((0, 4, 0), 3, 4) == (range(0), range(4), range(4, 4))  # embedding alone, head alone


@pytest.mark.parametrize("split", [(2, 2), (2, 2, 1), (2, 2, 3), (3, 0, 3), (7, -2, 1), ()])
def test_a_split_that_does_not_fit_is_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(PipelineError, match=r"IG807.*\n.*") as error:
        ranges(split, 3, 6)
    assert error.value.code == "IG807"


def test_more_stages_than_layers_are_refused_with_the_numbers() -> None:
    with pytest.raises(PipelineError) as error:
        balanced([1.0, 1.0], 3)
    assert error.value.code == "IG806"
    assert "3 stages (pp x vpp), 2 layers" in str(error.value)
