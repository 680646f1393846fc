"""Loops as people write them (people.py): what is said of right and of wrong ones, watched and beside one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isograd_verify.compare.shares import NoReference, counts_all
from isograd_verify.record.events import LabelWeight
from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS, Subject

from . import field, people
from .test_beside import judged, said

__all__ = ["judged"]
Worlds = Callable[[int], LocalRanks]
BLOCK = {f"block.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")}


@pytest.fixture
def watched(worlds: Worlds, tmp_path: Path) -> Callable[..., Subject]:
    count = 0

    def watch(program: Callable[..., None], *args: Any) -> Subject:
        nonlocal count
        count += 1
        home = tmp_path / f"watched-{count}"
        worlds(2).run(partial(field.watched, program, str(home), *args))
        return inspect(home)

    return watch


def test_right_loops_pass(watched: Any) -> None:
    for program, *args in (
        (people.everything_at_once,),
        (people.uneven_windows,),
        (people.scaled,),
        (people.scaled, True),
        (people.adversaries,),
        (people.teacher,),
        (people.overlapped,),
        (people.reduced_inside_step,),
    ):
        subject = watched(program, *args)
        assert (subject.verdict, said(subject)) == (PASS, []), (program, subject.findings)


def test_right_loops_pass_beside_one_device(judged: Any) -> None:
    for program, count in ((people.everything_at_once, 8), (people.scaled, 9), (people.teacher, 4)):
        subject = judged(program)
        assert (subject.verdict, said(subject)) == (PASS, []), (program, subject.findings)
        assert subject.facts["gradients"] == f"{count} compared by name, step 2 last"


@pytest.mark.medium
@pytest.mark.parametrize("program", [people.adversaries, people.forgers, partial(people.forgers, together=True)])
def test_optimizers_that_step_in_turn_are_compared_with_one_device(judged: Any, watched: Any, program: Any) -> None:
    right = judged(program)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert right.facts["gradients"] == "8 compared by name, step 2 last" and len(right.errors) == 8
    for wrong, step in (("critic", 1), ("generator", 2)):
        subject = judged(program, wrong)
        (found,) = [f for f in subject.findings if f.verdict == BUG]
        assert found.sentence.startswith(f"step {step}: all ") and "gradients: 2 times what they" in found.sentence
    for args in ((), *((("outside",),) if program is people.forgers else ())):
        told = [f.verdict for f in (*watched(program, *args).findings, *judged(program, *args).findings)]
        assert (BUG in told) is bool(args), told


@pytest.mark.medium
@pytest.mark.parametrize("by", ["norm", "value"])
def test_a_clip_before_a_gradient_scaler_has_taken_its_factor_is_named(watched: Any, judged: Any, by: str) -> None:
    for look in (watched, judged):
        for order in ("late", "never"):  # V9
            subject = look(people.clipped, order, by)
            (found,) = [f for f in subject.findings if f.verdict == BUG]
            assert (found.bug, len(found.tensors)) == ("clip-scaled", 9), found
            assert "clipped at 0.01 while the gradient scaler's factor 1024 is still in them" in found.sentence
            assert "people.py:" in found.site and "in clipped" in found.site, found
        subject = look(people.clipped, "first", by)
        assert (subject.verdict, said(subject)) == (PASS, []), subject.findings
    for order in ("times", "small", "two"):
        assert said(watched(people.clipped, order, by)) == [], order
    assert said(watched(people.clipped, "never", by, 1.0)) == []


@pytest.mark.medium
@pytest.mark.parametrize("norm", [False, True])
def test_stages_that_number_their_layers_alike_are_no_copies(watched: Any, norm: bool) -> None:
    """Norms that began at ones on both were "not summed over ranks"."""
    subject = watched(people.stages_by_hand, norm)
    assert (subject.verdict, said(subject)) == (PASS, []), subject.findings


@pytest.mark.medium
def test_wrong_loops_are_named_with_their_tensors(watched: Any) -> None:
    for program, args, bug, tensors, sentence in (
        (people.late_layer, (), "outside-wrapper", {"extra.weight", "extra.bias"}, "step 1: biases and weights"),
        (people.unfrozen_later, (), "outside-wrapper", BLOCK, "step 2: "),  # V14
        (people.forward_inside_no_sync, (), "nosync-missing", None, "step 1: all 9 gradients: not summed over"),
        (people.reduced_inside_step, (True,), "", None, "not summed over ranks 0, 1"),
        (people.served, ("norm.weight",), "replicas-differ", {"norm.weight"}, "copies of norm.weight differ"),
    ):
        subject = watched(program, *args)
        (found,) = [f for f in subject.findings if f.verdict == BUG]
        assert (found.bug, sentence in found.sentence) == (bug, True), found
        assert tensors in (None, set(found.tensors)), found
    assert "block.0.weight" not in watched(people.reduced_inside_step, True).findings[0].tensors  # that one is summed


@pytest.mark.medium
def test_what_watching_alone_leaves_open_is_found_beside_one_device(watched: Any, judged: Any) -> None:
    assert said(watched(people.loss_reduced_in_place)) == [(INCONCLUSIVE, "cut-graph")]
    (found,) = [f for f in judged(people.loss_reduced_in_place).findings if f.verdict == BUG]
    assert "all 9 gradients: 0.5 times what they should be" in found.sentence
    late = [f for f in judged(people.late_layer).findings if f.verdict == BUG]
    assert [set(f.tensors) for f in late] == [{"extra.weight", "extra.bias"}]


@pytest.mark.medium
def test_what_is_not_read_is_said(watched: Any, judged: Any) -> None:
    """Right programs, of which some steps are out of sight: no bug, and no pass either."""
    for program, sentence in (
        (people.flat_shards, "all 9 gradients: each rank has its own, no optimizer owns the parameters"),
        (people.served, "rank 1 took no optimizer step at all"),
    ):
        subject = watched(program)
        open_ = [f.sentence for f in subject.findings if f.verdict == INCONCLUSIVE]
        assert (subject.verdict, sentence in open_[0]) == (INCONCLUSIVE, True), subject.findings
    for program, sentence in (
        (people.reduced_inside_step, "only 0 of 9 gradients were compared"),
        (people.flat_shards, "only 0 of 9 gradients were compared"),
        (people.served, "no optimizer was seen to step"),
    ):
        subject = judged(program)
        assert (subject.verdict, sentence in subject.findings[0].sentence) == (INCONCLUSIVE, True), subject.findings


def test_layers_that_are_frozen_at_first_are_not_taken_for_cut_off(judged: Any) -> None:  # V14
    subject = judged(people.unfrozen_later)
    (found,) = [f for f in subject.findings if f.verdict == BUG]
    assert (found.bug, set(found.tensors), found.sentence[:6]) == ("outside-wrapper", BLOCK, "step 2"), found
    subject = judged(people.unfrozen_later, False)
    assert (subject.verdict, said(subject)) == (PASS, []), subject.findings
    assert subject.facts["gradients"] == "9 compared by name, step 2 last"


@pytest.mark.medium
def test_a_count_of_all_ranks_that_the_model_is_given_is_given_on_one_device_too(judged: Any) -> None:
    right = judged(people.counted)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert right.facts["gradients"] == "9 compared by name, step 2 last"
    assert said(judged(people.counted, "own")) == [(BUG, "mean-of-means")]
    hidden = judged(people.counted, "number")  # no tensor: one device counts its own rows
    assert (hidden.verdict, said(hidden)) == (PASS, []), hidden.findings


class Told:
    """A recording of one step with one cross-entropy."""

    def __init__(self, count: float, divisor: float) -> None:
        self.weight = LabelWeight(1, 0, count=count, low=1 / divisor, high=1 / divisor, site="train.py:9")
        self.ranks, self.record, self.step = [self], self, 1

    def of(self, kind: Any, step: int) -> list[Any]:
        return [self.weight] if kind is LabelWeight else []


@pytest.mark.parametrize(
    ("count", "divisor", "right"), [(40, 40, True), (40, 14, False), (14, 14, True), (40, 13, False)]
)
def test_a_count_that_was_taken_of_fewer_rows_is_no_reference(count: float, divisor: float, right: bool) -> None:
    with nullcontext() if right else pytest.raises(NoReference, match="counted before the model is called"):
        counts_all(Told(14, 14), [Told(count, divisor)])  # type: ignore[arg-type, list-item]


def test_a_sum_of_more_rows_weighs_more() -> None:
    counts_all(Told(14, 1), [Told(40, 1)])  # type: ignore[arg-type, list-item]
