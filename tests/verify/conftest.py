"""What the verifier's tests share: the corpus' recordings, made once, in the worlds of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from isograd.comm.launch import World
from isograd.verify.run.corpus import Bench


@pytest.fixture(scope="session")
def bench(worlds: Callable[[int], World]) -> Iterator[Bench]:
    """References and clean twins run once per seed. Its world of one is its own: a program gives it a process group."""
    with Bench() as one:
        one.worlds |= {2: worlds(2), 4: worlds(4)}
        yield one
