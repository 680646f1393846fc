"""How often the host waits for the card in a step of isograd that goes well, by layout and by place.

One wait a step: what the step says (its loss, its weight, its norm) is read at once, behind the reductions and before
the optimizer. None where it is read in the next step. Experts over ranks wait once a layer, for the sizes of their
exchange; a step of terms once, at its beginning, for their weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.parity import cases

from . import device, right, run

STEPS = 3  # the last one is looked at: the first makes connections and learns shapes
MICRO_BATCHES = 2
LAYERS = 2


def fused(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(shards, lr=0.01, fused=True)


def seen() -> dict[str, int]:
    """What the host has waited for so far, by place."""
    costs = [one for one in device.lib.findings() if one[0] in ("host wait", "pageable copy")]
    return {f"{kind}: {text} at {first}": count for kind, text, first, _, count in costs}


def waits(
    layout: str, experts: bool = False, dtype: torch.dtype = torch.float32, late: bool = False
) -> list[dict[str, int]]:
    """Of the last step: how often the host waits and where, in forward and backward, and in `engine.step`. late: its
    numbers are read in the next one."""
    from isograd import Engine, Mesh
    from isograd.models import Transformer
    from isograd.nn import ExpertOptions

    mesh, config = Mesh(layout), cases.CONFIGS["deep" if "pp" in layout else "llama"]
    if experts:
        config = replace(config, experts=ExpertOptions(number=4, per_token=2, width=8))
    model = Transformer(config, mesh, dtype=dtype).to(mesh.device)
    engine = Engine(model, mesh, fused if late else cases.sgd, clip=cases.CLIP, bucket_mb=0.01)
    counts = []
    for step in range(STEPS):
        tokens, labels, _ = (t.to(mesh.device) for t in cases.micro_batch(config, step, mesh.index("dp"), 4))
        counts = [seen()]
        engine.accumulate([{"tokens": tokens, "labels": labels}] * MICRO_BATCHES)
        counts.append(seen())
        _ = engine.step_async() if late else engine.step()
        counts.append(seen())
    return [
        {place: count - before.get(place, 0) for place, count in after.items() if count > before.get(place, 0)}
        for before, after in pairwise(counts)
    ]


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2", "pp2"])
def test_the_host_waits_once_a_step_and_not_in_forward_and_backward(layout: str) -> None:
    for in_passes, in_step in right(run(waits, 2, layout, join=False, seconds=20, limit=45)):
        assert not in_passes
        assert list(in_step.values()) == [1], in_step


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2", "pp2"])
def test_the_host_never_waits_where_a_step_is_read_in_the_next_one(layout: str) -> None:
    results = run(waits, 2, layout, False, torch.float32, True, join=False, seconds=20, limit=45)
    assert all(counts == [{}, {}] for counts in right(results)), results


@pytest.mark.parametrize(
    ("layout", "dtype", "a_layer"),
    [
        ("dp2", torch.bfloat16, 0),  # torch's grouped product reads the experts' ends on the card
        ("tp2 sp", torch.bfloat16, 0),  # a padded sequence: slots that no expert computes
        ("dp2", torch.float32, 1),  # no such kernel: the host reads the ends
        ("dp2 ep2", torch.float32, 1),  # the sizes of the exchange, and the ends with them
        ("dp2 ep2", torch.bfloat16, 1),
    ],
    ids=str,
)
def test_a_layer_of_experts_waits_only_for_what_its_exchange_must_know(
    layout: str, dtype: torch.dtype, a_layer: int
) -> None:
    for in_passes, in_step in right(run(waits, 2, layout, True, dtype, join=False, seconds=20, limit=45)):
        of_layers = sum(count for place, count in in_passes.items() if "nn/" in place)
        assert of_layers == a_layer * LAYERS * MICRO_BATCHES, in_passes
        assert sum(in_passes.values()) - of_layers == 1, in_passes  # the weights of the step's terms
        assert list(in_step.values()) == [1], in_step
