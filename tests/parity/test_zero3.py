"""ZeRO 3 in the grid: one device's training, and the bits of ZeRO 1, under data, tensor and sequence parallelism."""

from __future__ import annotations

from itertools import product

import pytest

from isograd.comm import raw
from isograd.core.layout import Layout
from tests.sizes import sized

from . import cases
from .test_grid import on_two_ranks, ranks, settings

LAYOUTS = [
    "dp2", "dp4", "dp8", "dp3", "dp2 tp2 sp", "dp4 tp2 sp", "dp2 tp2", "tp2 sp", "cp2 ulysses", "cp2 ring",
    "dp2 cp2 ring", "dp4 cp2 ulysses", "dp2 cp2 ring tp2 sp",
]  # fmt: skip


def runs(layout: Layout, model: str) -> bool:
    return not (layout.ring > 1 and cases.CONFIGS[model].attention_dropout)


GRID = sorted(
    (case for case in product(LAYOUTS, cases.MODELS, (1, 3)) if runs(Layout.parse(case[0]), case[1])), key=ranks
)


@pytest.mark.parametrize(("layout", "model", "accumulation"), sized(GRID, settings, on_two_ranks))
def test_stage_3_trains_as_one_device_does_with_the_bits_of_stage_1(
    threads, layout: str, model: str, accumulation: int
) -> None:
    world = threads(Layout.parse(layout).world_size)
    case = cases.Case(f"{layout} zero3", model, accumulation)
    results = world.run(case.run)
    assert not case.wrong(results)
    lower = world.run(cases.Case(f"{layout} zero1", model, accumulation).run)
    assert [r.settled for r in results] == [r.settled for r in lower]


@pytest.mark.medium
def test_ranks_whose_status_is_gathered_in_rounds_train_as_one_device_does(threads) -> None:
    case = cases.Case("dp6 tp2 sp zero3", "llama", 1)
    assert Layout.parse(case.layout).world_size > raw.MANY and not case.wrong(threads(12).run(case.run))
