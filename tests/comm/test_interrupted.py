"""An exception from outside in the middle of a message: the next collective is refused, and the others are told."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import raw, threads
from isograd.comm import world as comm_world
from isograd.comm.world import clone_store, store_check, store_set
from isograd.core.mesh import Mesh
from isograd.launcher.launch import launch


class Alarm(Exception):
    """Of a signal's handler."""


armed = [True]


def _raise(*_: Any) -> None:
    if armed[0]:
        raise Alarm


def _waits(what: str) -> list[str]:
    mesh, said = Mesh("dp2"), []
    group, _ = mesh.group("dp"), ig.Engine  # imported before the clock runs
    if group.index == 0:
        time.sleep(1.0)  # rank 1 waits for it
    signal.signal(signal.SIGALRM, _raise)
    if group.index == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        if what == "a collective":
            raw.all_reduce(torch.ones(100_000), group)
        else:
            stepped(mesh)
    except (Alarm, ig.errors.IsogradError) as error:
        said.append(f"{type(error).__name__}: {error}")
    try:
        raw.all_reduce(torch.ones(3), group)
    except ig.errors.IsogradError as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def stepped(mesh: Mesh) -> None:
    model = torch.nn.Linear(3, 1)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    engine.backward(model(torch.ones(2, 3)).mean(), weight=2)
    engine.step()


@pytest.mark.medium
@pytest.mark.parametrize("what", ["a collective", "a step"])
def test_the_next_collective_is_refused_and_the_other_rank_is_told(what: str) -> None:
    first, second = launch(_waits, 2, what, timeout=60)
    assert second[0].startswith("Alarm")
    assert "IG207" in second[1] and "Alarm came while" in second[1]
    assert any("IG213" in text and "rank 1: Alarm came" in text for text in first)
    assert all("IG207" in text or "IG213" in text for text in first)


def _alarmed(seed: int) -> dict[int, float]:
    """The losses of the steps that this rank finished; rank 1 is interrupted anywhere in every third one."""
    mesh = Mesh("dp2 zero1")
    draw = random.Random(seed)
    signal.signal(signal.SIGALRM, _raise)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)), torch.nn.Linear(64, 1))
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.AdamW(ps, fused=True))
    done = {}
    for step in range(60):
        try:
            try:
                armed[0] = True
                if mesh.rank == 1 and step % 3 == 2:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0002, 0.006))
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 2 + mesh.rank))
                engine.backward(model(x).square().mean(), weight=len(x))
                done[step] = engine.step().loss
            finally:
                armed[0] = False  # a late one is none
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (Alarm, RuntimeError, ig.errors.IsogradError):
            with suppress(Alarm, RuntimeError, ig.errors.IsogradError):
                engine.discard()
    return done


@pytest.mark.medium
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ranks_never_go_on_apart_wherever_one_is_interrupted(seed: int) -> None:
    first, second = launch(_alarmed, 2, seed, timeout=100)
    both = sorted(first.keys() & second.keys())
    assert both and all(first[step] == second[step] for step in both)
    assert len(first.keys() ^ second.keys()) <= 1  # the step in which rank 1 was lost
    assert max(first.keys() ^ second.keys(), default=both[-1]) >= both[-1]  # nothing after it


def _left_with_a_message() -> float:
    """How long rank 1 waits for rank 0, which has left while a thread of its own waits for a message."""
    mesh, began = Mesh("dp2"), time.monotonic()
    group = mesh.group("dp")
    if group.index == 1:
        with suppress(ig.errors.IsogradError):
            raw.receive_start([torch.ones(3)], group, 0, tag=1).wait()
        store_set("rank 1 has ended")
        return time.monotonic() - began
    line = clone_store() or torch.distributed.distributed_c10d._get_default_store()
    message = raw.receive_start([torch.ones(3)], group, 1, tag=2)
    assert not message.arrived_within(0.1)
    comm_world.leave("it gave up")
    while time.monotonic() - began < 8.0 and not store_check("rank 1 has ended", line):
        time.sleep(0.05)
    return 0.0


