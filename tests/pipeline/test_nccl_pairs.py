"""Pipelines under the rules by which NCCL's messages block, played on gloo: they hang nowhere, and compute the same.

The rules are those of torch 2.11 to 2.13 (`ProcessGroupNCCL::pointToPoint`):

    a group that is made with a device_id has a communicator from then on; making it blocks until all members make it
    without one, its first batch makes it, and blocks until all members have come to a batch of theirs
    a message outside of a batch then makes a communicator for its two ranks, and blocks until both have come to one
    a communicator runs one batch after the other, and a batch ends when the other ranks have posted its messages
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from isograd.comm import raw
from isograd.comm import world as comm_world
from isograd.comm import world as place
from isograd.comm.transport import Nccl
from isograd.core.mesh import Mesh
from isograd.errors import CommError
from isograd.launcher.launch import World

from . import toys

PATIENCE_S = 15.0  # a rank that waits longer hangs
STAGES = 16  # of pp8 vpp2
MICRO_BATCHES = 9
SCHEDULES = ("", "gpipe", "vpp2", "zb", "vpp2 zb")
DATA, ARRIVED = 1, 2  # tags
Op = tuple[bool, Tensor, int]  # (whether it sends, what, the other member)


class Hangs(RuntimeError):
    """A rank has waited for too long."""


class Posted:
    """What a batch returns in the place of torch's works."""

    def __init__(self, future: Future[None], what: str) -> None:
        self._future, self._what = future, what

    def wait(self, *_: Any) -> bool:
        try:
            self._future.result(PATIENCE_S)
        except TimeoutError:
            raise Hangs(f"{self._what} is not over after {PATIENCE_S:g} s") from None
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class Communicators:
    """Of one rank: which there are, and the queue of each."""

    def __init__(self) -> None:
        self.queues: dict[tuple[Any, ...], ThreadPoolExecutor] = {}
        self.batches: set[int] = set()  # sizes of the groups of all batches

    def make(self, name: tuple[Any, ...], ranks: list[int]) -> None:
        """Blocks until all ranks make it."""
        if name in self.queues:
            return
        store, prefix = distributed_c10d._get_default_store(), f"nccl {self.serial} {name}"
        store.set(f"{prefix} {dist.get_rank()}", "")
        try:
            store.wait([f"{prefix} {rank}" for rank in ranks], timedelta(seconds=PATIENCE_S))
        except RuntimeError:
            raise Hangs(f"rank {dist.get_rank()} makes a communicator {name} alone") from None
        self.queues[name] = ThreadPoolExecutor(1)

    serial = 0  # of the tests of this process: names in the store are not used twice

    def post(self, name: tuple[Any, ...], pg: Any, ops: list[Op]) -> list[Posted]:
        what = f"rank {dist.get_rank()}: {['receive', 'send'][ops[0][0]]} in {name}"
        return [Posted(self.queues[name].submit(self._run, pg, ops), what)]

    def _run(self, pg: Any, ops: list[Op]) -> None:
        """A batch of which each message ends when the other side has it."""
        flags = [torch.ones(1) for _ in ops]
        works = [(pg.send if sends else pg.recv)([t], peer, DATA) for sends, t, peer in ops]
        answers = [pg.recv([flag], peer, ARRIVED) for flag, (sends, _, peer) in zip(flags, ops, strict=True) if sends]
        for work, flag, (sends, _, peer) in zip(works, flags, ops, strict=True):
            work.wait()
            if not sends:
                pg.send([flag], peer, ARRIVED).wait()
        for answer in answers:
            answer.wait()


