"""docs/doors.md shows what a script of examples/unmodified needs to pass through a door: all of it. Each script runs by
the command of that page, and trains."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shlex
import subprocess
import sys
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
NEEDS = {"trainer.py": "accelerate", "accelerate_loop.py": "accelerate", "deepspeed_loop.py": "torch"}
NEEDS |= {"fabric_loop.py": "lightning", "lightning_loop.py": "lightning", "verl_loop.py": "verl"}
PAGE = (ROOT / "docs" / "doors.md").read_text()


def code(path: Path) -> list[str]:
    """Without the docstring that the file opens with."""
    text = path.read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_shows_the_whole_difference(name: str) -> None:
    before, after = code(ROOT / "examples" / "unmodified" / PAIRS[name]), code(ROOT / "examples" / "doors" / name)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    changed = [line for line in lines if not line.startswith("@@") and line != "+"]
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    found = [[line for line in block.splitlines() if line[:1] in "+-" and line != "+"] for block in shown]
    assert changed in found


def test_every_script_of_a_door_is_compared() -> None:
    assert {path.name for path in (ROOT / "examples" / "doors").glob("*.py")} == set(PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_script_of_a_door_runs_as_the_page_says(name: str) -> None:
    pytest.importorskip(NEEDS[name])
    [command] = re.findall(rf"^    torchrun (.* examples/doors/{name}.*)$", PAGE, re.MULTILINE)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)]
    told = os.environ | {"VERL_ENGINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"loss[ :']+(\d+\.\d+)|norm (\d+\.\d+)", done.stdout)
    shown = [float(loss or norm) for loss, norm in said if loss or name == "verl_loop.py"]
    assert shown and all(value > 0 for value in shown), done.stdout
    if name not in ("trainer.py", "verl_loop.py"):  # one takes five small steps, the other shows norms
        assert shown[-1] < 4.5, done.stdout  # a random model's is the logarithm of 101 words, 4.6
