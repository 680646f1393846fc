"""Requests to stop that come while a run starts: none is lost, none shows a traceback, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from isograd.cli.main import main
from isograd.errors import LaunchError
from isograd.train.loop import RunOptions
from tests.sizes import few
from tests.train.test_command import SMALL


@pytest.fixture
def config(tmp_path: Path, text: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL.format(folder=tmp_path, text=text))
    return file


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.medium
@pytest.mark.parametrize(
    "number", few([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], slow=[signal.SIGINT, signal.SIGHUP])
)
def test_a_signal_to_the_group_while_ranks_start_ends_the_run_before_its_first_step(
    config: Path, number: signal.Signals
) -> None:
    """It was lost (SIGTERM), or killed ranks that could not hear it yet (Ctrl-C), or the fork server."""
    command = [sys.executable, "-m", "isograd.cli.main", "train", str(config)]
    before = signal.signal(number, signal.SIG_DFL)  # nohup and & leave signals ignored, in children too
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(number, before)
    assert run.stdout is not None and run.stderr is not None
    while not run.stdout.readline().startswith("  folder"):
        assert run.poll() is None, run.stderr.read()
    family = psutil.Process(run.pid)
    while not (below := family.children(recursive=True)):
        time.sleep(0.01)
    os.killpg(run.pid, number)
    seen = set(below)
    ends = time.monotonic() + 60
    while run.poll() is None:
        assert time.monotonic() < ends, "the signal was lost"
        try:
            seen |= set(family.children(recursive=True))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.05)
    shown, said = run.communicate(timeout=60)
    assert run.returncode == 75, said
    last = said.splitlines()[-1:]
    assert last == ["stopped before the first step; nothing to save"]
    assert len(said.splitlines()) == (2 if number == signal.SIGINT else 1)
    assert "step " not in shown
    assert not [process for process in seen if lives(process) and "forkserver" in " ".join(process.cmdline())]
    assert (config.parent / "run" / "exit-code").read_text() == "75\n"


def test_a_request_before_any_rank_is_started_starts_none(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from isograd.train.run import start

    monkeypatch.setattr(start, "World", None)
    monkeypatch.setattr(start, "refuse_data", lambda _: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", str(config)]) == 75
    assert signal.getsignal(signal.SIGINT) == before
    assert "stopped before the first step; nothing to save" in capsys.readouterr().err


def test_a_request_while_ranks_are_made_is_a_file_that_they_find(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isograd.train.run import start

    class Made:
        def __init__(self, *_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def run(self, _: object, __: object, orders: RunOptions) -> list[start.RunOutcome]:
            assert orders.signals == ()
            assert orders.stop_file is not None and orders.stop_file.exists()
            return [start.RunOutcome(75, 0, "asked to stop")]

    monkeypatch.setattr(start, "World", Made)
    assert main(["train", str(config)]) == 75


def test_ctrl_c_during_imports_is_no_traceback(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("isograd.cli.train.load_config", interrupted)
    assert main(["train", str(config)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("code", "ends"), [("IG256", 1), ("IG252", 7)])
def test_after_a_silent_rank_has_died_the_end_of_the_run_is_told_with_its_own_code(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, ends: int
) -> None:
    """The reports of the silent rank lie there still: the run ended with 7, without a word of why it did not go on."""
    from isograd.train.run import start

    def ended(*_: object) -> None:
        report = config.parent / "run" / "stalled" / "rank-00000.json"
        report.parent.mkdir(parents=True)
        report.write_text("{}")
        raise LaunchError(code, "no layout for the ranks that are left")

    monkeypatch.setattr(start, "_done_here", ended)
    assert main(["train", str(config)]) == ends
    assert ("no layout for the ranks that are left" in capsys.readouterr().err) == (code == "IG256")


@pytest.mark.parametrize("options", [["shrink", "none"], ["replace", "partner"]])
def test_what_needs_the_memory_of_ranks_that_a_launcher_has_ended_is_refused_under_torchrun(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": "0", "WORLD_SIZE": "2"})
    after, copies = options
    words = ["--resilience.after_death", after, "--resilience.copies", copies]
    assert main(["train", str(config), *words]) == 1
    assert capsys.readouterr().err.startswith("IG257")


def test_what_torchrun_starts_again_after_a_stop_ends_with_the_same_code(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    monkeypatch.setattr(os, "environ", {**os.environ, **started})
    (config.parent / "run").mkdir()
    (config.parent / "run" / "exit-code").write_text("75\n")
    assert main(["train", str(config)]) == 75
