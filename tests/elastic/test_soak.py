"""A few of the deaths of tests/soak.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import soak


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--steps", "12", "--layout", "dp2 zero3"], ["--across"]], ids=" ".join)
def test_a_run_of_random_deaths_ends_with_the_state_of_the_undisturbed_run(words: list[str], tmp_path: Path) -> None:
    assert soak.main(["--faults", "6", "--work", str(tmp_path), *words]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["deaths"] == 6
