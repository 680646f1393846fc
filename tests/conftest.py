"""Worlds of ranks, started once per size and shared by all tests: importing torch costs more than most tests."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings

from isograd.comm import threads as threads_of_ranks
from isograd.launcher.launch import World

from . import settled, sizes
from .cpu_times import CpuTimes

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="write each test's CPU seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what they do not await
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")  # a test says nothing of time
    if "PYTEST_XDIST_WORKER" in os.environ:  # its main module has no file, and ranks would be forked as in a notebook
        sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))
    threads_of_ranks.run = on_one_core(threads_of_ranks.run)
    torch.set_num_threads(1)  # as in a rank: more threads on tensors as small as these only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"  # without it, accelerate and Lightning set another number for the whole process
    if file := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(file))


def pytest_runtest_setup() -> None:
    settled.settle()


def pytest_itemcollected(item: pytest.Item) -> None:
    sizes.mark(item)


def not_skipped(report: Report) -> Report:
    """A test that is skipped in the environment of `make test-peers`, where a package is missing or does not load, has
    failed."""
    if report.skipped and not hasattr(report, "wasxfail") and Path(sys.prefix, "peers").exists():
        report.outcome, report.longrepr = "failed", f"skipped, where nothing may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return not_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return not_skipped((yield))


def on_one_core(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Of ranks that are threads one runs at a time, and to hand the interpreter over to another core costs as much as
    what they do."""

    @wraps(run)
    def pinned(*args: Any, **options: Any) -> list[Any]:
        cores = os.sched_getaffinity(0)
        mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)
        os.sched_setaffinity(0, {sorted(cores)[mine]})  # of this thread, and of those that it starts
        try:
            return run(*args, **options)
        finally:
            os.sched_setaffinity(0, cores)

    return pinned


class Turns:
    """Worlds of several workers (pytest-xdist) run one after the other. Ranks that share cores with those of another
    world wait for each other, and waiting costs CPU: two thirds more in all (notes/2026-11-22-to-25.md)."""

    def __init__(self, folder: Path) -> None:
        self.next, self.now = folder / "next", folder / "now"  # two locks: who waits for the second has the next turn

    @contextmanager
    def mine(self) -> Iterator[None]:
        with open(self.next, "w") as following, open(self.now, "w") as running:
            fcntl.flock(following, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX)
            fcntl.flock(following, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(running, fcntl.LOCK_UN)  # by name: a process that was forked meanwhile has it open, too


class PatientWorld(World):
    """A hang is a failure with stacks, not a stuck test run."""

    def __init__(self, ranks: int, turns: Turns) -> None:
        super().__init__(ranks)
        self.turns = turns

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = 120) -> list[Any]:
        with self.turns.mine():
            return super().run(settled.run, fn, *args, timeout=timeout)


class Threads:
    """Ranks as threads of this process: no start, no pickles, the bits of gloo (tests/comm/test_threads.py)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = 120) -> list[Any]:
        return threads_of_ranks.run(fn, self.ranks, *args, timeout=timeout)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    multiprocessing.set_forkserver_preload(["isograd.launcher.worker", "tests.preloaded"])
    forkserver.ensure_running()
    started: dict[int, World] = {}
    own = tmp_path_factory.getbasetemp()  # of a worker: in the folder that both have
    turns = Turns(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)

    def world(ranks: int) -> World:
        if ranks not in started:
            started[ranks] = PatientWorld(ranks, turns)
        return started[ranks]

    yield world
    for one in started.values():
        one.close()


@pytest.fixture
def lent(worlds: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting ranks costs more than proving with them: a proof is lent the worlds of all tests."""
    from isograd.prove import prove, slopes

    class Lent:
        def __init__(self, ranks: int) -> None:
            self.run = worlds(ranks).run

        def close(self) -> None:
            pass

    monkeypatch.setattr(prove, "World", Lent)
    monkeypatch.setattr(slopes, "World", Lent)


@pytest.fixture(scope="session")
def threads(request: pytest.FixtureRequest) -> Callable[[int], Threads | World]:
    """For what is proven of the engine, whatever carries its messages: at half of the CPU time of processes."""
    return request.getfixturevalue("worlds") if sizes.on_gloo() else Threads
