"""Temporary folders: what ends well removes its own; what is killed leaves only folders that the next run removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from isograd.io import tempdir

RUN = """version: 1
run: {folder}/run
layout: dp2 zero1
model: {{preset: tiny-llama, options: {{vocab: 257}}}}
data: {{sources: [{{path: {text}}}], length: 12}}
optimizer: {{lr: 1e-2}}
steps: 4
batch: 4
log: {{sample: 0}}
"""
CASE = """
import torch, isograd
def case(mesh):
    batch = {"x": torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), "y": torch.zeros(8, 1)}
    return isograd.prove.Case(torch.nn.Linear(3, 1), batch, loss=lambda model, part: (model(part["x"]).mean(), 8))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short TMPDIR: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def started(words: list[str], temporary: Path, made: str) -> subprocess.Popen[bytes]:
    """A command of isograd that has made a folder called `made`."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.Popen([sys.executable, "-m", "isograd", *words], env=environment, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not list(temporary.glob(f"isograd-*/{made}-*")) and run.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert run.poll() is None
    return run


def ended(run: subprocess.Popen[bytes], how: Callable[[], None]) -> None:
    """After it and everything that it started has ended."""
    below = psutil.Process(run.pid).children(recursive=True)
    how()
    run.wait(60)
    psutil.wait_procs(below, timeout=60)


def next_run(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run(
        [sys.executable, "-c", "from isograd.io import tempdir; tempdir.home()"], env=environment, check=True
    )


COMMANDS = {
    "a dry run, SIGKILL": (["train", "run.yaml", "--dry-run"], "dry", signal.SIGKILL),
    "a dry run, SIGINT": (["train", "run.yaml", "--dry-run"], "dry", signal.SIGINT),
    "a proof, SIGTERM": (["verify", "case.py:case", "--layouts", "dp2"], "verify", signal.SIGTERM),
    "a recording, SIGTERM": (
        ["verify", "run", "--", sys.executable, "-c", "import time; time.sleep(3)"], "record", signal.SIGTERM,
    ),
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_that_is_stopped_leaves_nothing_that_the_next_run_does_not_remove(
    what: str, temporary: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAILURES B11: folders isograd-dry-*, isograd-record-* and isograd-verify-* stayed for ever."""
    words, made, number = COMMANDS[what]
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN.format(folder=tmp_path, text=text))
    Path("case.py").write_text(CASE)
    run = started(words, temporary, made)
    ended(run, lambda: run.send_signal(number))
    assert all(tempdir.NAME.fullmatch(path.name) for path in temporary.iterdir())
    next_run(temporary)
    assert not list(temporary.iterdir())


@pytest.mark.medium
def test_a_dry_run_whose_rank_is_killed_removes_its_folder_itself(
    temporary: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN.format(folder=tmp_path, text=text))
    run = started(["train", "run.yaml", "--dry-run"], temporary, "dry")

    def kill_a_rank() -> None:
        end = time.monotonic() + 60
        ranks = list[psutil.Process]()
        while len(ranks) < 2 and time.monotonic() < end:
            ranks = [rank for server in psutil.Process(run.pid).children() for rank in server.children()]
        ranks[-1].kill()

    ended(run, kill_a_rank)
    assert run.returncode == 1
    assert not list(temporary.iterdir())


def test_a_folder_that_another_process_sweeps_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two commands that start in one moment the first ended with FileNotFoundError, at its first temporary file."""
    lock, swept = fcntl.flock, list[int]()

    def flock(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(descriptor)
            tempdir.sweep()
        lock(descriptor, how)

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(tempdir, "_mine", None)
    monkeypatch.setattr(fcntl, "flock", flock)
    home = Path(tempdir.home())
    assert swept and list(temporary.iterdir()) == [home]
    assert (home / tempdir.ALIVE).exists()
