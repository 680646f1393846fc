"""Programs that an outside tester wrote (testers.py): each wrong one is named, and its right twin passes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd_verify.compare.diagnose import _by_shape
from isograd_verify.run.attach import run
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS

from . import later, testers
from .test_beside import judged, said
from .test_people import watched

__all__ = ["judged", "watched"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "bug", "words"),
    [
        (testers.whitened, "statistic-unreduced", "takes over its own"),
        (testers.positions, "positions-restart", "rows 4-7 have a gradient on one device only"),
        (later.ring, "cut-graph", "nothing comes back through send at "),
        (testers.vocabulary, "wrong-adjoint", "CutCrossEntropy at "),  # V11
    ],
)
def test_what_only_one_device_shows_is_named_there(judged: Any, program: Any, bug: str, words: str) -> None:
    right, wrong = judged(program, False), judged(program, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(BUG, bug)], wrong.findings
    assert words in next(f.sentence for f in wrong.findings if f.verdict == BUG), wrong.findings


@pytest.mark.medium
@pytest.mark.parametrize(
    ("program", "bug", "words"),
    [
        (testers.tied, "tie-unreduced", "embed.weight"),
        (testers.own_buffers, "bf16-accumulation", "what 4 micro-batches added was added up in bf16"),
        (testers.by_rows, "norm-unreduced", "norm.weight"),
        (testers.teacher, "copies-begin-apart", "no gradient reaches them"),
    ],
)
def test_what_contradicts_itself_is_named_alone(watched: Any, program: Any, bug: str, words: str) -> None:
    right, wrong = watched(program, False), watched(program, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(BUG, bug)], wrong.findings
    assert words in next(f.sentence for f in wrong.findings if f.verdict == BUG), wrong.findings


@pytest.mark.medium
@pytest.mark.parametrize("micros", [1, 2])
def test_a_sum_over_classes_and_a_mean_over_rows_is_decided(judged: Any, watched: Any, micros: int) -> None:
    for look in (watched, judged):
        right, uneven = look(testers.distilled, "", micros), look(testers.distilled, "uneven", micros)
        assert (right.verdict, said(right)) == (PASS, []), right.findings
        assert said(uneven) == [(BUG, "mean-of-means")], uneven.findings
    summed = judged(testers.distilled, "sum", micros)
    assert said(summed) == [(BUG, "ulysses-scale") if micros == 1 else (INCONCLUSIVE, "")], summed.findings


@pytest.mark.medium
def test_what_each_rank_does_to_its_part_of_a_gradient_is_flagged_beside_one_device(judged: Any) -> None:
    right, wrong = judged(testers.clamped, False), judged(testers.clamped, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert (wrong.verdict, said(wrong)) == (INCONCLUSIVE, [(INCONCLUSIVE, "")]), wrong.findings
    (found,) = [f for f in wrong.findings if f.verdict == INCONCLUSIVE]
    assert "the same loss and other gradients" in found.sentence and len(found.tensors) == 2
    assert min(wrong.errors[name] for name in found.tensors) > 0.1


def test_rows_of_ids_that_do_not_occur_are_no_sign_of_cuts() -> None:  # V11
    truth = torch.randn(12, 5, dtype=torch.float64)
    truth[[3, 7]] = 0
    wrong = truth * torch.rand(12, 1, dtype=torch.float64)
    assert "no known pattern" in _by_shape(wrong, truth).words
    wrong[0] = truth[0]
    assert _by_shape(wrong, truth).words.startswith("right in 1 of 12 rows, wrong in rows 1, 2, 4, 5 and 5 more")


def test_a_signal_from_outside_is_not_the_program_s_fault(tmp_path: Path) -> None:
    """The program sends it to isograd-verify, which has begun to listen by then."""
    program = tmp_path / "train.py"
    program.write_text("import os, sys, time\nos.kill(int(sys.argv[1]), 15)\ntime.sleep(60)\n")
    report, own = run([sys.executable, str(program), str(os.getpid())], tmp_path / "recording")
    (found,) = report.subjects[0].findings
    assert (own, found.verdict) == (143, INCONCLUSIVE)
    assert report.subjects[0].name == f"python train.py {os.getpid()}"
    assert found.sentence.startswith("SIGTERM was sent to isograd-verify")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "alone", "beside"),
    [
        ("no_sync", (BUG, "nosync-missing"), (BUG, "nosync-missing")),
        ("reduced", (INCONCLUSIVE, "cut-graph"), (BUG, "ulysses-scale")),
        ("adapter", (BUG, "outside-wrapper"), (BUG, "outside-wrapper")),
        ("ignored", (BUG, "outside-wrapper"), (BUG, "outside-wrapper")),
        ("inverted", (BUG, "nosync-missing"), (BUG, "nosync-missing")),
        ("anew", (BUG, "replicas-differ"), (BUG, "replicas-differ")),
        ("head", (BUG, "unowned"), (BUG, "unowned")),
    ],
)
def test_a_habit_is_named_and_its_right_twin_passes(
    judged: Any, watched: Any, kind: str, alone: tuple[str, str], beside: tuple[str, str]
) -> None:
    for look, wanted in ((watched, alone), (judged, beside)):
        right, wrong = look(testers.habit, kind, False), look(testers.habit, kind, True)
        assert (right.verdict, said(right)) == (PASS, []), right.findings
        assert wanted in said(wrong) and {bug for v, bug in said(wrong) if v == BUG} <= {wanted[1]}, wrong.findings


@pytest.mark.medium
def test_inputs_that_need_a_gradient_are_given_to_one_device(judged: Any) -> None:
    right, wrong = judged(testers.attributed, False), judged(testers.attributed, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(BUG, "ulysses-scale")], wrong.findings


def test_running_statistics_that_a_teacher_in_eval_mode_uses_are_flagged(watched: Any) -> None:
    right, wrong = watched(testers.evaluated, False), watched(testers.evaluated, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(INCONCLUSIVE, "statistic-unreduced")], wrong.findings
    assert "running_mean" in next(f.sentence for f in wrong.findings if f.verdict == INCONCLUSIVE)
