"""The first hour on GPUs, rehearsed: its programs on two imagined cards, in miniature; its numbers, its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_first_hour, gpu_programs
from benchmarks.gpu_first_hour import Hour, attempt, page

from . import rank
from .on_cards import some


def hour(folder: Path) -> Hour:
    made = Hour(folder, 2, on_gpu=False)
    made.limit = 240.0
    return made


def told(folder: Path, name: str) -> dict[str, Any]:
    """What a step comes to, which must not fail."""
    made = hour(folder)
    (step,) = [step for step in made.steps() if step.name == name]
    outcome = attempt(step)
    assert outcome.ended == "passed", outcome.told
    document = {"machine": {"devices": ["<imagined>"]}, "steps": [vars(outcome)]}
    assert name in page(document) and "&lt;imagined&gt;" in page(document)
    return json.loads(json.dumps(outcome.told))  # type: ignore[no-any-return]


STEPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "documents": lambda found: found["losses"][-1] < found["losses"][0] and found["memory_gb"] > 0,
    "long context": lambda found: found["losses"][-1] < found["losses"][0] and found["memory_gb"] > 0,
    "beside FSDP2": lambda found: found["time_of_fsdp2s"] > 0 and found["fsdp2"]["memory_gb"] > 0,
    "plan": lambda found: found["planned_seconds"] > 0 and found["planned_memory_gb"] > 0,
    "late rank": lambda found: len(found["losses"]) == 1,
    "tests": lambda found: "passed" in found["tests"],
}


@pytest.mark.parametrize("name", some("documents", slow=tuple(STEPS)[1:]))
def test_a_step_says_what_it_has_found(tmp_path: Path, name: str) -> None:
    found = told(tmp_path, name)
    assert STEPS[name](found), found
    if name == "beside FSDP2":
        assert {"isograd-rank-0.trace.json", "FSDP2-rank-1.trace.json"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.slow
def test_two_nodes_meet_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both on this machine, with one CPU rank each; the run has no one device to be compared with."""
    command = [sys.executable, "-m", "benchmarks.gpu_first_hour", "--cpu", "1", "--nodes", "2", "--folder"]
    folder = tmp_path / "hour"
    folder.mkdir()
    port = rank.free_port()
    monkeypatch.setattr(gpu_first_hour, "PORT", port)
    second = subprocess.Popen([*command, str(folder), "--node", "1"], env=os.environ | {"MASTER_PORT": str(port)})
    first = Hour(folder, 1, False, (2, 0, "127.0.0.1"))
    first.limit = 240.0
    first.reference = first.train("one", "dp1")["losses"]
    found = first.two_nodes()
    assert len(found["losses"]) == len(first.reference)
    assert second.wait(120) == 0


def test_what_of_nccl_is_not_hidden_is_read_from_a_trace() -> None:
    spans = [("ncclDevKernel_ReduceScatter", 0, 10), ("gemm", 4, 3), ("gemm", 6, 2), ("ncclDevKernel_AllGather", 20, 5)]
    events = [{"cat": "kernel", "name": name, "ts": ts * 1e3, "dur": dur * 1e3} for name, ts, dur in spans]
    found = gpu_programs.overlap([*events, {"cat": "cpu_op", "name": "nccl:all_reduce", "ts": 0, "dur": 9e9}])
    assert found == {"nccl_ms": 15.0, "exposed_ms": 11.0, "busy_ms": 15.0}
