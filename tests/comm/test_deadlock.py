"""Ranks that would wait for each other for ever are told within ten seconds what each of them waits for; ranks that are
only slow are left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import deadlock, raw, threads
from isograd.core.mesh import Mesh
from isograd.launcher.launch import launch

HERE = "test_deadlock.py"


def told(run: Callable[..., Any], *args: Any) -> tuple[float, str]:
    """How long it took until it ended, and what was raised; nothing where it went well."""
    began = time.monotonic()
    try:
        run(*args)
    except ig.IsogradError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


def train(mesh: Mesh, what: str) -> None:
    """Rank 0 does something that the others do not."""
    config = ig.models.TransformerConfig(vocab=17, hidden=16, layers=2, heads=2, mlp=12)
    model = ig.models.Transformer(config, mesh)
    engine = ig.Engine(model, mesh, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    tokens = torch.arange(16).reshape(2, 8)
    for step in range(2):
        odd = step == 1 and mesh.rank == 0
        if odd and what == "one micro-batch more":
            engine.backward(*model(tokens, tokens))
        if odd and what == "an evaluation":
            engine.evaluate([{"tokens": tokens, "labels": tokens}])
        if odd and what == "another shape":
            tokens = tokens[:1].contiguous()
        if odd and what == "a pause":
            time.sleep((deadlock.LOOKS + 4) * deadlock.LOOK_S)
        engine.backward(*model(tokens, tokens))
        engine.step()


def trained(layout: str, what: str) -> tuple[float, str]:
    return told(train, Mesh(layout), what)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this process look at each other more often."""
    monkeypatch.setattr(deadlock, "LOOK_S", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("layout", ["tp2", "tp2 sp", "cp2 ring", "cp2 ulysses"])
@pytest.mark.parametrize("what", ["one micro-batch more", "an evaluation"])
def test_ranks_that_do_different_things_in_layers_are_told_where_each_of_them_is(layout: str, what: str) -> None:
    """FAILURES E3: they waited until the time limit of the world, half an hour."""
    for seconds, said in threads.run(trained, 2, layout, what):
        assert "IG215" in said and seconds < 10
        assert all(f"rank {rank} (" in said for rank in range(2)) and said.count(HERE) == 2, said


@pytest.mark.medium
def test_a_batch_of_another_shape_ends_no_rank_by_a_signal_of_gloo() -> None:
    for seconds, said in launch(trained, 2, "tp2", "another shape", timeout=60):
        assert "IG215" in said and seconds < 10
        assert "512 bytes" in said and "1024 bytes" in said, said


@pytest.mark.usefixtures("impatient")
def test_four_ranks_of_two_groups_are_all_told() -> None:
    for _, said in threads.run(trained, 4, "dp2 tp2 zero1", "one micro-batch more"):
        assert "IG215" in said, said


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("layout", ["dp2", "tp2", "cp2 ring", "dp2 zero3"])
def test_a_slow_rank_is_waited_for(layout: str) -> None:
    assert [said for _, said in threads.run(trained, 2, layout, "a pause")] == ["", ""]


def around(longest: int, message: int, slow: float = 0.0) -> tuple[float, str]:
    """Each rank waits for a message of the next one, and sends one to the rank before, afterwards or (rank 0, if slow)
    after a while."""
    mesh = Mesh(f"dp{longest}")
    group, x = mesh.group("dp"), torch.ones(message)

    def run() -> None:
        if slow and mesh.rank == 0:
            time.sleep(slow)
            raw.send_start([x], group, longest - 1).wait()
        raw.receive_start([torch.empty(message)], group, (mesh.rank + 1) % longest).wait()
        if not (slow and mesh.rank == 0):
            raw.send_start([x], group, (mesh.rank - 1) % longest).wait()

    return told(run)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("runs", [threads.run, pytest.param(launch, marks=pytest.mark.medium)])
def test_a_circle_of_three_is_found_and_a_chain_that_one_slow_rank_holds_up_is_not(runs: Callable[..., Any]) -> None:
    for seconds, said in runs(around, 3, 3, 5):
        assert "IG215" in said and seconds < 10
        assert all(f"waits for 20 bytes of rank {rank}" in said for rank in range(3)), said
    late = (deadlock.LOOKS + 6) * deadlock.LOOK_S
    assert [said for _, said in runs(around, 3, 3, 5, late)] == ["", "", ""]


def test_a_message_that_is_under_way_is_owed_by_nobody() -> None:
    def two(_: None) -> list[bool]:
        mesh = Mesh("dp2")
        group, other = mesh.group("dp"), 1 - mesh.rank
        watch = deadlock.DeadlockWatch(group.context)
        key, found = ("", [0, 1], other, False, 7), list[bool]()
        for number in (1, 2):
            found.append(watch._is_owed(*key, number))
            raw.send_start([torch.ones(3)], group, other, 7).wait()
            found.append(watch._is_owed(*key, number))
        watch.over.set()
        return found

    assert threads.run(two, 2, None) == [[True, False, True, False]] * 2


def test_nobody_watches_ranks_that_have_ended() -> None:
    assert [said for _, said in threads.run(around, 2, 2, 5, 0.01)] == ["", ""]
    end = time.monotonic() + 10
    while any(thread.name == "isograd deadlock watch" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.1)
