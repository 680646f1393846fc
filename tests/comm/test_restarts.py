"""Ranks that torchrun starts again agree on a name that no earlier start had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from isograd.comm import restarts
from isograd.errors import CommError


def test_each_start_has_a_name_of_its_own_in_a_store_that_knows_earlier_ones() -> None:
    store = dist.HashStore()
    found = []
    with ThreadPoolExecutor(3) as ranks:
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):  # who comes first
            names = [ranks.submit(restarts.name, store, rank, 3, 30.0) for rank in order]
            found.append({name.result(30) for name in names})
    assert [len(names) for names in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_a_rank_that_was_ended_before_it_heard_the_name_changes_nothing() -> None:
    store = dist.HashStore()
    store.set("isograd/asks/1", "of an earlier start")
    with ThreadPoolExecutor(1) as ranks:
        first = ranks.submit(restarts.name, store, 0, 2, 30.0)
        store.wait(["isograd/start/of an earlier start"])  # answered, in vain
        assert restarts.name(store, 1, 2, 30.0) == first.result(30)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(CommError, match=r"IG208.*\n.*ranks \[1, 2\]"):
        restarts.name(dist.HashStore(), 0, 3, 0.05)


def test_only_torchrun_that_may_start_ranks_again_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not restarts.possible()
    for count, needed in (("0", False), ("3", True)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", count)
        assert restarts.possible() == needed
