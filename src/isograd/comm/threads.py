"""Ranks as threads of one process: the same program, without processes, sockets or pickles.

    results = threads.run(fn, 4, *args)       # fn(*args) on four ranks

A message is a copy of a tensor in a queue of its sender, receiver, group, purpose and tag. A receiver waits until it is
there, or until the sender has left. What a rank knows of its world belongs to its thread. Autograd on CPUs runs in the
thread that calls it. Torch's global random numbers are shared by all ranks, as is all else of a process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isograd.comm.group import RankContext
from isograd.comm.transport import Transport, memory_store
from isograd.errors import LaunchError

Key = tuple[str, tuple[int, ...], int, int, int]  # purpose, members, sender, receiver, tag


class ThreadWorld:
    """The messages under way between some threads, and which of them have left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived = [threading.Condition(lock) for lock in [threading.RLock()] * size]  # a message for this rank
        self.queues: dict[Key, deque[Tensor]] = {}
        self.gone: dict[int, str] = {}  # ranks that have left, and why
        self.store = memory_store()


class ThreadRank(RankContext):
    """One rank of such a world."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__()
        self.world, self.rank = world, rank
        self.asked: dict[Key, deque[_Receive]] = {}  # not filled yet, of all meshes of the rank

    def leave(self, why: str) -> None:
        """No message of this rank will come any more."""
        super().leave(why)
        with self.world.arrived[self.rank]:
            self.world.gone.setdefault(self.rank, why)
            for arrived in self.world.arrived:
                arrived.notify_all()


class ThreadTransport(Transport):
    """Messages of one group of a rank that is a thread."""

    def __init__(self, member: ThreadRank, ranks: tuple[int, ...], purpose: str) -> None:
        super().__init__(None, ranks, ranks.index(member.rank))
        self.member, self.purpose = member, purpose

    def _key(self, sender: int, receiver: int, tag: int) -> Key:
        return self.purpose, self.ranks, self.ranks[sender], self.ranks[receiver], tag

    def send(self, handle: Any, tensors: Sequence[Tensor], peer: int, tag: int, control: bool) -> None:
        """Put copies into the queue."""
        world, key = self.member.world, self._key(self.index, peer, tag)
        for tensor in filter(Tensor.numel, tensors):
            self.count(True, tensor, peer, tag or -2)
        with (arrived := world.arrived[key[3]]):
            world.queues.setdefault(key, deque()).extend(t.detach().clone() for t in filter(Tensor.numel, tensors))
            arrived.notify_all()

    def receive(self, handle: Any, tensors: Sequence[Tensor], peer: int, tag: int, control: bool) -> None:
        """Messages are taken in the order in which they were asked for."""
        for tensor in filter(Tensor.numel, tensors):
            handle.add(self._receive(tensor, peer, tag), peer, self.count(False, tensor, peer, tag or -2))

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> _Receive:
        key = self._key(peer, self.index, tag)
        made = _Receive(self.member, key, tensor)
        self.member.asked.setdefault(key, deque()).append(made)
        return made

    def broadcast(self, x: Tensor, source: int) -> None:
        """From the source to each."""
        for peer in range(self.size) if source == self.index else ():
            if peer != source:
                self.send(None, [x], peer, -1, False)
        if source != self.index:
            self._receive(x, source, -1).wait()


class _Receive:
    """A message on its way into a tensor. Those of one key fill the tensors in the order in which they were asked for,
    whichever of them is waited for."""

    def __init__(self, member: ThreadRank, key: Key, into: Tensor) -> None:
        self._member, self._key, self._into = member, key, into

    def wait(self) -> None:
        """Until the message is there, or the sender has left."""
        world, sender = self._member.world, self._key[2]
        with (arrived := world.arrived[self._key[3]]):
            self._fill_all()
            while self in self._member.asked[self._key]:
                if sender in world.gone or self._key[3] in world.gone:
                    raise RuntimeError(f"connection closed by rank {sender}: {world.gone.get(sender)}")
                arrived.wait(1.0)
                self._fill_all()

    def _fill_all(self) -> None:
        messages, asked = self._member.world.queues.get(self._key, deque()), self._member.asked[self._key]
        while messages and asked:
            asked[0]._fill(messages[0])
            asked.popleft()
            messages.popleft()

    def _fill(self, message: Tensor) -> None:
        if message.numel() != self._into.numel() or message.dtype != self._into.dtype:
            raise RuntimeError(f"a message of {message.numel()} elements where {self._into.numel()} were expected")
        with torch.no_grad():
            self._into.copy_(message.view(self._into.shape))


class RankThread(threading.Thread):
    """A thread that speaks for a rank, if `member` is one."""

    def __init__(self, member: ThreadRank | None, target: Callable[..., None], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self.member = member


def member() -> ThreadRank | None:
    """The rank that this thread is, or speaks for; None outside of `run`."""
    found: ThreadRank | None = getattr(threading.current_thread(), "member", None)
    return found


def run(fn: Callable[..., Any], nproc: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """fn(*args) on `nproc` ranks, each a thread; results in rank order. Raises the first error when all have ended."""
    world = ThreadWorld(nproc)
    results: list[Any] = [None] * nproc
    errors: list[tuple[float, int, BaseException]] = []

    def rank(me: ThreadRank, number: int) -> None:
        try:
            results[number] = fn(*args)
        except BaseException as error:
            errors.append((time.monotonic(), number, error))
        finally:
            me.leave("it has ended")

    threads = [RankThread(one := ThreadRank(world, n), rank, f"rank {n}", one, n) for n in range(nproc)]
    for thread in threads:
        thread.start()
    end = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    if errors:
        raise min(errors, key=lambda error: error[0])[2]
    silent = [number for number, thread in enumerate(threads) if thread.is_alive()]
    if silent:
        finished = sorted(set(range(nproc)) - set(silent))
        raise LaunchError("IG254", timeout=timeout, silent=silent, finished=finished)
    return results
