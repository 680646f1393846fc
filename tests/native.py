"""The paths that NCCL takes, on gloo: transports whose reductions are torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from isograd.comm import world
from isograd.comm.transport import Nccl, of_torch


@contextmanager
def native_transports() -> Iterator[None]:
    """Groups that are made in here have native collectives."""

    def become(kind: Callable[..., Any]) -> None:
        for key, old in world.process.made.items():
            world.process.made[key] = kind(old.process_group, old.ranks, old.index)
        world.of_torch = kind  # type: ignore[assignment]

    become(Nccl)
    try:
        yield
    finally:
        become(of_torch)
