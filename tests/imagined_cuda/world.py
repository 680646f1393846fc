"""Run a function on N processes that have imagined cards, and learn what they did. With a CUDA build of torch the cards
are real: the same programs run, each rank in a process of its own, and nothing is found out but values and errors.

from tests.imagined_cuda import run

for result in run(program, 2):      # program: a function of a module that can be imported
    print(result.value, result.error, result.findings)
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import SkipTest

from . import device
from .rank import Job, are_real, start_ranks

# What is wrong. Only slow are: host wait, pageable copy, unbatched pair, messages in another order.
FAULTS = (
    "race", "reused too early", "host reads too early", "host writes too early", "event never recorded",
    "communicator", "communicators in another order", "never waited for",
)  # fmt: skip
MESSAGES = ("send", "recv", "batch")  # receives may be posted early, as pipelines do: small kernels, no fault by itself


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


def run(function: Callable[..., Any], ranks: int = 1, *args: Any, **options: Any) -> list[Result]:
    """function(*args) on each rank: its result (values of the host) and what was found. `options`: as a Job's."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(pickle.dumps((function, args)), ranks, Path(folder), **options)
        if are_real():
            import torch

            if torch.cuda.device_count() < ranks:
                raise SkipTest(f"{ranks} ranks, and {torch.cuda.device_count()} cards")
            start_ranks(job, "spawn")
        else:
            device.build()
            server = _server()
            server.send(job)
            while server.recv() != job.folder:  # but that of a job that was left alone
                pass
        results = [result_of(job, rank) for rank in range(ranks)]
    for one, other in combinations(results, 2):
        _compare_order(one, other)
    return results


def right(results: list[Result]) -> list[Any]:
    """What all ranks return: none had an error, and nothing wrong was found."""
    assert not any(result.error for result in results), "\n".join(result.error for result in results)
    faults = sorted({str(finding) for result in results for finding in result.faults})
    assert not faults, "\n".join(faults[:10])
    return [result.value for result in results]


@cache
def _server() -> Connection:
    """To a process that loads the imagined cards and torch once, and forks the ranks of each job."""
    here, there = Pipe()
    command = [sys.executable, "-c", f"from {__package__}.rank import serve; serve({there.fileno()})"]
    subprocess.Popen(command, pass_fds=[there.fileno()], cwd=Path(__file__).parents[2])
    there.close()
    return here


def result_of(job: Job, rank: int) -> Result:
    file, stacks = job.folder / f"{rank}.result", job.folder / f"{rank}.stacks"
    if not file.exists():
        stood = stacks.read_text() if stacks.exists() else ""
        return Result(rank, error=f"rank {rank} has not ended, or was killed\n{stood}")
    import torch

    result = torch.load(file, map_location="cpu", weights_only=False)  # of who runs this, who has no cards
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
