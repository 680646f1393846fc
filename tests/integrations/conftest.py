"""Ranks that prove a class of transformers under a layout once: half of the time of these tests went to proofs of the
same small copies. What a proof finds is tested in tests/hf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isograd.launcher.launch import World

from .worlds import proving_once


class Proven:
    """A world of ranks."""

    def __init__(self, world: World) -> None:
        self.world, self.close = world, world.close

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self.world.run(proving_once, fn, *args, **options)


@pytest.fixture(scope="session")
def worlds(worlds: Callable[[int], World]) -> Callable[[int], Proven]:
    return lambda ranks: Proven(worlds(ranks))
