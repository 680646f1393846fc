"""Programs that a second outside tester wrote (twelve.py): each wrong one is named or flagged, its twin is not."""

from __future__ import annotations

from typing import Any

import pytest

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS

from . import testers, twelve
from .test_beside import judged, said
from .test_people import watched

__all__ = ["judged", "watched"]

# Of the wrong program: what is said alone, and beside one device. Of the right one: the verdict beside one device.
PROGRAMS: dict[Any, tuple[list[tuple[str, str]], list[tuple[str, str]], str]] = {
    twelve.branched: ([(BUG, "input-unreduced")], [(BUG, "input-unreduced")], PASS),
    twelve.views: ([(BUG, "wrong-adjoint")], [(BUG, "wrong-adjoint")], PASS),
    twelve.clipped: ([(BUG, "accum-clipped")], [(INCONCLUSIVE, ""), (BUG, "accum-clipped")], PASS),
    twelve.flat: ([(BUG, "parameters-mixed")], [(BUG, "parameters-mixed")], PASS),
    twelve.injected: ([(BUG, "aux-times-micro")], [(BUG, "aux-times-micro")], PASS),
    twelve.penalized: (
        [(INCONCLUSIVE, "aux-times-world")], [(INCONCLUSIVE, ""), (INCONCLUSIVE, "aux-times-world")], INCONCLUSIVE,
    ),
    twelve.normalized: ([(INCONCLUSIVE, "statistic-unreduced")], [(INCONCLUSIVE, "statistic-unreduced")], PASS),
    twelve.divided: ([(BUG, "mean-of-means")], [(BUG, "mean-of-means")], PASS),
    testers.vocabulary: ([(BUG, "wrong-adjoint")], [(BUG, "wrong-adjoint")], PASS),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_a_wrong_program_is_named_alone_and_beside_one_device_and_its_right_twin_passes(
    judged: Any, watched: Any, program: Any
) -> None:
    alone, beside, verdict = PROGRAMS[program]
    right, wrong = watched(program, False), watched(program, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == alone, wrong.findings
    right, wrong = judged(program, False), judged(program, True)
    assert right.verdict == verdict, right.findings
    assert all(found == (INCONCLUSIVE, "") for found in said(right)), right.findings
    assert said(wrong) == beside, wrong.findings
