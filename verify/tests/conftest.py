"""What the verifier's tests share: ranks that are started once, the corpus' recordings, and which tests are medium."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from isograd_verify.run.corpus import Bench
from isograd_verify.run.ranks import LocalRanks

MEDIUM, SLOW = (  # by file and the beginning of the name
    tuple(Path(__file__).with_name(f"{size}.txt").read_text().splitlines()) for size in ("medium", "slow")
)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # as in a rank: more threads on tensors as small as these only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"  # without it, accelerate and Lightning set another number for the whole process


def pytest_itemcollected(item: pytest.Item) -> None:
    name = f"{item.path.stem}::{item.nodeid.partition('::')[2]}"
    for size, listed in (("medium", MEDIUM), ("slow", SLOW)):
        if name.startswith(listed):
            item.add_marker(size)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], LocalRanks]]:
    """LocalRanks by their number."""
    started: dict[int, LocalRanks] = {}

    def ranks(number: int) -> LocalRanks:
        if number not in started:
            started[number] = LocalRanks(number)
        return started[number]

    yield ranks
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def bench(worlds: Callable[[int], LocalRanks]) -> Iterator[Bench]:
    """References and clean twins run once per seed. Its world of one is its own: a program gives it a process group."""
    with Bench() as one:
        one.worlds |= {2: worlds(2), 4: worlds(4)}
        yield one