@contextmanager
def nccl() -> Iterator[Communicators]:
    """The rules, for the groups of pipelines; the rest of the engine has gloo."""
    Communicators.serial += 1
    here, before, made = Communicators(), dict(place.process.made), []
    make_process_group, make_group = place._new_process_group, comm_world.new_group

    def new_process_group(purpose: str, ranks: tuple[int, ...], index: int) -> Any:
        made.append(pg := make_process_group(f"{purpose} {here.serial}", ranks, index))
        if place._card("nccl") is not None:
            here.make((pg.group_name,), list(ranks))
        return pg

    def new_group(axes: str, ranks: tuple[int, ...], *more: Any) -> Any:
        group = make_group(axes, ranks, *more)
        if axes == "pp" and group.size > 1:
            group.connections = Nccl(group.transport.process_group, group.transport.ranks, group.transport.index)
        return group

    def batch(ops: list[dist.P2POp]) -> list[Posted]:
        pg, ranks = ops[0].group, dist.get_process_group_ranks(ops[0].group)
        here.make((pg.group_name,), ranks)
        here.batches.add(len(ranks))
        return here.post((pg.group_name,), pg, [(o.op is dist.isend, o.tensor, ranks.index(o.peer)) for o in ops])

    with ExitStack() as stack:
        for where, name, value in (
            (dist, "batch_isend_irecv", batch),
            (place, "_new_process_group", new_process_group),
            (comm_world, "new_group", new_group),
            (place, "_card", lambda backend: torch.device("cuda", 0)),
        ):
            stack.enter_context(patch.object(where, name, value))
        place.process.made.clear()  # all groups are made anew, by these rules, and end with them
        try:
            yield here
        finally:
            for queue in here.queues.values():
                queue.shutdown(wait=False)
            place.process.made.clear()
            place.process.made.update(before)
    for pg in made if dist.is_initialized() else ():  # a rank that has met a hang has left its world
        dist.destroy_process_group(pg)


def modules() -> list[Any]:
    torch.manual_seed(0)
    return [nn.Linear(5, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(STAGES - 2)), nn.Linear(8, 3)]


def under_the_rules(layout: str) -> toys.Outcome:
    """Two steps, an evaluation before each: headers travel first in both."""
    with nccl() as here:
        found = toys.train(layout, modules, MICRO_BATCHES)
    assert here.batches == {2}  # all messages of the pipeline went by these rules
    return found


truth = cache(partial(toys.one_device, modules, MICRO_BATCHES))


@pytest.mark.medium
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_first_messages_block_and_no_schedule_hangs(worlds, ranks: int, schedule: str) -> None:
    """G1: on NCCL pp3 and more hung in the first step, when messages outside of a batch made their communicators."""
    found = worlds(ranks).run(partial(under_the_rules, f"pp{ranks} {schedule}".strip()))
    assert not toys.differences(found, truth())


def both_ways(shared: bool) -> str:
    """Two neighbours that send to each other before they receive: what arrives, or what hangs."""
    with nccl(), patch(f"{__name__}.PATIENCE_S", 1.0):
        mesh = Mesh("pp2")
        peer = 1 - mesh.rank
        up, down = (mesh.pair("pp", peer, way) for way in ("up", "down"))
        outgoing, incoming = (up, down) if mesh.rank == 0 else (down, up)
        got = torch.empty(3)
        sending = raw.send_start([torch.full((3,), float(mesh.rank))], up if shared else outgoing, peer)
        receiving = raw.receive_start([got], up if shared else incoming, peer)
        try:
            receiving.wait()
            sending.wait()
        except (Hangs, CommError) as error:
            return str(error)
        return str(got.tolist())


@pytest.mark.medium
def test_each_direction_between_two_neighbours_has_a_queue_of_its_own(worlds) -> None:
    """A18: in one queue, two ranks that send to each other before they receive would wait for ever."""
    assert worlds(2).run(both_ways, False) == ["[1.0, 1.0, 1.0]", "[0.0, 0.0, 0.0]"]
    world = World(2)
    said = world.run(both_ways, True, timeout=60)
    assert any("is not over after 1 s" in text for text in said)
    assert all("is not over after 1 s" in text or "IG213" in text for text in said)
    world.close(kill=True)
