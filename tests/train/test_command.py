"""isograd train as a person starts it: real processes, real signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.engine.plan import cut_rows
from isograd.models import Transformer
from isograd.train import journal
from isograd.train.language import model_config
from isograd.train.reading import load
from tests.sizes import few

SMALL = """version: 1
run: {folder}/run
layout: dp2 zero1
model: {{preset: tiny-llama, options: {{vocab: 257}}}}
data: {{sources: [{{path: {text}}}], length: 12}}
optimizer: {{lr: 1e-2}}
steps: 2000
batch: 4
log: {{sample: 0}}
evaluate: {{batches: 1}}
"""


@pytest.fixture
def config(tmp_path: Path, text: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL.format(folder=tmp_path, text=text))
    return file


@contextmanager
def started(config: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run that is under way: its first steps are in the journal."""
    command = [sys.executable, "-m", "isograd.cli.main", "train", str(config), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    numbers = config.parent / "run" / "metrics.jsonl"
    before = steps(numbers)
    end = time.monotonic() + 120
    while steps(numbers) < before + 3 and run.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    try:
        assert run.poll() is None, run.communicate()
        yield run
    finally:
        for rank in ranks_of(run):
            rank.kill()
        run.kill()
        run.wait()


def steps(numbers: Path) -> int:
    return sum("event" not in line for line in journal.read(numbers))


def gone_on(config: Path, until: int) -> list[dict[str, object]]:
    """What the same command shows when it is given again."""
    words = [str(config), "--steps", str(until), "--log-format", "json"]
    command = [sys.executable, "-m", "isograd.cli.main", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks are made by a fork server, a child of the command."""
    try:
        below = psutil.Process(run.pid).children()
    except psutil.NoSuchProcess:
        return []
    return [rank for server in below for rank in server.children()]


@pytest.mark.parametrize("to", few(["the command", "its group"], slow=["the command"]))
def test_a_signal_ends_a_run_with_75_and_the_same_command_goes_on(config: Path, to: str) -> None:
    with started(config) as run:
        if to == "its group":
            os.killpg(run.pid, signal.SIGTERM)  # as schedulers and `timeout` do
        else:
            run.send_signal(signal.SIGTERM)
        shown, said = run.communicate(timeout=60)
        assert run.returncode == 75
        # A rank that the signal reaches itself may hear it before the command has passed it on.
        assert "asked to stop" in said or (to == "its group" and "SIGTERM" in said)
        assert "step     1/2000" in shown
    if to == "its group":
        return
    at = steps(config.parent / "run" / "metrics.jsonl")
    lines = gone_on(config, at + 2)
    assert [line["step"] for line in lines if "event" not in line] == [at + 1, at + 2]
    assert lines[0]["event"] == "resumed"


def test_a_frozen_rank_is_named_and_the_run_ends_with_7(config: Path) -> None:
    with started(config, "--safety.stall_s", "5.0") as run:
        ranks = sorted(ranks_of(run), key=lambda rank: rank.pid)
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGSTOP)
        _, said = run.communicate(timeout=90)
        assert run.returncode == 7
        assert "IG980: no progress for 5 s while in step " in said
        assert f"the others wait for rank 1 on {socket.gethostname()}\n" in said
        assert f"rank 1 on {socket.gethostname()} gave no sign" in said


def test_a_killed_rank_is_told_first_and_the_run_goes_on_from_its_last_checkpoint(config: Path) -> None:
    with started(config, "--checkpoint.every", "1") as run:
        os.kill(ranks_of(run)[0].pid, signal.SIGKILL)
        _, said = run.communicate(timeout=60)
        assert run.returncode == 1
        assert said.splitlines()[0].startswith("IG252: rank")
        assert "SIGKILL" in said
    numbers = list(journal.read(config.parent / "run" / "metrics.jsonl"))
    last = max(line["step"] for line in numbers)
    first = gone_on(config, last + 2)[0]
    assert first["event"] == "resumed"
    assert last - 3 <= first["step"] <= last


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert all(code in said for code in ("75", "7 ", "6 ", "2 "))


def test_a_wrong_number_of_ranks_and_one_layout_to_compare_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--nproc", "3"]) == 2
    assert "IG637" in capsys.readouterr().err
    assert main(["compare", str(config), "--layouts", "dp2"]) == 2
    assert "IG636" in capsys.readouterr().err


def test_layouts_are_compared_in_numbers_picture_and_page(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = config.parent / "out"
    words = [
        "compare",
        str(config),
        "--layouts",
        "dp2; tp2 sp",
        "--steps",
        "3",
        "--out",
        str(out),
        "--model.dtype",
        "fp64",
    ]
    assert main(words) == 0
    first, second = json.loads((out / "compare.json").read_text())
    assert (first["layout"], second["layout"]) == ("dp2", "tp2 sp")
    assert first["difference"] == 0
    assert second["difference"] < 1e-9
    assert abs(first["held_out"] - second["held_out"]) < 1e-9
    config = load(str(out / "dp2" / "config.yaml")).config
    shapes = [p.shape for p in Transformer(model_config(config), Mesh.unbound("dp1"), device="meta").parameters()]
    chunks = sum(cut_rows(shape, 2)[1] * shape[1:].numel() for shape in shapes)  # what each rank sends the other, twice
    assert first["sent_mb"] == pytest.approx(2 * chunks * 8 / 1e6, rel=0.02)  # of a step: no start, evaluation or save
    assert second["sent_mb"] > 0.01
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "largest" in said
    assert max(len(line) for line in said.partition("last")[2].splitlines()) <= 80
    assert main(words) == 2  # nothing is overwritten
    assert "IG987" in capsys.readouterr().err
    runs = [str(out / "dp2"), str(out / "tp2_sp")]
    assert main(["compare", *runs, "--out", str(out / "again")]) == 0  # what is left of the same two runs
    again = json.loads((out / "again" / "compare.json").read_text())
    for one, other in zip(again, (first, second), strict=True):
        assert (one["ranks"], one["loss"], one["held_out"]) == (2, other["loss"], other["held_out"])
        assert one["difference"] < 1e-9
    assert (out / "again" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", runs[0]]) == 2
    assert main(["compare", runs[0], str(out)]) == 2
    assert capsys.readouterr().err.count("IG636") == 2
    assert main(["compare", str(config)]) == 2


def test_a_dry_run_takes_one_step_and_keeps_nothing(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(config), "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "step: taken, loss" in shown
    assert "nothing was kept" in shown
    assert not (config.parent / "run").exists()
