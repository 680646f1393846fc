"""isograd-verify bisect: the first wrong one of several recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from isograd_verify.command import main
from isograd_verify.compare.bisect import bisect
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject

from .recordings import Held, Step, numbers, write

VERDICTS = {"r": PASS, "w": BUG, "?": INCONCLUSIVE}


@pytest.mark.parametrize(
    ("series", "said", "verdict", "most"),
    [
        ("rrrrrrrrw", "8 is the first wrong recording of 9; 7 is right", BUG, 6),
        ("rrwwwwwww", "2 is the first wrong recording of 9; 1 is right", BUG, 6),
        ("wwww", "0 is the first wrong recording of 4; none before it is known to be right", BUG, 2),
        ("w", "0 is the first wrong recording of 1; none before it", BUG, 1),
        ("rrr", "the last recording, 2, is not wrong", PASS, 1),
        ("r???w", "4 is the first wrong recording of 5; 0 is right; of 1, 2, 3 in between nothing can be told", BUG, 5),
        ("r?rw", "3 is the first wrong recording of 4; 2 is right (", BUG, 4),
        ("??w", "2 is the first wrong recording of 3; none before it is known to be right; of 0, 1 in", BUG, 3),
    ],
)
def test_the_first_wrong_recording_is_found_by_halves(series: str, said: str, verdict: str, most: int) -> None:
    asked: list[str] = []

    def judge(path: Path) -> Subject:
        asked.append(path.name)
        found = VERDICTS[series[int(path.name)]]
        return Subject(path.name, 2, findings=[] if found == PASS else [Finding(found, "", "something")])

    subject = bisect([Path(str(i)) for i in range(len(series))], judge)
    assert subject.findings[0].sentence.startswith(said)
    assert subject.verdict == verdict
    assert subject.findings[0].verdict == (INCONCLUSIVE if "?" in series.removeprefix("r?r") else NOTE)
    assert len(asked) == len(set(asked)) <= most


def test_recordings_are_bisected_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, gradient = numbers(4, 3), numbers(4, 3, seed=1)
    for name, factor in (("one", 1.0), ("a", 1.0), ("b", 1.0), ("c", 0.5), ("d", 0.5)):
        step = Step({"up.weight": Held(value, factor * gradient)})
        write(tmp_path / name, [[step]] if name == "one" else [[step], [step]])
    paths = [str(tmp_path / name) for name in ("one", "a", "b", "c", "d")]
    assert main(["bisect", *paths]) == 3
    out = capsys.readouterr().out
    assert "c is the first wrong recording of 4; b is right" in " ".join(out.split())
    assert "0.5 times what they should be" in " ".join(out.split())
    assert main(["bisect", *paths[:3]]) == 0
