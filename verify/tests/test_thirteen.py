"""Programs that a third outside tester wrote (thirteen.py): each wrong one is named or flagged, its twin passes."""

from __future__ import annotations

from typing import Any

import pytest

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS

from . import thirteen
from .test_beside import judged, said
from .test_people import watched

__all__ = ["judged", "watched"]

MEANS, NORM = [(BUG, "mean-of-means")], [(BUG, "clip-per-rank")]
# Of the wrong program: what is said alone, and beside one device.
PROGRAMS: dict[Any, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    thirteen.piped_means: (MEANS, MEANS),
    thirteen.scaled_together: ([(BUG, "clip-scaled")], [(INCONCLUSIVE, ""), (BUG, "clip-scaled")]),
    thirteen.clipped_shards: (NORM, NORM),
    thirteen.adapted: ([(BUG, "adapter-unreduced")], [(BUG, "adapter-unreduced")]),
    thirteen.smoothed: ([], [(BUG, "wrong-adjoint")]),
    thirteen.turns: ([(BUG, "parameters-mixed")], [(BUG, "parameters-mixed")]),
    thirteen.budgeted: (MEANS, MEANS),
}


@pytest.mark.medium
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_a_wrong_program_is_named_alone_and_beside_one_device_and_its_right_twin_passes(
    judged: Any, watched: Any, program: Any
) -> None:
    for look, expected in zip((watched, judged), PROGRAMS[program], strict=True):
        right, wrong = look(program, False), look(program, True)
        assert (right.verdict, said(right)) == (PASS, []), right.findings
        assert said(wrong) == expected, wrong.findings
        told = [f.sentence for f in (*right.findings, *wrong.findings) if f.verdict == NOTE]
        assert not any("an error of the verifier" in sentence for sentence in told), told


@pytest.mark.medium
def test_stages_that_sum_what_is_tied_are_no_copies(watched: Any) -> None:
    """Norms that began at ones on both were "not summed over ranks"."""
    right, wrong = watched(thirteen.tied, False), watched(thirteen.tied, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == [(BUG, "accum-rereduced")], wrong.findings


@pytest.mark.medium
def test_the_cause_is_that_of_what_is_cut(judged: Any) -> None:
    """An adapter beside a cut weight was "put into a model after it was wrapped"."""
    (found,) = [f for f in judged(thirteen.adapted, True).findings if f.verdict == BUG]
    assert "beside a cut weight" in found.cause and "forward" in found.look, found
    assert found.tensors == ("1.lora_b",)


@pytest.mark.medium
def test_a_loss_that_is_another_one_speaks_of_forward_and_backward(judged: Any) -> None:
    """It was "the same loss", and the function's "backward is not that of its forward"."""
    (found,) = [f for f in judged(thirteen.smoothed, True).findings if f.verdict == BUG]
    assert (
        "another loss" in found.sentence and "its forward or its backward is not that of one device" in found.sentence
    )
    assert "Smoothed at " in found.sentence and "forward first" in found.look, found