@pytest.mark.medium
def test_a_rank_that_leaves_ends_the_waits_of_others_at_once() -> None:
    """gloo kept the connections for as long as a thread or a frame of an exception held one of its messages: others
    waited until the process ended, or half an hour."""
    assert launch(_left_with_a_message, 2, timeout=60)[1] < 6.0


def _left_behind() -> tuple[str, list[float]]:
    group = Mesh("dp2").group("dp")
    memory = torch.full((3,), 7.0)
    handle = raw.receive_start([memory], group, 1 - group.index)
    store_set(f"asked {group.index}")
    while not store_check(f"asked {1 - group.index}"):  # the other one's would find closed connections
        time.sleep(0.01)
    comm_world.leave("a test")
    with pytest.raises(ig.errors.CommError) as refused:
        handle.wait()
    return refused.value.code, memory.tolist()


@pytest.mark.parametrize("world", [launch, threads.run])
def test_a_message_that_was_given_up_is_not_taken_for_received(world: Any) -> None:
    """Its memory holds whatever was there: a note of ZeRO 3 was read from it, behind the error that had closed it."""
    assert world(_left_behind, 2) == [("IG207", [7.0] * 3)] * 2


def forks() -> tuple[str, float]:
    """What a child of rank 0 is told in a collective, and what the ranks add up afterwards."""
    mesh, told = Mesh("dp2"), ""
    group = mesh.group("dp")
    raw.all_reduce(torch.ones(3), group)
    if mesh.rank == 0:
        back, there = os.pipe()
        child = os.fork()
        if not child:
            try:
                raw.all_reduce(torch.ones(3), group)
            except BaseException as error:
                os.write(there, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(back, 4096).decode()
    return told, float(raw.all_reduce(torch.ones(3), group).sum())


def test_a_child_of_a_rank_cannot_take_its_messages() -> None:
    """It waited, and read what was meant for its parent."""
    (told, one), (_, other) = launch(forks, 2, timeout=60)
    assert "IG207" in told and "forked from a rank" in told and one == other == 6.0


def ends_early() -> str:
    group = Mesh("dp2").group("dp")
    if group.index == 0:
        return ""
    try:
        raw.all_reduce(torch.ones(3), group)
    except ig.IsogradError as error:
        return str(error)
    return "went on"


def killed(folder: str) -> str:
    """Rank 0 ends without a word; the other one writes what it is told."""
    if Mesh("dp2").rank == 0:
        os._exit(0)
    Path(folder, "told").write_text(ends_early())
    return ""


def test_a_rank_that_has_ended_is_named_by_those_that_wait_for_it(tmp_path: Path) -> None:
    """It was gloo's error: "Connection closed by peer"."""
    assert "IG213" in threads.run(ends_early, 2)[1]
    with pytest.raises(ig.IsogradError, match="IG252"):
        launch(killed, 2, str(tmp_path), timeout=60)
    for said in ((tmp_path / "told").read_text(), threads.run(ends_early, 2)[1]):
        assert "rank 0 has ended, or the connection to it is lost" in said


def joins_twice(folder: str) -> list[float]:
    """Sums before and after its program has ended its world and joined another one."""
    mesh, found = Mesh("dp2"), list[float]()
    for turn in range(2):
        found.append(float(raw.all_reduce(torch.ones(1), Mesh("dp2").group("dp"))))
        torch.distributed.destroy_process_group()
        store = torch.distributed.FileStore(f"{folder}/{turn}", 2)
        torch.distributed.init_process_group("gloo", store=store, rank=mesh.rank, world_size=2)
    return found


def test_a_program_may_end_its_world_and_join_another_one(tmp_path: Path) -> None:
    """torch: Process group is not initialized in the world group map."""
    assert launch(joins_twice, 2, str(tmp_path), timeout=60) == [[2.0, 2.0]] * 2


def alone_and_together() -> bool:
    mesh = Mesh("dp2")
    before = comm_world.process_group_of(mesh.group("tp"))
    raw.all_reduce(torch.ones(1), mesh.group("dp"))
    return before is comm_world.process_group_of(mesh.group("tp"))


def test_a_group_of_one_keeps_its_process_group_when_others_are_made() -> None:
    assert launch(alone_and_together, 2, timeout=60) == [True, True]
