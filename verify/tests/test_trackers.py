"""Programs of public trackers and libraries (trackers.py): each wrong one is named, and its right twin passes, watched
alone and beside one device. V1 to V24 are the rows of issue 42's table: `grep -rn "V7\b" verify/tests`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isograd_verify.run.attach import inspect
from isograd_verify.run.ranks import LocalRanks
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Subject

from . import field, people, trackers
from .test_beside import judged, said

__all__ = ["judged"]
Worlds = Callable[[int], LocalRanks]

RIGHT: tuple[tuple[Any, ...], ...] = (
    (trackers.sharded_ddp,),  # V1
    (trackers.zero_by_hand,),  # V15
    (trackers.sparse_embedding,),  # V16
    (trackers.muon_and_adamw,),  # V16
    (trackers.discriminator,),  # V4
    (trackers.contrastive,),  # V5, V11
    (trackers.contrastive, "full_tensor partial"),  # V5
    (trackers.contrastive, "to_local partial"),  # V5
    (trackers.contrastive, "nn"),  # V20
    (trackers.tasks, False),  # V7
    (trackers.clipped_before_the_sum, False),  # V9
    (trackers.tensor_parallel,),  # V8
    (trackers.two_and_two, False),  # V12
    (trackers.reduced_twice, False),  # V23
    (trackers.hook_that_never_runs, True),  # V14
    (trackers.group_of_one, False),  # V14, V24
    (people.unfrozen_later, False),  # V14
    (trackers.mean_per_micro, False),  # V6
    (trackers.norm_of_own_shards,),  # V9
    (trackers.changed_in_a_flat_sum, "copied", 0.1, 0.0),
    (trackers.changed_in_a_flat_sum, "views", 0.1, 0.0),
    (trackers.changed_in_a_flat_sum, "copied", 0.0, 0.05),  # V9
)
WRONG: tuple[tuple[Any, ...], ...] = (  # program, arguments, bug, words of what is said alone, and beside one device
    (trackers.sharded_ddp, ("0.weight",), "", "weights (0.weight): not summed over ranks 0, 1", ""),  # V1
    (trackers.zero_by_hand, ("0.weight",), "replicas-differ", "copies of 0.weight differ", ""),  # V15
    (trackers.zero_by_hand, ("", "0.weight"), "", "weights (0.weight): not summed over ranks 0, 1", ""),
    (trackers.sparse_embedding, (True,), "", "weights (0.weight): not summed", ""),  # V16
    (trackers.muon_and_adamw, (True,), "", "weights (block.0.weight, block.2.weight): not summed", ""),  # V16
    (trackers.discriminator, (True,), "outside-wrapper", "Sequential.0.bias", "Sequential.0.weight"),  # V4
    (trackers.clipped_before_the_sum, (True,), "clip-per-rank", "clips by a norm of its own before the sum", ""),  # V9
    (trackers.hook_that_never_runs, (), "norm-unreduced", "(norm.bias, norm.weight): not summed", "not summed"),  # V14
    (trackers.group_of_one, (), "nosync-missing", "all 9 gradients: not summed over ranks 0, 1", ""),  # V14
    (trackers.tasks, (), "parameters-mixed", "heads.1.bias and 1 more): ranks bring gradients of", ""),  # V7
    (trackers.norm_of_own_shards, ("local",), "clip-per-rank", "rank 0 by 0.01595, rank 1 by 0.01741", ""),  # V9
    (trackers.contrastive, ("dropped",), "wrong-adjoint", "Gather at verify/tests/trackers.py", ""),  # V5, V11
    (trackers.contrastive, ("full_tensor",), "wrong-adjoint", "Redistribute at verify/tests/trackers.py", ""),  # V5
    (trackers.contrastive, ("to_local",), "wrong-adjoint", "Redistribute at verify/tests/trackers.py", ""),  # V5
    (trackers.contrastive, ("noncontiguous",), "wrong-adjoint", "_AllGather at verify/tests/trackers.py", ""),  # V20
)
OPEN: tuple[tuple[Any, ...], ...] = (  # alone INCONCLUSIVE by this name; beside one device a BUG by it
    (trackers.reduced_twice, (), "reduced-twice"),  # V23
    (trackers.two_and_two, (), "accum-undivided"),  # V12
    (trackers.two_and_two, (False, True), "reduced-twice"),  # V23
    (trackers.mean_per_micro, (), "accum-undivided"),  # V6
    (trackers.changed_in_a_flat_sum, ("copied", 0.0, 0.05, True), "accum-undivided"),  # V9
)


def name_of(value: Any) -> str:
    return value.__name__ if callable(value) else "-".join(map(str, value)) if isinstance(value, tuple) else ""


@pytest.fixture
def both(judged: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Subject]]:
    """What is said of a program alone, and beside one device."""
    alone: list[Subject] = []
    monkeypatch.setattr(
        "verify.tests.test_beside.inspect", lambda home: alone.append(inspect(home)) or copy.deepcopy(alone[-1])
    )

    def judge(program: Callable[..., None], *args: Any, ranks: int = 2) -> list[Subject]:
        beside = judged(program, *args, ranks=ranks)
        return [alone[-1], beside]

    return judge


@pytest.mark.medium
@pytest.mark.parametrize("program", RIGHT, ids=lambda row: f"{row[0].__name__}-{row[1:]}")
def test_a_right_program_passes_alone_and_beside_one_device(both: Any, program: tuple[Any, ...]) -> None:
    for subject in both(*program):
        assert (subject.verdict, said(subject)) == (PASS, []), subject.findings


@pytest.mark.medium
@pytest.mark.parametrize(("program", "args", "bug", "alone", "beside"), WRONG, ids=name_of)
def test_a_wrong_program_is_named_once_alone_and_beside_one_device(
    both: Any, program: Any, args: tuple[Any, ...], bug: str, alone: str, beside: str
) -> None:
    for subject, words in zip(both(program, *args), (alone, beside or alone), strict=True):
        assert said(subject) == [(BUG, bug)], subject.findings
        (found,) = [f for f in subject.findings if f.verdict == BUG]
        assert words in found.sentence


def test_other_data_on_parts_of_one_model_are_named_where_no_device_can_be_given_both(both: Any) -> None:  # V8
    for subject in both(trackers.tensor_parallel, "data"):
        (found,) = [f for f in subject.findings if f.verdict == BUG]
        assert found.bug == "inputs-differ"
        assert "ranks 0, 1 hold parts of one model (up, down)" in found.sentence


@pytest.mark.medium
@pytest.mark.parametrize(("program", "args", "bug"), OPEN, ids=name_of)
def test_a_factor_is_flagged_alone_and_decided_beside_one_device(
    both: Any, program: Any, args: tuple[Any, ...], bug: str
) -> None:
    alone, beside = both(program, *args)
    assert [f for f in said(alone) if f[1]] == [(INCONCLUSIVE, bug)], alone.findings
    assert said(beside) == [(BUG, bug)], beside.findings


def test_functional_gradients_are_said_not_to_be_watched_in_one_line(both: Any) -> None:  # V21, V4
    subject, beside = both(trackers.functional)
    assert beside.findings[0].sentence == "not compared with one device: no backward was seen"
    (found,) = [f for f in subject.findings if f.verdict != NOTE]
    assert (found.verdict, subject.verdict) == (INCONCLUSIVE, INCONCLUSIVE)
    assert found.sentence.startswith("the program takes gradients by torch.func")
    assert [f.sentence[:24] for f in subject.findings if f.verdict == NOTE] == ["not judged: 4 parameters"]


@pytest.mark.medium
def test_a_program_that_fails_never_passes(worlds: Worlds, tmp_path: Path) -> None:  # V18
    with pytest.raises(Exception, match="no more data"):
        worlds(2).run(partial(field.watched, trackers.raises, str(tmp_path)))
    subject = inspect(tmp_path, failed=1)
    assert subject.verdict == INCONCLUSIVE
    assert [f.sentence for f in subject.findings if f.verdict == INCONCLUSIVE] == [
        "the program failed with exit code 1: 2 of the steps to watch (all) were seen to their end"
    ]


@pytest.mark.medium
def test_the_heat_map_shows_both_ranks_wrong_where_neither_gradient_was_summed(both: Any) -> None:  # V24
    for subject in both(trackers.group_of_one):
        assert subject.by_rank and all(min(row) > 0.1 for row in subject.by_rank.values()), subject.by_rank


@pytest.mark.medium
def test_a_finding_without_a_name_has_the_line_of_its_last_reduction_or_backward(both: Any) -> None:  # V19
    for subject in both(trackers.sharded_ddp, "0.weight"):
        (found,) = [f for f in subject.findings if f.verdict == BUG]
        assert (found.bug, found.site.partition(":")[0]) == ("", "verify/tests/trackers.py")
