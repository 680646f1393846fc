"""What a test costs, on a machine that others use too: CPU seconds of pytest and of every process under it.

    python -m pytest tests/engine --cpu-times /tmp/engine.tsv     # seconds of CPU, seconds, test: one line per test

The ranks of a shared world outlive a test, so their time is read from /proc while they run. The world's start is in
the time of the first test that asks for its size. Of several workers (`-n 2`) each counts its own processes, and the
one that shares out the tests writes the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


def spent() -> float:
    """CPU seconds of this process, of all its descendants that live, and of those that they have waited for."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:  # it ended between the listing and the reading: its parent has its time
            continue
    return total


class CpuTimes:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[tuple[float, float, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, start = spent(), time.monotonic()
        answer = yield
        self.rows.append((spent() - before, time.monotonic() - start, item.nodeid))
        return answer

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
            session.config.workeroutput["cpu times"] = self.rows

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.rows += getattr(node, "workeroutput", {}).get("cpu times", [])  # none: the worker has died

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self.file.write_text("".join(f"{cpu:.2f}\t{wall:.2f}\t{test}\n" for cpu, wall, test in self.rows))
        total = sum(cpu for cpu, _, _ in self.rows)
        terminalreporter.write_line(f"{total:.0f} s of CPU in {len(self.rows)} tests; each test's: {self.file}")
