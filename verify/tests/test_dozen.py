"""Programs that a third outside tester wrote (dozen.py): what is said of each wrong one, and of its right twin."""

from __future__ import annotations

from typing import Any

import pytest

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS

from . import dozen
from .test_beside import judged, said
from .test_people import watched

__all__ = ["judged", "watched"]

# Of the wrong program: what is said alone, and beside one device.
PROGRAMS: dict[Any, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    dozen.skipped: ([], [(INCONCLUSIVE, "cut-graph")]),
    dozen.penalised: ([(BUG, "mean-of-means")], [(INCONCLUSIVE, ""), (BUG, "mean-of-means")]),
    dozen.consistent: ([(BUG, "nosync-missing")], [(BUG, "nosync-missing")]),
    dozen.scaled_once: ([(INCONCLUSIVE, "")], [(INCONCLUSIVE, ""), (INCONCLUSIVE, "")]),
    dozen.clips_late: ([(BUG, "clip-per-rank")], [(BUG, "clip-per-rank")]),
    dozen.owners_clip: ([(BUG, "clip-per-rank")], [(BUG, "clip-per-rank")]),
}


@pytest.mark.medium
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_a_right_program_passes_and_its_wrong_twin_does_not(judged: Any, watched: Any, program: Any) -> None:
    alone, beside = PROGRAMS[program]
    right, wrong = watched(program, False), watched(program, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == alone, wrong.findings
    right, wrong = judged(program, False), judged(program, True)
    assert (right.verdict, said(right)) == (PASS, []), right.findings
    assert said(wrong) == beside, wrong.findings
