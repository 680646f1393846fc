"""Messages between ranks of one machine arrive as gloo's do: whole, in order, apart by group and tag; and what fails is
told to both ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isograd.comm import channel, near, raw
from isograd.comm.channel import INSIDE, Channel
from isograd.comm.launch import World
from isograd.comm.near import Hub
from isograd.errors import CommError
from isograd.mesh import Mesh

GROUP, SECONDS = 7, 20.0
SIZES = (1, 3, INSIDE - 1, INSIDE, INSIDE + 1, 1 << 20)  # bytes


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Two ends of a line in this one process, which may read its own memory, each with a server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    channels = Channel(1, os.getpid(), ours), Channel(0, os.getpid(), theirs)
    hubs = [Hub([end]) for end in channels]
    yield channels
    for hub in hubs:
        hub.close()


def numbers(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def until(condition: object) -> None:
    end = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_of_any_size_arrives_whole(ends: tuple[Channel, Channel], size: int, posted_first: bool) -> None:
    here, there = ends
    sent, memory = numbers(size), torch.zeros(size, dtype=torch.uint8)
    if posted_first:
        works = [there.receive(memory, GROUP, 0, SECONDS), *here.send([sent], GROUP, 0, SECONDS)]
    else:
        works = here.send([sent], GROUP, 0, SECONDS)
        until(lambda: there._came)
        works += [there.receive(memory, GROUP, 0, SECONDS)]
    for work in works:
        work.wait()
    assert torch.equal(memory, sent)
    assert all(work.is_completed() for work in works)
    assert here.given == size


def test_a_large_message_is_not_done_before_it_is_received(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    sent = numbers(INSIDE + 1)
    (work,) = here.send([sent], GROUP, 0, SECONDS)
    until(lambda: there._came)
    assert not work.is_completed()
    there.receive(torch.zeros_like(sent), GROUP, 0, SECONDS).wait()
    work.wait()


def test_messages_of_other_groups_and_tags_never_meet_and_those_of_one_keep_their_order(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    draw = random.Random(0)
    sent = [(draw.randrange(3), draw.randrange(3), numbers(draw.choice(SIZES), seed)) for seed in range(200)]
    places = sorted({(group, tag) for group, tag, _ in sent})
    expected = {place: [t for *at, t in sent if tuple(at) == place] for place in places}
    memory = {place: [torch.zeros_like(t) for t in expected[place]] for place in places}
    pending = [(place, t) for place in places for t in memory[place]]
    early = pending[: len(pending) // 2]  # posted before anything is sent
    works = [there.receive(t, *place, SECONDS) for place, t in early]
    works += [work for group, tag, t in sent for work in here.send([t], group, tag, SECONDS)]
    works += [there.receive(t, *place, SECONDS) for place, t in pending[len(early) :]]
    draw.shuffle(works)
    for work in works:
        work.wait()
    for place in places:
        assert all(torch.equal(a, b) for a, b in zip(memory[place], expected[place], strict=True))
    assert not here._sent and not there._came and not there._waiting and not there._taking


def test_a_shorter_message_fills_the_beginning(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    for size in SIZES:
        memory = torch.full((size + 5,), 9, dtype=torch.uint8)
        work = there.receive(memory, GROUP, 0, SECONDS)
        here.send([numbers(size)], GROUP, 0, SECONDS)
        work.wait()
        assert torch.equal(memory[:size], numbers(size))
        assert memory[size:].tolist() == [9] * 5


@pytest.mark.parametrize("size", [8, 1 << 20])
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_that_is_too_long_is_refused_and_the_next_one_is_right(
    ends: tuple[Channel, Channel], size: int, posted_first: bool
) -> None:
    here, there = ends
    short, memory = torch.zeros(size - 1, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    if posted_first:
        refused = there.receive(short, GROUP, 0, SECONDS)
    sends = here.send([numbers(size), numbers(size, 1)], GROUP, 0, SECONDS)
    if not posted_first:
        until(lambda: there._came)
        refused = there.receive(short, GROUP, 0, SECONDS)
    with pytest.raises(CommError, match=rf"IG209.*rank 0(.*\n)*.*{size} bytes"):
        refused.wait()
    assert short.count_nonzero() == 0
    there.receive(memory, GROUP, 0, SECONDS).wait()
    for work in sends:
        work.wait()
    assert torch.equal(memory, numbers(size, 1))


def test_small_messages_that_nobody_reads_fill_the_socket_and_still_arrive(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    count = 2000
    there._lock.acquire()  # its server takes nothing
    sends = [work for n in range(count) for work in here.send([torch.full((100,), n)], GROUP, 0, SECONDS)]
    assert here.queue and not all(work.is_completed() for work in sends)
    there._lock.release()
    for n in range(count):
        memory = torch.zeros(100, dtype=torch.int64)
        there.receive(memory, GROUP, 0, SECONDS).wait()
        assert memory.unique().tolist() == [n]
    for work in sends:
        work.wait()
    assert not here.queue


def test_several_waiting_threads_are_all_told(ends: tuple[Channel, Channel]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    here, there = ends
    work = there.receive(torch.zeros(4), GROUP, 0, SECONDS)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(work.wait) for _ in range(4)]
        time.sleep(0.05)
        here.send([torch.ones(4)], GROUP, 0, SECONDS)
        for wait in waits:
            wait.result(SECONDS)


def test_a_silent_rank_is_waited_for_as_long_as_was_said(ends: tuple[Channel, Channel]) -> None:
    work = ends[1].receive(torch.zeros(4), GROUP, 0, 0.05)
    with pytest.raises(RuntimeError, match="Timed out waiting 50ms for receive from rank 0"):
        work.wait()


def test_whoever_waits_for_a_rank_that_has_left_is_told_and_what_it_said_before_is_there(
    ends: tuple[Channel, Channel],
) -> None:
    here, there = ends
    waits = [there.receive(torch.zeros(4), GROUP, 1, SECONDS), *there.send([torch.zeros(INSIDE)], GROUP, 0, SECONDS)]
    last = torch.full((4,), 5.0)
    here.send([last], GROUP, 2, SECONDS)
    here.socket.shutdown(socket.SHUT_RDWR)
    for work in waits:
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    there.receive(memory := torch.zeros(4), GROUP, 2, SECONDS).wait()
    assert torch.equal(memory, last)
    with pytest.raises(RuntimeError, match="closed by peer"):  # at once, and for ever
        there.receive(memory, GROUP, 2, SECONDS).wait()
    for work in there.send([memory, torch.zeros(INSIDE)], GROUP, 2, SECONDS):
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()


def test_memory_that_a_sender_has_let_go_of_is_not_taken_for_a_message(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    sent, memory = numbers(INSIDE + 1), torch.zeros(INSIDE + 1, dtype=torch.uint8)
    (work,) = here.send([sent], GROUP, 0, SECONDS)
    until(lambda: there._came)
    here.end("this rank has closed its connections")
    sent.fill_(7)  # nobody keeps it any more
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            there.receive(memory, GROUP, 0, SECONDS).wait()
    with pytest.raises(RuntimeError, match="closed"):
        work.wait()


def test_a_sender_that_closes_while_its_memory_is_read_is_noticed(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    here.send([numbers(INSIDE + 1)], GROUP, 0, SECONDS)
    until(lambda: there._came)

    def late(*of: int) -> bool:
        here.end("this rank has closed its connections")
        return copied(*of)

    copied = channel.copy_from
    monkeypatch.setattr(channel, "copy_from", late)
    monkeypatch.setattr(there, "end", lambda _: None)  # the server has not heard of it yet
    with pytest.raises(RuntimeError, match="closed by peer"):
        there.receive(torch.zeros(INSIDE + 1, dtype=torch.uint8), GROUP, 0, SECONDS).wait()


def test_nothing_is_kept_of_messages_that_were_received(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    for tag in range(10):  # as many places
        for size in (INSIDE, INSIDE + 1):
            (work,) = here.send([numbers(size)], GROUP, tag, SECONDS)
            until(lambda: there._came)
            there.receive(torch.zeros(size, dtype=torch.uint8), GROUP, tag, SECONDS).wait()
            work.wait()
            assert not there._came and not there._taking and not there._waiting and not here._sent


def test_a_server_that_fails_says_so(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ends
    monkeypatch.setattr("threading.excepthook", lambda *_: None)
    monkeypatch.setattr(there, "_arrive", lambda *_: 1 / 0)
    work = there.receive(torch.zeros(4), GROUP, 0, SECONDS)
    here.send([torch.ones(4)], GROUP, 0, SECONDS)
    with pytest.raises(RuntimeError, match=r"server of messages failed: ZeroDivisionError"):
        work.wait()


@pytest.mark.parametrize("when", ["before it is read", "after it was read"])
def test_an_exception_while_a_message_is_read_loses_nothing(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    here, there = ends
    sent = [numbers(INSIDE + 1), numbers(INSIDE + 1, 1)]
    sends = here.send(sent, GROUP, 0, SECONDS)
    until(lambda: len(there._came.get((GROUP, 0), ())) == 2)
    memory = torch.zeros_like(sent[0])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((channel, "copy_from") if when == "before it is read" else (there, "_say")), interrupted)
        with pytest.raises(KeyboardInterrupt):
            there.receive(memory, GROUP, 0, SECONDS)
    if when == "before it is read":
        there.receive(memory, GROUP, 0, SECONDS).wait()
    sends[0].wait()  # the server says what the thread could not
    assert torch.equal(memory, sent[0])
    there.receive(memory, GROUP, 0, SECONDS).wait()
    sends[1].wait()
    assert torch.equal(memory, sent[1])


def test_a_child_that_was_forked_off_does_not_keep_connections_open(ends: tuple[Channel, Channel]) -> None:
    here, there = ends
    hub = Hub([])  # a hub that the fork hook knows, with the line of the fixture
    hub.channels = {1: here}
    near._hubs.add(hub)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        work = there.receive(torch.zeros(4), GROUP, 0, SECONDS)
        here.socket.close()
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        hub.close()


# -- in a world ---------------------------------------------------------------------------------------------------


def _all_near(sizes: tuple[int, ...]) -> None:
    group = Mesh(f"dp{dist.get_world_size()}").group("dp")
    assert all(one for r, one in enumerate(near.channels_of(group)[1]) if r != group.index)
    for size in sizes:
        pieces = [numbers(size, 10 * group.index + i) for i in range(group.size)]
        got = raw.all_to_all(pieces, [[size]] * group.size, group)
        for i, piece in enumerate(got):
            assert torch.equal(piece, numbers(size, 10 * i + group.index))


def test_ranks_of_a_world_are_near(worlds: Callable[[int], World]) -> None:
    worlds(3).run(_all_near, SIZES)


def _one_cannot_read() -> None:
    group = Mesh(f"dp{dist.get_world_size()}").group("dp")
    real = near._can_read
    if group.index == 1:
        near._can_read = lambda seat: False
    try:
        raw._meet_near(group.index, group.size)
    finally:
        near._can_read = real
    for one in list(raw._given):
        one.near = None
    found = {r for r, one in enumerate(near.channels_of(group)[1]) if one}
    assert found == (set() if group.index == 1 else {0, 2} - {group.index})
    (total,) = raw.all_reduce(torch.tensor([2.0**group.index]), group).tolist()
    assert total == 7
    raw._meet_near(group.index, group.size)  # as it was
    for one in list(raw._given):
        one.near = None


def test_where_one_rank_cannot_read_the_others_it_talks_through_gloo(worlds: Callable[[int], World]) -> None:
    worlds(3).run(_one_cannot_read)
