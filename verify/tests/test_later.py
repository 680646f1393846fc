"""Beside one device all watched steps are compared, and what modules carry from one to the next (V22)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS
from isograd_verify.watch.variables import variables, walk

from . import later
from .test_beside import judged, said
from .test_people import watched

__all__ = ["judged", "watched"]


@pytest.mark.medium
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("inside", [False, True])
def test_a_center_of_each_rank_s_own_rows_is_named_and_its_twin_is_silent(
    judged: Any, ranks: int, inside: bool
) -> None:
    right = judged(later.dino, False, inside, ranks=ranks)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert right.facts["gradients"] == "4 compared by name, step 2 last"
    wrong = judged(later.dino, True, inside, ranks=ranks)
    assert said(wrong) == [(BUG, "statistic-unreduced")], wrong.findings
    (found,) = [f for f in wrong.findings if f.verdict == BUG]
    assert found.sentence.startswith("step 2: loss_of.center changes from step to step")
    assert len(found.tensors) == 4 and max(wrong.errors.values()) > 1e-3


@pytest.mark.parametrize("inside", [False, True])
def test_what_each_rank_carries_from_its_own_rows_into_the_loss_is_flagged_alone(watched: Any, inside: bool) -> None:
    right, wrong = watched(later.dino, False, inside), watched(later.dino, True, inside)  # V22
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    (found,) = [f for f in wrong.findings if f.verdict != NOTE]
    assert (found.verdict, found.bug) == (INCONCLUSIVE, "statistic-unreduced"), found
    assert found.sentence.startswith("step 2: ") and "center began equal, changes from step to step" in found.sentence


def test_a_buffer_that_a_wrapper_takes_from_rank_0_is_flagged_alone(watched: Any) -> None:  # V22
    right, wrong = watched(later.normalised, False), watched(later.normalised, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    (found,) = [f for f in wrong.findings if f.verdict != NOTE]
    assert (found.verdict, found.bug) == (INCONCLUSIVE, "statistic-unreduced"), found
    assert ".size began equal" in found.sentence and "until all get that of one rank" in found.sentence


def test_a_mean_in_a_variable_of_each_rank_s_own_rows_is_open_beside_one_device(judged: Any) -> None:
    right, wrong = judged(later.centred, False), judged(later.centred, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(INCONCLUSIVE, "statistic-unreduced")], wrong.findings


def test_what_a_program_keeps_of_its_variables_stays_as_it_is() -> None:
    def train(rate: float) -> dict[str, Any]:
        kept = locals()  # up to Python 3.12 the very dict that a frame gives
        list(variables())
        return kept

    assert train(0.1)["rate"] == 0.1


def test_tensors_that_are_keys_are_not_spelled() -> None:
    class Freed(torch.Tensor):
        def __repr__(self, **_: Any) -> str:  # as FSDP2's, whose memory is gone between two steps
            raise AssertionError("spelled")

    freed = torch.zeros(2).as_subclass(Freed)
    assert [path for path, _ in walk({"sizes": {freed: torch.ones(2)}, "x": torch.ones(3)}, "own", 0)] == ["own.x"]


@pytest.mark.medium
@pytest.mark.parametrize("first", [False, True])
def test_a_state_that_belongs_to_the_rows_of_a_batch_is_no_statistic(judged: Any, watched: Any, first: bool) -> None:
    for look in (watched, judged):
        subject = look(later.recurrent, first)
        assert (subject.verdict, said(subject)) == (PASS, []), subject.findings


def test_a_buffer_that_the_wrapper_takes_from_rank_0_is_named(judged: Any) -> None:
    right, wrong = judged(later.normalised, False), judged(later.normalised, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(BUG, "statistic-unreduced")], wrong.findings
    (found,) = [f for f in wrong.findings if f.verdict == BUG]
    assert "size changes from step to step" in found.sentence and "the rows of one rank" in found.sentence


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_coefficient_that_changes_with_the_steps_is_no_bug(judged: Any, scheduled: bool) -> None:
    subject = judged(later.weighed, scheduled)
    assert [f for f in subject.findings if f.verdict == BUG] == [], subject.findings
    told = [f.sentence for f in subject.findings if "behind step 1" in f.sentence or "not compared" in f.sentence]
    assert told and "step 1" in subject.facts["gradients"] + told[0]


@pytest.mark.medium
@pytest.mark.parametrize("labels", [True, False])
def test_a_running_size_in_a_plain_variable_is_flagged_alone_and_beside_one(
    judged: Any, watched: Any, labels: bool
) -> None:
    for look in (judged, watched):
        right, wrong = look(later.sized, labels, False), look(later.sized, labels, True)
        assert (right.verdict, said(right)) == (PASS, []), right.findings
        (found,) = [f for f in wrong.findings if f.verdict != NOTE]
        verdict = BUG if look is judged else INCONCLUSIVE
        assert (found.verdict, found.bug, len(found.tensors)) == (verdict, "statistic-unreduced", 2)
        assert found.sentence.startswith("step 2: ") and "that it carries from step to step" in found.sentence
        assert "later.py:" in found.site


@pytest.mark.medium
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_balance_loss_that_counts_once_per_rank_is_named(judged: Any, ranks: int) -> None:
    right, wrong = judged(later.balanced, False, ranks=ranks), judged(later.balanced, True, ranks=ranks)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    (note,) = [f.sentence for f in right.findings if "no mean over rows" in f.sentence]
    assert "another term of the loss at verify/tests/later.py" in note and "in forward" in note
    assert said(wrong) == [(BUG, "aux-times-world")], wrong.findings
    (found,) = [f for f in wrong.findings if f.verdict == BUG]
    assert f"counts {ranks} times what it should" in found.sentence and "later.py" in found.sentence


@pytest.mark.medium
def test_right_programs_of_these_kinds_pass_alone(watched: Any) -> None:
    for program in (later.dino, later.normalised, later.balanced, later.convolutions):
        subject = watched(program, *((False,) if program is not later.convolutions else ()))
        assert (subject.verdict, said(subject)) == (PASS, []), (program, subject.findings)


@pytest.mark.medium
def test_biases_before_a_batch_norm_pass_and_others_do_not(judged: Any) -> None:
    right = judged(later.convolutions)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    for wrong, name in (("scaled", "6.bias"), ("apart", "0.bias")):
        subject = judged(later.convolutions, wrong)
        assert [f.tensors for f in subject.findings if f.verdict == BUG] == [(name,)], subject.findings


def test_a_loss_whose_texts_travel_around_the_ranks_is_no_bug_beside_one(judged: Any) -> None:
    subject = judged(later.ring)
    assert (subject.verdict, said(subject)) == (PASS, []), subject.findings
    assert subject.facts["gradients"] == "5 compared by name, step 1 last", subject.facts


def test_rows_of_a_frequent_token_that_are_added_in_bf16_are_named(watched: Any) -> None:
    right, wrong = watched(later.frequent, False), watched(later.frequent, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    (found,) = [f for f in wrong.findings if f.verdict == BUG]
    assert (found.bug, found.tensors) == ("bf16-accumulation", ("0.weight",)), found
    assert "id 7 occurs 9" in found.sentence and "later.py" in found.site, found


@pytest.mark.medium
def test_weights_of_rows_that_travel_without_a_graph_are_named_alone_and_beside_one(judged: Any, watched: Any) -> None:
    for look in (watched, judged):
        right, wrong = look(later.gated, False), look(later.gated, True)
        assert (right.verdict, said(right)) == (PASS, []), right.findings
        assert said(wrong) == [(BUG, "cut-graph")], wrong.findings
        assert "later.py" in wrong.findings[0].sentence, wrong.findings


@pytest.mark.parametrize("late", [False, True])
def test_a_center_that_no_module_carries_is_flagged_alone_with_its_line(watched: Any, late: bool) -> None:  # V22
    right, wrong = watched(later.distilled, False, late), watched(later.distilled, True, late)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    (found,) = [f for f in wrong.findings if f.verdict != NOTE]
    assert (found.verdict, found.bug) == (INCONCLUSIVE, "statistic-unreduced"), found
    began = "is made in the first step" if late else "began equal"
    assert found.sentence.startswith(f"step 2: centre.mean {began}, changes from step to step"), found
    assert "later.py:" in found.site and "in distilled" in found.site, found


def test_a_center_that_no_module_carries_is_open_beside_one_device_and_its_twin_passes(judged: Any) -> None:
    right, wrong = judged(later.distilled, False), judged(later.distilled, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(INCONCLUSIVE, "statistic-unreduced")], wrong.findings


@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_term_of_the_loss_is_multiplied_by_is_told_alone(watched: Any, wrong: bool) -> None:
    (note,) = [f for f in watched(later.balanced, wrong).findings if f.verdict == NOTE]
    assert f"{0.4 if wrong else 0.2:g} times the term at verify/tests/later.py" in note.sentence, note
    assert "in forward" in note.site, note
