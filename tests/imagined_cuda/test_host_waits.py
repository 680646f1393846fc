"""How often the host waits for the card in a step of isograd that goes well, by layout and by place; experts' products.

One wait a step: what the step says (its loss, its weight, its norm) is read at once, behind the reductions and before
the optimizer. None where it is read in the next step. Experts over ranks wait once a layer, for the sizes of their
exchange; a step of terms once, at its beginning, for their weights.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from isograd.comm.device import device as device_of
from isograd.core.mesh import Mesh
from isograd.engine.data_parallel import DataParallel
from tests.nn.test_grouped_products import ENDS, Compared, compared, error
from tests.parity import cases

from . import device, right, run
from .on_cards import engine_of, micro_batch, values

STEPS = 3  # the last one is looked at: the first makes connections and learns shapes
MICRO_BATCHES = 2
LAYERS = 2
LAYOUTS = ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sp", "cp2", "pp2")


def fused(shards: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(shards, lr=0.01, fused=True)


def seen() -> Counter[str]:
    """What the host has waited for so far, by place."""
    costs = [one for one in device.lib.findings() if one[0] in ("host wait", "pageable copy")]
    return Counter({f"{kind}: {text} at {first}": count for kind, text, first, _, count in costs})


def waits(
    layout: str, experts: bool = False, dtype: torch.dtype = torch.float32, late: bool = False
) -> list[dict[str, int]]:
    """Of the last step: how often the host waits and where, in forward and backward, and in `engine.step`. late: its
    numbers are read in the next one."""
    engine = engine_of(layout, fused if late else cases.sgd, dtype, experts, clip=cases.CLIP)
    counts = []
    for step in range(STEPS):
        batch = [micro_batch(engine, step)] * MICRO_BATCHES
        counts = [seen()]
        engine.accumulate(batch)
        counts.append(seen())
        _ = engine.step_async() if late else engine.step()
        counts.append(seen())
    return [after - before for before, after in pairwise(counts)]


def at_once_and_late(layout: str) -> list[list[dict[str, int]]]:
    return [waits(layout, late=late) for late in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_once_a_step_and_never_where_a_step_is_read_in_the_next_one(layout: str) -> None:
    for (in_passes, in_step), late in values(2, "default", at_once_and_late, layout):
        assert not in_passes
        assert list(in_step.values()) == [1], in_step
        assert late == [{}, {}]


def without_an_engine() -> tuple[dict[str, int], float]:
    """As `waits`, in a backward of ig.DataParallel; and a gradient, of a row of ones here and two of twos there."""
    rows = Mesh("dp2").rank + 1
    model = DataParallel(torch.nn.Linear(8, 1).to(device_of()))
    for _ in range(STEPS):
        model.zero_grad()
        batch, before = torch.full((rows, 8), float(rows), device=device_of()), seen()
        model.weigh(model(batch).mean(), rows).backward()
        found = seen() - before
    return found, float(model.module.weight.grad[0, 0])


def test_the_host_does_not_wait_in_a_backward_of_data_parallel() -> None:
    for found, gradient in values(2, "default", without_an_engine):
        assert not found
        assert gradient == pytest.approx((1 * 1 + 2 * 2) / 3)


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
    for in_passes, in_step in values(2, "default", waits, layout, True, dtype):
        of_layers = sum(count for place, count in in_passes.items() if "nn/" in place)
        assert of_layers == a_layer * LAYERS * MICRO_BATCHES, in_passes
        assert sum(in_passes.values()) - of_layers == 1, in_passes  # the weights of the step's terms
        assert list(in_step.values()) == [1], in_step


LIMITS = {torch.float64: 1e-14, torch.bfloat16: 4 * 2.0**-9}  # at most four roundings lie behind each other


def on_a_card(ends: list[int], dtype: torch.dtype, hidden: int) -> tuple[Compared, list[str]]:
    """What was compared, and the places where the host waited before anything was brought back for it."""
    found = compared(ends, dtype, "cuda", hidden)
    waits = [first for kind, _, first, _, _ in device.lib.findings() if kind == "host wait" and "nn/test_" not in first]
    return found, waits


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float64, 7), (torch.bfloat16, 7), (torch.bfloat16, 8)], ids=str)
def test_experts_on_a_card_are_a_loop_over_experts(ends: list[int], dtype: torch.dtype, hidden: int) -> None:
    (result,) = results = run(on_a_card, 1, ends, dtype, hidden)
    ((numbers, waits),) = right(results)
    for name, (found, true) in numbers.items():
        assert error(found, true) < LIMITS[dtype], name
    kernel = dtype == torch.bfloat16 and hidden % 8 == 0
    assert bool(waits) != kernel, waits
    assert ("aten::_grouped_mm" in result.launches) == kernel
