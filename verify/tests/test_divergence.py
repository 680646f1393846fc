"""The first module that goes wrong is named; rows that only stand elsewhere are known from rows that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isograd_verify.compare.divergence import Match, contained, first_divergence, same_numbers
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding

from .recordings import Step, numbers, write

A, B, C, D = numbers(4, 5)  # four rows
IN_ORDER, SHUFFLED, ABSENT = Match(True, True), Match(True, False), Match(False)


def rows(*of: Tensor) -> Tensor:
    return torch.stack(of)


TOLD: dict[str, tuple[Tensor, Tensor, Match]] = {
    "the same": (rows(A, B, C), rows(A, B, C), IN_ORDER),
    "a part": (rows(B, C), rows(A, B, C, D), IN_ORDER),
    "every other row": (rows(A, C), rows(A, B, C, D), IN_ORDER),
    "swapped": (rows(B, A), rows(A, B, C), SHUFFLED),
    "reversed": (rows(D, C, B, A), rows(A, B, C, D), SHUFFLED),
    "a row that is not there": (rows(A, D), rows(A, B, C), ABSENT),
    "a row scaled": (rows(A, 2 * B), rows(A, B, C), ABSENT),
    "a part in which a later row equals an earlier one": (rows(A, C), rows(A, B, A, C), IN_ORDER),
    "a part that begins at the second of two equal rows": (rows(A, C, B), rows(A, B, A, C, B), IN_ORDER),
    "two equal rows": (rows(A, A, B), rows(A, A, B), IN_ORDER),
    "all rows equal": (rows(A, A), rows(A, A, A, A), IN_ORDER),
    "two equal rows around another": (rows(A, B, A), rows(A, B, A), IN_ORDER),
    "swapped among equal rows": (rows(B, A, A), rows(A, A, B), SHUFFLED),
    "some features": (rows(A, B, C)[:, 1:3], rows(A, B, C), IN_ORDER),
    "features in another order": (rows(A, B, C)[:, [2, 1]], rows(A, B, C), SHUFFLED),
    "a scalar": (torch.tensor(2.5), torch.tensor(2.5), IN_ORDER),
    "another scalar": (torch.tensor(2.5), torch.tensor(2.6), ABSENT),
    "a row more often than it was": (rows(A, A, B), rows(A, B, C), IN_ORDER),  # no other order of A, B and C
    "another shape": (numbers(3, 4), numbers(6, 7), ABSENT),
    "tokens": (torch.arange(6), torch.arange(3), IN_ORDER),  # no activation: nothing to say
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_part_of_an_activation_is(name: str, dtype: torch.dtype) -> None:
    local, whole, expected = TOLD[name]
    if local.is_floating_point():
        local, whole = local.to(dtype), whole.to(dtype)
    assert contained(local, whole) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
@settings(max_examples=150, deadline=None)
def test_a_subsequence_is_never_called_a_permutation_whatever_repeats(symbols: list[int], data: st.DataObject) -> None:
    whole = rows(*(rows(A, B, C, D)[s] for s in symbols))
    kept = sorted(data.draw(st.sets(st.integers(0, len(symbols) - 1), min_size=1)))
    assert contained(whole[kept], whole) == IN_ORDER


@given(st.permutations(range(7)))
@settings(max_examples=60, deadline=None)
def test_any_other_order_of_different_rows_is_a_permutation(order: list[int]) -> None:
    whole = numbers(7, 3, seed=4)
    assert contained(whole[order], whole) == (IN_ORDER if order == sorted(order) else SHUFFLED)


def test_rounding_of_the_activations_precision_changes_nothing() -> None:
    whole = numbers(9, 6).float()
    noisy = whole[2:7] + 1e-6 * numbers(5, 6, seed=1).float()
    assert contained(noisy, whole) == IN_ORDER
    assert contained(whole.double()[2:7] + 1e-4 * numbers(5, 6, seed=1), whole.double()) == ABSENT
    assert contained(whole[2:7] + 1e-2 * numbers(5, 6, seed=1).float(), whole) == ABSENT


def test_gradients_of_another_scale_are_told_by_their_directions() -> None:
    whole = numbers(6, 5)
    assert contained(3 * whole[1:4], whole) == ABSENT
    assert contained(3 * whole[1:4], whole, directions=True) == IN_ORDER
    assert contained(3 * numbers(3, 5, seed=8), whole, directions=True) == ABSENT


def test_the_same_numbers_elsewhere_are_told_from_other_numbers() -> None:
    whole = numbers(4, 3, 5)
    assert same_numbers(whole.transpose(0, 1).reshape(4, 3, 5), whole)
    assert same_numbers(whole[1:3].flip(2), whole)
    assert not same_numbers(whole * 2, whole)
    assert not same_numbers(numbers(4, 3, 5, seed=1), whole)
    assert not same_numbers(numbers(5, 3, 5), whole)  # more numbers than there are


def test_the_same_numbers_are_not_looked_for_in_single_precision() -> None:
    whole = numbers(4, 3, 5).float()
    assert not same_numbers(whole.flip(0), whole)


# -- the first module ----------------------------------------------------------------------------------------------

X, W1, W2 = numbers(6, 5), numbers(5, 5, seed=1), numbers(5, 4, seed=2)


def activations(
    outer: Tensor, first: Tensor, second: Tensor, back: Tensor | None = None, x: Tensor = X
) -> dict[str, Tensor]:
    """Model(first, second) on x, as modules finish: inner ones before the outer one."""
    found = {
        "out/0/000001/first#0": first, "in/0/000002/first#0": x,
        "out/0/000003/second#0": second, "in/0/000004/second#0": first,
        "out/0/000005/#0": outer, "in/0/000006/#0": x,
        "parameter/second.bias": numbers(4, seed=7),
    }  # fmt: skip
    if back is not None:
        found |= {"back/0/000007/second#0": back}
    return found


def run(home: Path, *of_ranks: dict[str, Tensor]) -> Recording:
    return write(home, [[Step({}, tensors=tensors)] for tensors in of_ranks])


def told(tmp_path: Path, *of_ranks: dict[str, Tensor]) -> Finding | None:
    right = activations(X @ W1 @ W2, X @ W1, X @ W1 @ W2, back=numbers(6, 4, seed=3))
    found = first_divergence(run(tmp_path / "reference", right), run(tmp_path / "candidate", *of_ranks))
    assert len(found) <= 1
    return found[0] if found else None


def halves(wrong: Tensor | None = None, back: Tensor | None = None) -> list[dict[str, Tensor]]:
    """Each rank has half of the rows; `wrong` is what the second module gives on rank 1."""
    found = []
    for rank, mine in enumerate((slice(0, 3), slice(3, 6))):
        y = (X @ W1 @ W2)[mine] if wrong is None or rank == 0 else wrong
        g = numbers(6, 4, seed=3)[mine] if back is None or rank == 0 else back
        found.append(activations(y, (X @ W1)[mine], y, g, X[mine]))
    return found


def test_nothing_is_said_of_activations_that_are_the_references(tmp_path: Path) -> None:
    assert told(tmp_path, *halves()) is None


def test_nothing_is_said_when_activations_were_not_recorded(tmp_path: Path) -> None:
    bare = run(tmp_path / "reference", {"parameter/a": A})
    assert first_divergence(bare, run(tmp_path / "candidate", *halves(numbers(3, 4)))) == []


def test_the_module_with_the_right_input_and_a_wrong_output_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, *halves(numbers(3, 4, seed=9)))
    assert found is not None
    assert found.verdict == BUG
    assert found.sentence.startswith("forward: second is the first whose output differs although its input is right")
    assert "(rank 1)" in found.sentence


def test_a_module_is_not_blamed_for_its_input(tmp_path: Path) -> None:
    wrong = numbers(6, 5, seed=9)
    found = told(tmp_path, activations(wrong @ W2, wrong, wrong @ W2))
    assert found is not None
    assert "forward: first is the first" in found.sentence
    data = told(tmp_path / "data", activations(wrong @ W1 @ W2, wrong @ W1, wrong @ W1 @ W2, x=wrong))
    assert data is None


def test_right_numbers_in_other_places_are_a_permutation(tmp_path: Path) -> None:
    y = (X @ W1 @ W2)[3:6]
    for i, shuffled in enumerate((y[[1, 0, 2]], y.T.reshape(3, 4))):
        found = told(tmp_path / str(i), *halves(shuffled))
        assert found is not None
        assert (found.verdict, found.bug) == (BUG, "ulysses-permute")
        assert found.sentence.startswith("forward: second is given the right input and returns the right numbers in")
        assert "on rank 1" in found.sentence


def test_an_own_bias_that_was_added_twice_is_named(tmp_path: Path) -> None:
    right = X @ W1 @ W2
    tensors = activations(right, X @ W1, right + numbers(4, seed=7))
    found = told(tmp_path, tensors, tensors)
    assert found is not None
    assert (found.verdict, found.bug) == (BUG, "bias-n-times")


def test_a_gradient_that_differs_alone_is_told_of_backward(tmp_path: Path) -> None:
    found = told(tmp_path, *halves(back=numbers(3, 4, seed=9)))
    assert found is not None
    assert found.verdict == INCONCLUSIVE
    assert found.sentence == "backward: the gradient of second's output is the first that differs (rank 1)"


def test_a_gradient_that_is_only_scaled_is_not_the_first_that_differs(tmp_path: Path) -> None:
    assert told(tmp_path, *halves(back=2 * numbers(6, 4, seed=3)[3:])) is None


def test_what_all_samples_share_gets_a_part_of_its_gradient_on_each_rank(tmp_path: Path) -> None:
    whole, mine = numbers(6, 4, seed=3), numbers(6, 4, seed=8)
    ranks = [activations(X @ W1 @ W2, X @ W1, X @ W1 @ W2, back=g) for g in (mine, whole - mine)]
    assert told(tmp_path, *ranks) is None
    assert told(tmp_path / "wrong", ranks[0], ranks[0]) is not None
