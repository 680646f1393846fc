"""An exception of one rank in the loop of transformers' Trainer or Lightning, which nobody catches.

In a loss, a callback or a data loader, at ZeRO 0, 1 and 3, of the rank that keeps the store or of the other one. The
other rank ends too, at once, with an error that names the rank and its error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .ending import LIMIT

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("loop", ["trainer", "lightning"])
def test_the_other_rank_names_the_one_that_failed_and_its_error(loop: str, tmp_path: Path) -> None:
    if loop == "lightning" and find_spec("lightning") is None:
        pytest.skip("needs lightning")
    words = [sys.executable, "-m", "tests.integrations.ending", loop, str(tmp_path / "found.json")]
    subprocess.run(words, check=True, timeout=900, cwd=Path(__file__).parents[2])
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 18
    for case, outcome in found.items():
        failing = int(case[-1])
        own, other = outcome["said"][failing], outcome["said"][1 - failing]
        assert outcome["codes"] == [1, 1] and outcome["seconds"] < LIMIT, case
        assert f"Halt: a bad {case.split()[0]}" in own, case
        last = other[other.rindex("isograd.errors.") :]
        assert ("IG870" in last or "IG550" in last) and f"rank {failing}: Halt: a bad" in last, f"{case}: {other}"
