"""Programs of other tests on imagined cards, on a stream and without a fault; a small model's engine on a card."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.models import Transformer
from isograd.nn import ExpertOptions
from tests.parity import cases

from . import right, run
from .rank import are_real


def on_stream(stream: str, program: Callable[..., Any], *args: Any) -> Any:
    """What a program returns, all of it on the default stream or on one of the user's own."""
    with torch.cuda.stream(torch.cuda.Stream()) if stream == "own" else nullcontext():
        return program(*args)


def values(ranks: int, stream: str, program: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Of all ranks, which have no error and no fault. `options`: a Job's; by default isograd joins the world."""
    results = run(on_stream, ranks, stream, program, *args, **{"join": False, "limit": 180} | options)
    found = right(results)
    if not are_real():
        assert all("nccl:" in " ".join(result.launches) for result in results), "nothing has travelled between cards"
    return found


def some(*fast: Any, slow: tuple[Any, ...]) -> list[Any]:
    """Cases of every push, and cases of `make full`."""
    each = (case if isinstance(case, tuple) else (case,) for case in slow)
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in each)]


def engine_of(
    layout: str, optimizer: Any = cases.sgd, dtype: torch.dtype = torch.float32, experts: bool = False, **options: Any
) -> Engine:
    """On this rank's card."""
    mesh, config = Mesh(layout), cases.CONFIGS["deep" if "pp" in layout else "llama"]
    config = replace(config, experts=ExpertOptions(number=4, per_token=2, width=8)) if experts else config
    model = Transformer(config, mesh, dtype=dtype).to(mesh.device)
    return Engine(model, mesh, optimizer, bucket_mb=0.01, **options)


def micro_batch(engine: Engine, step: int, place: int = 0, of: int = 1) -> dict[str, torch.Tensor]:
    """One of this data rank's, on its card. Of four in a step, of which the last one has no labels."""
    tokens, labels, _ = cases.micro_batch(cases.CONFIGS["llama"], step, engine.mesh.index("dp") * of + place, 4)
    return {"tokens": tokens.to(engine.mesh.device), "labels": labels.to(engine.mesh.device)}
