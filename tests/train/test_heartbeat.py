"""Signs of life between machines: who is silent, and who is cut off. Stores of torch in threads, no ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from isograd.train.run import heartbeat
from isograd.train.run.heartbeat import Heartbeat

LIMIT = 1.6


def until(true: Callable[[], object]) -> float:
    began = time.monotonic()
    while not true() and time.monotonic() - began < 20:
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.medium
def test_a_silent_rank_is_named_to_all_and_one_that_has_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    monkeypatch.setattr(heartbeat, "clone_store", store.clone)
    hosts = ["a", "a", "b", "b"]
    ranks = [Heartbeat(rank, 4, LIMIT) for rank in range(4)]
    for one in ranks:
        one.start(hosts)
    time.sleep(LIMIT)
    assert [one.lost() for one in ranks] == [None] * 4
    ranks[0].close()  # ends as it should
    for one in ranks[2:]:
        one.close()
        assert one._thread is not None
        one._thread.join()
        store.set(f"isograd/heartbeat/{one.rank}", "1")  # as if its machine had vanished, without a last word
    took = until(ranks[1].lost)
    assert ranks[1].lost() is not None
    silent, cut_off = ranks[1].lost() or ([], True)
    assert (silent[0], cut_off) == (2, False)
    assert took <= LIMIT
    assert ranks[0].lost() is None


@pytest.mark.medium
def test_a_rank_without_an_answer_from_the_store_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def set(self, *_: object) -> None:
            pass

        def get(self, *_: object) -> bytes:
            raise RuntimeError("Broken pipe")

    monkeypatch.setattr(heartbeat, "clone_store", Gone)
    alone = Heartbeat(0, 2, LIMIT)
    alone.start(["a", "b"])
    assert alone.lost() is None
    assert until(alone.lost) <= LIMIT
    assert alone.lost() == ([], True)
    together = Heartbeat(0, 2, LIMIT)
    together.start(["a", "a"])  # one machine: there is no network to lose
    assert together._thread is None
