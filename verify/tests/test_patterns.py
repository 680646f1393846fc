"""Each pattern of coefficients is read as what it is, and as nothing else."""

from __future__ import annotations

import pytest

from isograd_verify.judge import patterns
from isograd_verify.judge.patterns import Symptom, read
from isograd_verify.record.events import Key, key


def grid(*by_rank: tuple[float, ...]) -> dict[Key, float]:
    """Coefficients of each rank's micro-batches."""
    return {(k, m): v for k, row in enumerate(by_rank) for m, v in enumerate(row)}


# what it shows: (coefficients, the rank that was read, what it is)
READ: dict[str, tuple[dict[Key, float], int, Symptom]] = {
    "all once": (grid((1, 1), (1, 1)), 0, Symptom(patterns.SCALED, 1.0)),
    "one rank, one micro-batch": (grid((0.5,)), 0, Symptom(patterns.SCALED, 0.5)),
    "all four times": (grid((4, 4, 4), (4, 4, 4)), 1, Symptom(patterns.SCALED, 4.0)),
    "all with the wrong sign": (grid((-1,), (-1,)), 0, Symptom(patterns.SCALED, -1.0)),
    "none at all": (grid((0, 0), (0, 0)), 0, Symptom(patterns.SCALED, 0.0)),
    "nothing known": ({}, 0, Symptom(patterns.SCALED, 0.0)),
    "equal but for noise": (grid((1, 1.0004), (0.9996, 1)), 0, Symptom(patterns.SCALED, 1)),
    "own rank only": (grid((1,), (0,)), 0, Symptom(patterns.UNREDUCED, 1.0, (1,), 0)),
    "own rank only, seen from the last": (grid((0,), (0,), (1,)), 2, Symptom(patterns.UNREDUCED, 1.0, (0, 1), 2)),
    "own rank only, in each micro-batch": (grid((0, 0), (1, 1)), 1, Symptom(patterns.UNREDUCED, 1.0, (0,), 1)),
    "own rank only, and halved": (grid((0.5,), (0,)), 0, Symptom(patterns.UNREDUCED, 0.5, (1,), 0)),
    "own rank only, with noise": (grid((1,), (-0.0005,)), 0, Symptom(patterns.UNREDUCED, 1.0, (1,), 0)),
    "half of the ranks": (
        grid((1, 1), (1, 1), (0, 0), (0, 0)), 1, Symptom(patterns.UNREDUCED, 1.0, (2, 3), 1),
    ),
    "own rank unequally": (grid((1, 3), (0, 0)), 0, Symptom(patterns.UNREDUCED, 0.0, (1,), 0)),
    "a tie over other cuts": (grid((1,), (1,), (0,), (2,)), 0, Symptom(patterns.OTHER_CUTS, 0.0, (2,), 0)),
    "a tie over other cuts, halved": (
        grid((0.5, 0.5), (0.5, 0.5), (0, 0), (1, 1)), 0, Symptom(patterns.OTHER_CUTS, 0.0, (2,), 0),
    ),
    "one missing, none twice": (grid((1,), (3,), (0,)), 0, Symptom(patterns.UNREDUCED, 0.0, (2,), 0)),
    "everybody but the own rank": (grid((0,), (1,)), 0, Symptom(patterns.MIXED)),
    "last micro-batch": (grid((0, 0, 1), (0, 0, 1)), 0, Symptom(patterns.LAST_ONLY, 1.0, (0, 1))),
    "last of two, one rank": (grid((0, 3)), 0, Symptom(patterns.LAST_ONLY, 3.0, (0,))),
    "first micro-batch only": (grid((1, 0, 0), (1, 0, 0)), 0, Symptom(patterns.LOST, 1.0, (1, 2))),
    "middle micro-batch lost": (grid((1, 0, 1)), 0, Symptom(patterns.LOST, 1.0, (1,))),
    "others' first micro-batch lost": (grid((1, 1), (0, 1)), 0, Symptom(patterns.LOST, 1.0, (0,))),
    "others' second use lost": (
        {(0, 0): 1, (0, key(0, 1)): 1, (1, 0): 1, (1, key(0, 1)): 0}, 0, Symptom(patterns.USE_LOST, 1.0, (key(0, 1),)),
    ),
    "powers of two": (grid((4, 2, 1), (4, 2, 1)), 0, Symptom(patterns.REREDUCED, 2.0)),
    "powers of two, two micro-batches": (grid((2, 1)), 0, Symptom(patterns.REREDUCED, 2.0)),
    "powers of four, scaled": (grid((8, 2, 0.5)), 0, Symptom(patterns.REREDUCED, 4.0)),
    "powers of two with noise": (grid((4.01, 2, 1.005)), 0, Symptom(patterns.REREDUCED, 2.0)),
    "powers of two with too much noise": (grid((4.3, 2, 1)), 0, Symptom(patterns.MIXED)),
    "negative powers of two": (grid((-4, -2, -1)), 0, Symptom(patterns.REREDUCED, 2.0)),
    "alternating signs": (grid((4, -2, 1)), 0, Symptom(patterns.MIXED)),
    "divided again with every micro-batch": (grid((1, 2, 4)), 0, Symptom(patterns.REDIVIDED, 2.0)),
    "growing with the micro-batch": (grid((1, 2, 3)), 0, Symptom(patterns.MIXED)),
    "no whole ratio": (grid((3, 2, 1)), 0, Symptom(patterns.MIXED)),
    "two ranks unequally": (grid((1,), (0.7,)), 0, Symptom(patterns.MIXED)),
    "three ranks unequally": (grid((1,), (0.3,), (0.7,)), 2, Symptom(patterns.MIXED)),
    "one sign wrong": (grid((1,), (-1,)), 0, Symptom(patterns.MIXED)),
    "just beyond the tolerance": (grid((1,), (0.997,)), 0, Symptom(patterns.MIXED)),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_coefficients_are_read_as(name: str) -> None:
    q, own, expected = READ[name]
    assert read(q, own) == expected


@pytest.mark.parametrize("name", READ)
def test_a_common_factor_changes_no_pattern(name: str) -> None:
    q, own, expected = READ[name]
    found = read({key: 3e-5 * v for key, v in q.items()}, own)
    assert (found.kind, found.missing, found.own) == (expected.kind, expected.missing, expected.own)


def test_every_pattern_is_in_the_table_or_tested_with_counts() -> None:
    kinds = {expected.kind for _, _, expected in READ.values()}
    assert kinds | {patterns.PER_TOKEN} == {
        patterns.SCALED, patterns.UNREDUCED, patterns.OTHER_CUTS, patterns.LAST_ONLY, patterns.LOST, patterns.USE_LOST,
        patterns.REREDUCED, patterns.REDIVIDED, patterns.PER_TOKEN, patterns.MIXED,
    }  # fmt: skip


COUNTS = {
    "two ranks": grid((7,), (13,)),
    "two ranks and micro-batches": grid((3, 9), (11, 5)),
    "micro-batches of one rank, one twice as long": grid((6, 12)),
    "a rank with no label": grid((7,), (13,), (0,)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_coefficients_that_fall_as_the_counts_rise_are_a_mean_of_means(name: str) -> None:
    counts = COUNTS[name]
    q = {key: 2 / n if n else 0.4 for key, n in counts.items()}
    assert read(q, 0, counts).kind == patterns.PER_TOKEN


def test_equal_counts_explain_no_difference() -> None:
    assert read(grid((1,), (0.7,)), 0, grid((5,), (5,))).kind == patterns.MIXED


def test_equal_coefficients_are_right_whatever_the_counts() -> None:
    assert read(grid((1,), (1,)), 0, grid((5,), (9,))) == Symptom(patterns.SCALED, 1.0)


def test_a_lost_rank_is_no_mean_of_means_whatever_the_counts() -> None:
    assert read(grid((1,), (0,)), 0, grid((5,), (9,))).kind == patterns.UNREDUCED


def test_coefficients_that_rise_with_the_counts_are_no_mean_of_means() -> None:
    assert read(grid((5,), (9,)), 0, grid((5,), (9,))).kind == patterns.MIXED


def test_the_tolerance_is_relative_to_the_largest_coefficient() -> None:
    assert read(grid((1,), (0.95,)), 0, tolerance=0.1) == Symptom(patterns.SCALED, 1)
    assert read(grid((1,), (0.05,)), 0, tolerance=0.1) == Symptom(patterns.UNREDUCED, 1, (1,), 0)
