"""The survey's page, its results and its programs agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verify.survey.page import OPEN, opinion, text
from verify.survey.run import PROGRAMS, programs, state

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_results_say() -> None:
    assert (ROOT / "docs" / "survey.md").read_text() == text(programs(), state())


def test_every_result_is_of_a_program_that_is_there() -> None:
    known = programs()
    assert state().keys() <= known.keys()
    assert all((PROGRAMS / about["script"]).is_file() for about in known.values())


def test_every_verdict_is_the_one_expected_and_none_is_known_to_be_wrong_in_silence() -> None:
    for name, said in state().items():
        if "alone" not in said or "failed" in said:
            continue
        about = programs()[name]
        assert [said[way]["verdict"] for way in ("alone", "beside") if way in said] == about["expected"], name
        assert opinion(said) in OPEN or "note" in about, f"{name}: {opinion(said)}, and no note says why"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "ddp-uneven", "pipelining-two-steps"])
def test_a_program_gets_its_verdict_again(name: str, tmp_path: Path) -> None:
    about = programs()[name]
    home = tmp_path / "home"
    results = tmp_path / "results.json"
    subprocess.run(
        [sys.executable, "-m", "verify.survey.run", "--home", str(home), "--results", str(results), name],
        check=True, cwd=ROOT.parent, timeout=280, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    said = state(results)[name]
    assert [said[way]["verdict"] for way in ("alone", "beside") if way in said] == about["expected"]
    assert said["truth"]["right"] is (about["expected"][0] == "PASS")
