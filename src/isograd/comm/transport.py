"""How the messages of one group travel. raw.py builds every collective on these few calls, which are the same for
gloo, for NCCL, for threads of one process (threads.py) and for ranks that are simulated (fake.py).

    exchange            lists of tensors to and from every other member, all at once
    send, receive       to and from one member
    reduce_scatter, all_gather, all_reduce      only of `Nccl`
    broadcast

Each adds what it has started to a handle (handle.py), message by message: an exception in between leaves none that
nobody knows of. Tensors are contiguous; empty ones are not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CLOSING = (1 << 30) - 1  # a tag with which nothing is sent
LOST_RANK = "with rank "  # a note on an error of gloo
Tensors = Sequence[Sequence[Tensor]]  # for each member of a group


class Transport:
    """What raw.py asks of every way to move messages; this one, of torch's gloo."""

    simulated = False  # whether the other members are not there

    def __init__(self, process_group: Any, ranks: tuple[int, ...], index: int) -> None:
        # Held by torch as long as its world is there: frames of an error may hold this.
        self._process_group = None if process_group is None else ref(process_group)
        self.ranks, self.index, self.closed = ranks, index, ""
        self.counts: Counter[tuple[bool, int, int]] = Counter()  # messages: whether sent, the other member, their tag

    @property
    def process_group(self) -> Any:
        """torch's; None when its world has ended."""
        return None if self._process_group is None else self._process_group()

    def shut(self, why: str) -> None:
        """Nothing is sent or received any more. The first reason stays."""
        self.closed = self.closed or why

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def exchange(self, handle: Any, out: Tensors, into: Tensors, tag: int, control: bool) -> None:
        """As raw.exchange."""
        # Receives are posted first so that nothing that arrives waits in a kernel buffer.
        for way, messages, start in ((-1, into, self.receive), (1, out, self.send)):
            for step in range(1, self.size):
                peer = (self.index + way * step) % self.size
                start(handle, messages[peer], peer, tag, control)

    def send(self, handle: Any, tensors: Sequence[Tensor], peer: int, tag: int, control: bool) -> None:
        """To member `peer`."""
        self._start(handle, self.process_group.send, tensors, peer, True, tag)

    def receive(self, handle: Any, tensors: Sequence[Tensor], peer: int, tag: int, control: bool) -> None:
        """From member `peer`."""
        self._start(handle, self.process_group.recv, tensors, peer, False, tag)

    def _start(
        self, handle: Any, start: Callable[..., Any], tensors: Sequence[Tensor], peer: int, sends: bool, tag: int
    ) -> None:
        for tensor in tensors:
            if tensor.numel():
                message = self.count(sends, tensor, peer, tag)
                try:
                    handle.add(start([tensor], peer, message[1]), peer, message)
                except RuntimeError as error:
                    error.add_note(f"{LOST_RANK}{self.ranks[peer]}")
                    raise

    def count(self, sends: bool, tensor: Tensor, peer: int, tag: int) -> tuple[bool, int, int, int]:
        """One message more: whether it is sent, its tag, the how many-th with that tag it is, its bytes. Without a tag
        its size becomes its tag: messages of unlike sizes never meet, which gloo ends with a signal."""
        size = tensor.numel() * tensor.element_size()
        tag = tag or 1 + size % (CLOSING - 1)
        self.counts[sends, peer, tag] += 1
        return sends, tag, self.counts[sends, peer, tag], size

    def gather_control(self, x: Tensor) -> list[Tensor] | None:
        """Every member's control value, where this takes no message; None where it takes an `exchange`."""
        return None

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite x with that of member `source`."""
        dist.broadcast(x, self.ranks[source], group=self.process_group)

    def close(self) -> None:
        """Close the connections, so that waits of other members end. Without this gloo keeps them as long as one of
        its messages lives, and a thread that waits or a frame of an exception may hold one. It closes all connections
        of a group when a receive is out of time."""
        with suppress(RuntimeError, AttributeError):  # the rank may leave at the same time: it has no group then
            message = self.process_group.recv([torch.zeros(1)], (self.index + 1) % self.size, CLOSING)
            message.wait(timedelta(milliseconds=1))


class Nccl(Transport):
    """NCCL's collectives run on the device, on a stream of their own: `wait` makes the current stream wait. It has
    reductions of its own, and orders messages by their launch alone."""

    def close(self) -> None:
        """Nothing: the whole process group is aborted."""

    def exchange(self, handle: Any, out: Tensors, into: Tensors, tag: int, control: bool) -> None:
        """All messages as one group call."""
        ops = []
        for peer in range(self.size):
            if peer != self.index:
                ops += self._ops(dist.isend, out[peer], peer) + self._ops(dist.irecv, into[peer], peer)
        self._batch(handle, ops)

    def send(self, handle: Any, tensors: Sequence[Tensor], peer: int, tag: int, control: bool) -> None:
        """In a batch, which uses the communicator of the group. Outside of a batch torch may make one for two ranks,
        and block until both have come to their first message."""
        self._batch(handle, self._ops(dist.isend, tensors, peer))

    def receive(self, handle: Any, tensors: Sequence[Tensor], peer: int, tag: int, control: bool) -> None:
        """In a batch, as `send`."""
        self._batch(handle, self._ops(dist.irecv, tensors, peer))

    def _ops(self, operation: Any, tensors: Sequence[Tensor], peer: int) -> list[Any]:
        return [dist.P2POp(operation, t, self.ranks[peer], self.process_group) for t in tensors if t.numel()]

    def _batch(self, handle: Any, ops: list[Any]) -> None:
        for work in dist.batch_isend_irecv(ops) if ops else ():
            handle.add(work)

    def reduce_scatter(self, handle: Any, mine: Tensor, flat: Tensor) -> None:
        """The sum of equal chunks of flat tensors: mine."""
        handle.add(_reduce_scatter(mine, flat, group=self.process_group, async_op=True))

    def all_gather(self, handle: Any, flat: Tensor, mine: Tensor) -> None:
        """Equal chunks of every member in one flat tensor."""
        handle.add(_all_gather(flat, mine, group=self.process_group, async_op=True))

    def all_reduce(self, x: Tensor) -> None:
        """In place, and waited for by the current stream."""
        dist.all_reduce(x, group=self.process_group)


def of_torch(process_group: Any, ranks: tuple[int, ...], index: int) -> Transport:
    """The transport of one of torch's process groups, by its backend."""
    kind = Nccl if "nccl" in dist.get_backend(process_group) else Transport
    return kind(process_group, ranks, index)


def is_of_torch(group: Any) -> bool:
    """Whether it is one of torch's process groups."""
    return isinstance(group, dist.ProcessGroup)


def memory_store() -> Any:
    """A store of names and values for ranks that are threads."""
    return dist.HashStore()  # type: ignore[attr-defined]
