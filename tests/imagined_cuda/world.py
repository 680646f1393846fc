"""Run a function on N processes that have imagined cards, and learn what they did. With a CUDA build of torch the cards
are real: the same programs run, each rank in a process of its own, and nothing is found out but values and errors.

from tests.imagined_cuda import run

for result in run(program, 2):      # program: a function of a module that can be imported
    print(result.value, result.error, result.findings)
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import SkipTest

from . import device

ROOT = Path(__file__).parents[2]
# What is wrong, and what is only slow.
FAULTS = (
    "race", "reused too early", "host reads too early", "host writes too early", "event never recorded",
    "communicator", "communicators in another order", "never waited for",
)  # fmt: skip
MESSAGES = ("send", "recv", "batch")  # receives may be posted early, as pipelines do: small kernels, no fault by itself
COSTS = ("host wait", "pageable copy", "unbatched pair", "messages in another order")


@dataclass(frozen=True)
class Finding:
    """`first`, `second`: where the two accesses were launched; the same place where there is one only."""

    kind: str
    text: str
    first: str
    second: str
    count: int = 1

    def __str__(self) -> str:
        places = self.first if self.first == self.second else f"{self.first}\n    {self.second}"
        return f"{self.kind} ({self.count}x): {self.text}\n    {places}"


@dataclass(frozen=True)
class Result:
    """Of one rank. `calls`: of collectives and messages, in order: (communicator, ranks, operation, place)."""

    rank: int
    value: Any = None
    error: str = ""
    findings: list[Finding] = field(default_factory=list)
    calls: list[tuple[str, tuple[int, ...], str, str]] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Finding]:
        """The findings of these kinds."""
        return [finding for finding in self.findings if finding.kind in kinds]

    @property
    def faults(self) -> list[Finding]:
        """What is wrong, not only slow."""
        return self.of(*FAULTS)


@dataclass(frozen=True)
class Job:
    function: tuple[str, str]
    args: tuple[Any, ...]
    ranks: int
    folder: Path
    lag: int | Sequence[int]
    device_id: bool
    join: bool
    one_card: bool
    port: int
    seconds: float
    limit: float


_server: subprocess.Popen[bytes] | None = None


def _started() -> subprocess.Popen[bytes]:
    global _server
    if _server is None or _server.poll() is not None:
        device.build()
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", f"{__package__}.rank"]
        _server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
        atexit.register(_server.kill)
    return _server


def run(
    function: Callable[..., Any], ranks: int = 1, *args: Any, lag: int | Sequence[int] = 100, device_id: bool = False,
    join: bool = True, one_card: bool = False, seconds: float = 60, limit: float = 120,
) -> list[Result]:  # fmt: skip
    """function(*args) on each rank: its result (values of the host) and what was found.

    `lag`: by how many launches the device is behind the host, on each rank or on all. `device_id`: whether
    init_process_group is given one. `join`: whether it is called at all; else variables like torchrun's are there, and
    the program joins by itself. `one_card`: whether each rank sees its own card only. `seconds`: NCCL's timeout.
    `limit`: after which the ranks are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = function.__module__, function.__qualname__
        job = Job(home, args, ranks, Path(folder), lag, device_id, join, one_card, _free_port(), seconds, limit)
        (in_own_processes if are_real() else _forked)(job)
        results = [_result(Path(folder), rank) for rank in range(ranks)]
    for one, other in combinations(results, 2):
        _compare_order(one, other)
    return results


def right(results: list[Result]) -> list[Any]:
    """What all ranks return: none had an error, and nothing wrong was found."""
    assert not any(result.error for result in results), "\n".join(result.error for result in results)
    faults = sorted({str(finding) for result in results for finding in result.faults})
    assert not faults, "\n".join(faults[:10])
    return [result.value for result in results]


def are_real() -> bool:
    """Whether this torch is one for CUDA. It is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return "cuda: Optional[str] = None" not in Path(found.origin).with_name("version.py").read_text()


def _forked(job: Job) -> None:
    server = _started()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(pickle.dumps(job).hex().encode() + b"\n")
    server.stdin.flush()
    if not server.stdout.readline():
        raise RuntimeError("the process that forks ranks has ended")


def in_own_processes(job: Job) -> None:
    """Start a job's ranks, which load what cards there are, and end those that are still there after its limit."""
    if are_real():
        import torch

        if torch.cuda.device_count() < job.ranks:
            raise SkipTest(f"{job.ranks} ranks, and {torch.cuda.device_count()} cards")
    (job.folder / "job").write_bytes(pickle.dumps(job))
    command = [sys.executable, "-m", f"{__package__}.rank", str(job.folder / "job")]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(job.ranks)]
    end = time.monotonic() + job.limit
    for rank in ranks:
        try:
            rank.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _free_port() -> int:
    """Below those that systems give to connections, which another process may get before ours is bound."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def _result(folder: Path, rank: int) -> Result:
    file = folder / f"{rank}.result"
    if not file.exists():
        stacks = (folder / f"{rank}.stacks").read_text() if (folder / f"{rank}.stacks").exists() else ""
        return Result(rank, error=f"rank {rank} has not ended, or was killed\n{stacks}")
    result = pickle.loads(file.read_bytes())
    findings = [Finding(*one) for one in result.pop("found")]
    return Result(findings=findings, **result)


def _compare_order(one: Result, other: Result) -> None:
    """Two ranks use the communicators that they share in one order: else kernels that wait could fill both cards."""
    mine, theirs = ([call for call in r.calls if {one.rank, other.rank} <= set(call[1])] for r in (one, other))
    for kind, is_message in (("communicators in another order", False), ("messages in another order", True)):
        of_kind = [[call for call in calls if call[2].startswith(MESSAGES) is is_message] for calls in (mine, theirs)]
        for a, b in zip(*of_kind, strict=False):
            if a[0] != b[0]:
                text = f"rank {one.rank}: {a[2]} on {a[0]!r}; rank {other.rank}: {b[2]} on {b[0]!r}"
                for result in (one, other):
                    result.findings.append(Finding(kind, text, a[3], b[3]))
                break
