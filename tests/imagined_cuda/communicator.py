"""An imagined NCCL's communicators: a queue with a stream of its own, whose bytes travel by gloo.

An entry first makes that stream wait for the caller's current stream, and `work.wait()` makes the caller's current
stream wait for it, never the host. (A collective that is not asynchronous runs on the current stream, as in
ProcessGroupNCCL.) A thread per communicator exchanges what was enqueued, in order. Whoever sends a row first says what
it calls; a difference from what the receiver calls is an error with a name. Results are put into the outputs when
somebody waits; until then these hold NaN.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import device

HEADER = 2048  # bytes in which a rank says what it calls
Call = tuple[str, tuple[int, ...], str, str]  # communicator, ranks, operation, place
What = dict[str, Any]  # operation, elements, dtype, root


class CommunicatorError(dist.DistBackendError):
    """Ranks called different things, one of them did not come, or the communicator was aborted."""


class World:
    """What this process has done with communicators."""

    longest = timedelta.max  # of any group's timeout
    communicators: list[Communicator] = []  # noqa: RUF012
    calls: list[Call] = []  # noqa: RUF012


class Communicator:
    """Some ranks, a stream and a queue."""

    def __init__(
        self, name: str, ranks: Sequence[int], index: int, store: Any, timeout: timedelta, card: torch.device
    ) -> None:
        """`ranks`: global. The host waits here until all of them have come, each with a card of its own."""
        self.name, self.ranks, self.index, self.timeout = name, tuple(ranks), index, timeout
        made = json.dumps([list(ranks), device.lib.site()])
        first = store.compare_set("made", "", made).decode()  # in NCCL they would read each other's id
        if json.loads(first)[0] != list(ranks):
            self.fail(f"made in another order: this rank makes {made}, the first to come made {first}")
        store.set(f"card {index}", device.card_name(card))
        keys = [f"card {number}" for number in range(len(ranks))]
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            self.fail(f"not all of ranks {list(ranks)} came to make it within {timeout.total_seconds():g} s", error)
        cards = [store.get(key).decode() for key in keys]
        for number, one in enumerate(cards):
            if one in cards[:number]:
                both = f"rank {ranks[cards.index(one)]} and rank {ranks[number]} both on CUDA device {one}"
                self.fail(f"Duplicate GPU detected: {both}")
        self.gloo = dist.ProcessGroupGloo(store, index, len(ranks), timeout=timeout)
        self.stream = torch.cuda.Stream(card)
        self.works: list[Work] = []  # in order; the delivered ones are gone
        self.aborted, self._lock = False, threading.Lock()
        self._thread, self._broken = futures.ThreadPoolExecutor(1), list[BaseException]()
        World.communicators.append(self)

    def fail(self, why: str, cause: BaseException | None = None) -> Any:
        text = f"communicator {self.name!r} of ranks {list(self.ranks)}: {why}"
        device.lib.find("communicator", text)
        raise CommunicatorError(text) from cause

    def enqueue(self, work: Work, asynchronous: bool) -> Work:
        for t in (*work.reads, *work.writes):
            if not t.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {t.device.type}")
            if not t.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if self.aborted:
            self.fail("it was aborted")
        work.communicator, work.site = self, device.lib.site()
        World.calls.append((self.name, work.ranks, work.op, work.site))
        stream = torch.cuda.current_stream(self.stream.device)
        if asynchronous:
            self.stream.wait_stream(stream)
            stream = self.stream
        with torch.cuda.stream(stream):
            device.lib.launch(f"nccl:{work.op}", work.reads, work.writes)
        work.event = stream.record_event()
        for t in work.writes:
            _bytes(device.lib.host_alias(t)).fill_(255)
        self.works.append(work)
        work.exchange = self._thread.submit(self._exchange, work)
        return work

    def finish(self, work: Work) -> None:
        """The host's memory holds the results of all works up to this one. (A GPU's host would not wait here.)"""
        try:
            work.exchange.result(self.timeout.total_seconds() + 5)  # the thread does them in order
        except CommunicatorError as error:
            device.lib.find("communicator", str(error))
            raise
        except Exception as error:
            late = f"did not end within {self.timeout.total_seconds():g} s, or a rank has gone"
            self.fail(f"{work.op} of {work.site} {late}", error)
        with self._lock:
            while not work.delivered:
                first = self.works.pop(0)
                for out, value in zip(first.writes, first.results(first.exchange.result()), strict=True):
                    device.lib.host_alias(out).copy_(value.view(out.shape))
                first.delivered = True

    def _exchange(self, work: Work) -> list[Tensor]:
        """In the thread. After an error nothing is exchanged any more."""
        try:
            for error in self._broken:
                raise error
            return self._exchange_next(work)
        except BaseException as error:
            self._broken = [error]
            raise

    @torch.inference_mode()  # else tensors that were made in it take nothing
    def _exchange_next(self, work: Work) -> list[Tensor]:
        """First what ranks call, with the size of the row that comes, then the rows. They match by order alone."""
        sends = [one for one in work.sends if one[0] != self.index]
        headers = [torch.empty(HEADER, dtype=torch.uint8) for _ in work.receives]
        texts = [(member, _encoded([what, work.site, row.numel()])) for member, what, row in sends]
        self._move(texts, [(member, text) for (member, _), text in zip(work.receives, headers, strict=True)])
        own, rows = iter([row for member, _, row in work.sends if member == self.index]), list[Tensor]()
        for (member, what), text in zip(work.receives, headers, strict=True):
            if member == self.index:
                rows.append(next(own))
                continue
            theirs, site, elements = json.loads(bytes(text.tolist()))
            if theirs != what:
                calls = sorted([(self.ranks[member], theirs, site), (self.ranks[self.index], what, work.site)])
                both = ", ".join(f"rank {rank} calls {json.dumps([call, place])}" for rank, call, place in calls)
                ranks = f"communicator {self.name!r} of ranks {list(self.ranks)}"
                raise CommunicatorError(f"{ranks}: not the same order on all ranks: {both}")
            rows.append(torch.empty(elements, dtype=getattr(torch, what["dtype"])))
        receives = [(member, row) for (member, _), row in zip(work.receives, rows, strict=True)]
        self._move([(member, row) for member, _, row in sends], receives)
        return rows

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        works = [self.gloo.recv([_bytes(t)], one, 0) for one, t in receives if one != self.index and t.numel()]
        works += [self.gloo.send([_bytes(t)], one, 0) for one, t in sends if t.numel()]
        for work in works:
            work.wait()

    def abort(self) -> None:
        """End what is enqueued, here and on the other ranks."""
        self.aborted = True
        self.gloo.abort()


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)


def _encoded(said: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(said).encode().ljust(HEADER)), dtype=torch.uint8)


@dataclass(eq=False)
class Work(dist._Work):
    """An entry of a queue, as ProcessGroupNCCL's Work. `ranks`: who takes part, global. `sends` and `receives`: rows to
    and from members by index, in the host's memory, and what both ends call; `results` of the rows are `writes`."""

    op: str
    ranks: tuple[int, ...]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    sends: Sequence[tuple[int, What, Tensor]]
    receives: Sequence[tuple[int, What]]
    results: Callable[[list[Tensor]], Sequence[Tensor]]
    communicator: Any = None
    site: str = ""
    event: Any = None
    exchange: Any = None  # a future
    delivered: bool = False
    waited: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        torch.cuda.current_stream(self.communicator.stream.device).wait_event(self.event)
        self.reads = ()
        return True

    synchronize = wait

    def _finish(self) -> None:
        self.communicator.finish(self)
        self.waited = True

    def is_completed(self) -> bool:
        if not (self.event.query() and self.exchange.done()):
            return False
        self._finish()
        return True

    def get_future(self) -> Any:
        """Whose `wait` makes the caller's stream wait. (DDP's reducer asks for it at once, and waits at the end.)"""
        self._finish()
        future: Any = torch.futures.Future(devices=[self.communicator.stream.device])
        with torch.cuda.stream(self.communicator.stream):
            future.set_result(list(self.writes))
        return future


def finish_all() -> None:
    """As after torch.cuda.synchronize: all that was enqueued has its results."""
    for communicator in World.communicators:
        if communicator.works and not communicator.aborted:
            communicator.finish(communicator.works[-1])


def at_the_end(failed: bool) -> tuple[list[Call], list[tuple[str, str, str, str, int]]]:
    """Let the other ranks end what they do with this one. This rank's calls in order; findings of works left alone."""
    found = []
    for communicator in World.communicators:
        for work in list(communicator.works):
            futures.wait([work.exchange], 0.5 if failed else communicator.timeout.total_seconds())
            if not failed and not work.waited:
                text = f"{work.op} of communicator {communicator.name!r}"
                found.append(("never waited for", text, work.site, work.site, 1))
    return World.calls, found
