"""docs/integrations/*.md show how a script of examples/integrations differs from the loop that its library documents.
Each script runs by the command of its page, and trains."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "examples" / "integrations").glob("*.py"))
NEEDS = {"trainer.py": "accelerate", "accelerate_loop.py": "accelerate", "deepspeed_loop.py": "torch"}
NEEDS |= {"deepspeed_pipeline.py": "torch"}
NEEDS |= {"fabric_loop.py": "lightning", "lightning_loop.py": "lightning", "verl_loop.py": "verl"}
NEEDS |= {"trl_quickstarts.py": "trl"}
PAGE = "".join(page.read_text() for page in sorted((ROOT / "docs" / "integrations").glob("*.md")))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_difference_that_the_page_shows_is_in_the_script(name: str) -> None:
    """Applied backwards, it leaves a program without isograd."""
    text = (ROOT / "examples" / "integrations" / name).read_text()
    [shown] = re.findall(
        rf"```diff\n((?:(?!```).)*)```\n\n    torchrun [^\n]* examples/integrations/{name}", PAGE, re.DOTALL
    )
    lines = [line for line in shown.splitlines() if line[:1] in "+-"]
    lines_of_script, own = text.splitlines()[ast.parse(text).body[0].end_lineno :], []
    for line in lines:
        if line[:1] == "+" and line != "+":
            assert lines_of_script.count(line[1:]) == 1, line
            own.append(line[1:])
        assert line[:1] == "+" or line[1:] not in lines_of_script
    rest = [line for line in lines_of_script if line not in own]
    assert not [line for line in rest if re.search(r"\big\.|from isograd|import isograd", line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.peers) if name == "verl_loop.py" else name for name in SCRIPTS]
)
def test_a_script_of_a_door_runs_as_the_page_says(name: str) -> None:
    pytest.importorskip(NEEDS[name])
    [command] = re.findall(rf"^    torchrun (.* examples/integrations/{name}.*)$", PAGE, re.MULTILINE)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)]
    told = os.environ | {"VERL_ENGINE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(r"loss[ :']+(\d+\.\d+)|norm (\d+\.\d+)", done.stdout)
    shown = [float(loss or norm) for loss, norm in said if loss or name == "verl_loop.py"]
    assert shown and all(value > 0 for value in shown), done.stdout
    if name == "trl_quickstarts.py":  # losses of GRPO may be 0 and below; four trainers take three steps each
        assert sum(float(norm) > 0 for norm in re.findall(r"'grad_norm': '([\d.]+)'", done.stdout)) == 12, done.stdout
    if name not in ("trainer.py", "trl_quickstarts.py", "verl_loop.py"):  # few small steps, and one shows norms
        assert shown[-1] < 4.5, done.stdout  # a random model's is the logarithm of 101 words, 4.6
