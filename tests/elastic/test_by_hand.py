"""What docs/resilience.md tells a user to type: the same commands, and `kill -9` from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from isograd.train import journal
from tests import faults
from tests.train.test_loop import losses

ROOT = Path(__file__).parents[2]
ISOGRAD = [sys.executable, "-m", "isograd"]
LIMIT = 600.0  # seconds

pytestmark = pytest.mark.timeout(1800)  # whole programs, one after the other, also on a busy machine


def pids(of: int) -> dict[int, int]:
    """By rank: processes that a command has started, which are called after their ranks."""
    below = [process for process in psutil.Process(of).children(recursive=True) if process.is_running()]
    names = {process.name(): process.pid for process in below}
    return {rank: names[f"isograd r{rank}"] for rank in range(8) if f"isograd r{rank}" in names}


def until(step: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """Until a run has logged a step."""
    end = time.monotonic() + LIMIT
    while not any(number >= step for number, _ in journal.curve(folder / "metrics.jsonl").training):
        assert process.poll() is None and time.monotonic() < end, "the run has ended before"
        time.sleep(0.05)


@pytest.mark.slow
def test_the_quickstart_survives_kill_9_of_two_of_four_ranks_and_compare_draws_both_runs_on_each_other(
    tmp_path: Path,
) -> None:
    quick = [*ISOGRAD, "train", str(ROOT / "recipes" / "quickstart.yaml"), "--steps", "8", "--log.every", "1"]
    options = ["--resilience.after_death", "replace", "--resilience.copies", "partner"]
    subprocess.run([*quick, "--run", "undisturbed"], cwd=tmp_path, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
    with subprocess.Popen(
        [*quick, "--run", "killed", *options], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        until(3, tmp_path / "killed", process)
        ranks = pids(process.pid)
        assert set(ranks) == {0, 1, 2, 3}
        for rank in (1, 2):
            os.kill(ranks[rank], signal.SIGKILL)
        said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    said = " ".join(said.split())
    assert "rank 1 (dp0 tp1) was killed by signal 9 (SIGKILL)" in said
    assert "rank 2 (dp1 tp0) was killed by signal 9 (SIGKILL)" in said
    assert "was held by those that are left" in said and "recovered in " in said
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
    compared = subprocess.run(
        [*ISOGRAD, "compare", "undisturbed", "killed", "--out", "both"], cwd=tmp_path, check=True, text=True,
        stdout=subprocess.PIPE, timeout=LIMIT,
    ).stdout  # fmt: skip
    assert "both: compare.json, compare.png" in compared
    rows = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert [(row["layout"], row["difference"]) for row in rows] == [("undisturbed", 0.0), ("killed", 0.0)]
    assert (tmp_path / "both" / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("meeting", ["c10d", "static"])
def test_torchrun_of_two_machines_starts_all_ranks_anew_and_they_resume_with_the_same_bits(
    meeting: str, tmp_path: Path
) -> None:
    """The slow path: a rank dies, torchrun ends and starts all of them, which load the last checkpoint."""
    text = faults.tokens(tmp_path / "text")
    expected = faults.undisturbed(tmp_path / "whole", text, "dp2 zero1", steps=60)
    changes = {"steps": 60, "checkpoint": {"every": 5}, "resilience": {"after_death": "replace"}}
    config = faults.config(tmp_path / "run", text, "dp2 zero1", **changes)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
    ]
    where = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
    }[meeting]
    program = ["--no-python", "--", *ISOGRAD, "train", str(tmp_path / "run.yaml")]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    nodes = []
    for node in range(2):
        number = ["--node-rank", str(node)] if meeting == "static" else []
        out = (tmp_path / f"node-{node}.txt").open("w")
        nodes.append(
            subprocess.Popen([*torchrun, *where, *number, *program], env=env, stdout=out, stderr=out, text=True)
        )
    try:
        until(12, tmp_path / "run", nodes[0])
        psutil.Process(nodes[1].pid).children()[0].kill()
        assert [node.wait(LIMIT) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert losses(tmp_path / "run") == expected
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    resumed = [line["step"] for line in lines if line.get("event") == "resumed"]
    assert resumed and resumed[0] % 5 == 0
    assert [line["step"] for line in lines if line.get("event") == "restart"] == resumed


def started_by_torchrun(folder: Path, layout: str, **changes: object) -> subprocess.Popen[str]:
    """A run of two ranks of this machine, in FOLDER/run; what it says goes to FOLDER/said.txt."""
    config = faults.config(
        folder / "run", faults.tokens(folder / "text"), layout, steps=40, checkpoint={"every": 5},
        resilience={"after_death": "replace"}, **changes,
    )  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (folder / "said.txt").open("w") as out:
        return subprocess.Popen(
            [*torchrun, "--max-restarts", "2", "--no-python", "--", *ISOGRAD, "train", str(folder / "run.yaml")],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out, text=True,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1"])
def test_torchrun_starts_all_ranks_again_after_kill_9_with_the_same_bits_and_the_journal_counts_it(
    layout: str, tmp_path: Path
) -> None:
    """At ZeRO 0 the rank that is left writes its own state first, unless it was past its optimizer and had not ended
    its step; then, and at ZeRO 1, it is the newest checkpoint."""
    process = started_by_torchrun(tmp_path, layout)
    try:
        until(12, tmp_path / "run", process)
        ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}
        ranks[1].kill()
        assert process.wait(LIMIT) == 0, (tmp_path / "said.txt").read_text()
    finally:
        process.kill()
    expected = faults.undisturbed(tmp_path / "whole", tmp_path / "text" / "tokens", layout, steps=40)
    assert losses(tmp_path / "run") == expected
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    (resumed,) = [line["step"] for line in lines if line.get("event") == "resumed"]
    (restart,) = [line for line in lines if line.get("event") == "restart"]
    (recovered,) = [line for line in lines if line.get("event") == "recovered"]
    assert restart["step"] == recovered["step"] == resumed
    held = f"the state after step {resumed} was held by those that are left" in (tmp_path / "said.txt").read_text()
    assert restart["lost_steps"] <= (1 if held else 5)
    assert (held and layout == "dp2") or resumed % 5 == 0
    steps = {line["step"]: line for line in lines if "event" not in line}
    assert all((line["goodput"] == 1.0) == (step <= resumed) for step, line in steps.items())
    done_s, parts = sum(line["seconds_per_step"] for line in steps.values()), recovered["parts"]
    assert restart["lost_s"] >= sum(parts.values()) - parts["step"]
    assert steps[40]["goodput"] == pytest.approx(done_s / (done_s + restart["lost_s"]))


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_is_not_continued_by_torchrun(tmp_path: Path) -> None:
    process = started_by_torchrun(tmp_path, "dp2 zero1")
    try:
        until(6, tmp_path / "run", process)
        (tmp_path / "run" / "STOP").touch()
        assert process.wait(LIMIT) == 1  # torchrun's own
    finally:
        process.kill()
    assert (tmp_path / "run" / "exit-code").read_text() == "75\n"
    assert len(losses(tmp_path / "run")) < 40
