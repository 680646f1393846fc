"""Programs of other tests on imagined cards: on a stream, and without a fault."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from . import right, run
from .rank import are_real


def on_stream(stream: str, program: Callable[..., Any], *args: Any) -> Any:
    """What a program returns, all of it on the default stream or on one of the user's own."""
    with torch.cuda.stream(torch.cuda.Stream()) if stream == "own" else nullcontext():
        return program(*args)


def values(
    ranks: int, stream: str, program: Callable[..., Any], *args: Any, join: bool = False, **options: Any
) -> list[Any]:
    """Of all ranks, which have no error and no fault. `join`, `options`: as `run` takes them; by default isograd joins
    the world."""
    results = run(on_stream, ranks, stream, program, *args, join=join, seconds=60, limit=180, **options)
    found = right(results)
    if not are_real():
        assert all("nccl:" in " ".join(result.launches) for result in results), "nothing has travelled between cards"
    return found


def some(*fast: tuple[Any, ...], slow: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Cases of every push, and cases of `make full`."""
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]
