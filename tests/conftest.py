"""Worlds of ranks, started once per size and shared by all tests: importing torch costs more than most tests."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.comm import threads as threads_of_ranks
from isograd.comm.launch import World

from . import sizes
from .cpu_times import CpuTimes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="write each test's CPU seconds to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what they do not await
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # as in a rank: more threads on tensors as small as these only wait for each other
    if file := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(file))


def pytest_itemcollected(item: pytest.Item) -> None:
    sizes.mark(item)


class PatientWorld(World):
    """A hang is a failure with stacks, not a stuck test run."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = 120) -> list[Any]:
        return super().run(fn, *args, timeout=timeout)


class Threads:
    """Ranks as threads of this process: no start, no pickles, the bits of gloo (tests/comm/test_threads.py)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = 120) -> list[Any]:
        return threads_of_ranks.run(fn, self.ranks, *args, timeout=timeout)


@pytest.fixture(scope="session")
def threads() -> Callable[[int], Threads]:
    return Threads


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    multiprocessing.set_forkserver_preload(["isograd.comm.worker", "tests.preloaded"])
    forkserver.ensure_running()
    started: dict[int, World] = {}

    def world(ranks: int) -> World:
        if ranks not in started:
            started[ranks] = PatientWorld(ranks)
        return started[ranks]

    yield world
    for one in started.values():
        one.close()
