"""A step of several terms is the step of one device: each term is divided by its own weight over all ranks."""

from __future__ import annotations

from functools import partial

import pytest

from isograd.comm import raw

from . import several

WAYS = ("eager", "no_sync", "reproducible", "overlap", "step", "said")


def every_way(accumulation: int, stages: tuple[int, ...] = (0, 1, 2, 3), ways: tuple[str, ...] = WAYS) -> list[str]:
    ranks = raw.world()[1]
    truth, wrong = several.one_device(ranks * accumulation), []
    for zero in stages:
        for way in ways:
            found = several.run(f"dp{ranks} zero{zero}", ranks * accumulation, way)
            wrong += [f"zero{zero} {way}: {words}" for words in several.differences(found, truth)]
    return wrong


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_term_is_divided_by_its_own_weight(worlds, ranks: int, accumulation: int) -> None:
    assert worlds(ranks).run(partial(every_way, accumulation)) == [[]] * ranks


def a_rank_without_data() -> list[str]:
    truth = several.one_device(4)
    found = several.run("dp3 zero1", 4, "overlap", idle=1)
    return list(several.differences(found, truth))


def test_a_rank_without_any_backward_announces_nothing_and_steps(worlds) -> None:
    assert worlds(3).run(a_rank_without_data) == [[]] * 3
