"""The tutorial's page and its notebook: the same commands, all of which run, at toy size, in one folder."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from .test_docs import SOURCES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "notebook.py"))
PAGE, NOTEBOOK = SCRIPT["PAGE"].read_text(), SCRIPT["NOTEBOOK"].read_text()
TOY = {"isograd train": " --steps 2 --layout dp1 --optimizer.warmup 0 --batch 8 --evaluate.batches 1 --log.sample 4"}
LEFT = ("--dry-run", "--emit")  # commands that train nothing: as they stand


def toy(line: str) -> str:
    """The line as a test runs it."""
    trains = line.startswith("isograd train") and not any(word in line for word in LEFT)
    return re.sub(r" --steps \d+", "", line) + TOY["isograd train"] if trains else line


def test_the_notebook_is_the_page() -> None:
    made = json.loads(NOTEBOOK)
    assert SCRIPT["notebook"](PAGE) == NOTEBOOK
    shown = "".join("".join(cell["source"]) for cell in made["cells"])
    assert all(line in shown for line in PAGE.splitlines() if line.startswith(("isograd ", "#")))


@pytest.mark.peers
def test_the_notebook_is_one_to_jupyter() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.reads(NOTEBOOK, as_version=4))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_cell_of_the_tutorial_runs_one_after_another(tmp_path: Path) -> None:
    """As a notebook's shell runs them: a cell is one script, and a line that fails ends it."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": tools, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    printed = []
    for cell in json.loads(NOTEBOOK)["cells"]:
        if cell["cell_type"] != "code":
            continue
        head, *lines = "".join(cell["source"]).splitlines()
        assert head == "%%bash"
        script = "\n".join(["set -e", *map(toy, lines)])
        done = subprocess.run(
            ["bash", "-c", script], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    assert "dry run passed" in printed[0] and "bits_per_byte" in printed[2]
    assert json.loads(printed[3].splitlines()[-1])["text"] is not None
    assert (tmp_path / "runs" / "chat" / "loss.png").is_file() and (
        tmp_path / "models" / "mine" / "config.json"
    ).is_file()
    assert "#SBATCH" in (tmp_path / "job.sh").read_text()
