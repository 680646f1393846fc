"""docs/doors.md shows what a script of examples/unmodified needs to pass through a door: all of it."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    "trainer.py": "hf_trainer.py",
    "accelerate_loop.py": "accelerate_loop.py",
    "deepspeed_loop.py": "deepspeed_loop.py",
    "fabric_loop.py": "fabric_loop.py",
    "lightning_loop.py": "lightning_loop.py",
    "verl_loop.py": "verl_loop.py",
}


def code(path: Path) -> list[str]:
    """Without the docstring that the file opens with."""
    text = path.read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_shows_the_whole_difference(name: str) -> None:
    before, after = code(ROOT / "examples" / "unmodified" / PAIRS[name]), code(ROOT / "examples" / "doors" / name)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    changed = [line for line in lines if not line.startswith("@@") and line != "+"]
    shown = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "doors.md").read_text(), re.DOTALL)
    found = [[line for line in block.splitlines() if line[:1] in "+-" and line != "+"] for block in shown]
    assert changed in found


def test_every_script_of_a_door_is_compared() -> None:
    assert {path.name for path in (ROOT / "examples" / "doors").glob("*.py")} == set(PAIRS)
