"""An imagined NCCL's communicators: a queue with a stream of its own, whose bytes travel by gloo.

An entry first makes that stream wait for the caller's current stream, and `work.wait()` makes the caller's current
stream wait for it, never the host. (A collective that is not asynchronous runs on the current stream, as in
ProcessGroupNCCL.) A thread per communicator exchanges what was enqueued, in order; each exchange begins with what the
ranks have called, and a difference is an error with a name. Results are put into the outputs when somebody waits; until
then these hold NaN.
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


class CommunicatorError(dist.DistBackendError):
    """Ranks called different things, one of them did not come, or the communicator was aborted."""


class World:
    """What this process has done with communicators."""

    card: torch.device | None = None  # the device_id that init_process_group was given
    longest = timedelta.max  # of any group's timeout
    communicators: list[Communicator] = []  # noqa: RUF012
    calls: list[Call] = []  # noqa: RUF012


Messages = list[tuple[int, Tensor]]  # to or from members by index, in the host's memory


@dataclass(eq=False)
class Job:
    """One entry of a communicator's queue. `results`: what has been received, for `writes`."""

    what: dict[str, Any]
    site: str
    sends: Messages
    receives: Messages
    writes: Sequence[Tensor]
    results: Callable[[], Sequence[Tensor]]
    is_collective: bool
    exchange: Any = None  # a future
    delivered: bool = False
    waited: bool = False


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
        try:
            self.gloo = dist.ProcessGroupGloo(store, index, len(ranks), timeout=timeout)
        except RuntimeError as error:
            self.fail(f"not all of ranks {list(ranks)} came to make it within {timeout.total_seconds():g} s", error)
        cards = self.said(device.card_name(card))
        for number, name_ in enumerate(cards):
            if name_ in cards[:number]:
                both = f"rank {ranks[cards.index(name_)]} and rank {ranks[number]} both on CUDA device {name_}"
                self.fail(f"Duplicate GPU detected: {both}")
        self.stream = torch.cuda.Stream(card)
        self.jobs: list[Job] = []  # in order; the delivered ones are gone
        self.count, self.aborted, self._lock = 0, False, threading.Lock()
        self._thread, self._broken = futures.ThreadPoolExecutor(1), list[BaseException]()
        World.communicators.append(self)

    def fail(self, why: str, cause: BaseException | None = None) -> Any:
        text = f"communicator {self.name!r} of ranks {list(self.ranks)}: {why}"
        device.lib.find("communicator", text)
        raise CommunicatorError(text) from cause

    def enqueue(
        self, what: dict[str, Any], reads: Sequence[Tensor], writes: Sequence[Tensor], sends: Messages,
        receives: Messages, results: Callable[[], Sequence[Tensor]], asynchronous: bool,
    ) -> Work:  # fmt: skip
        """`what`, of a collective: what all ranks have to call; of messages "with" whom. `sends`: copies of `reads`."""
        for t in (*reads, *writes):
            if not t.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {t.device.type}")
            if not t.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if self.aborted:
            self.fail("it was aborted")
        is_collective = "with" not in what  # a rank without messages takes no part in a batch of them
        self.count += is_collective
        what = {"number": self.count, **what}
        site = device.lib.site()
        World.calls.append((self.name, what.pop("with", self.ranks), what["op"], site))
        stream = torch.cuda.current_stream(self.stream.device)
        if asynchronous:
            self.stream.wait_stream(stream)
            stream = self.stream
        with torch.cuda.stream(stream):
            device.lib.launch(f"nccl:{what['op']}", list(reads), list(writes), stream.device_index)
        event = stream.record_event()
        for t in writes:
            _bytes(device.lib.host_alias(t)).fill_(255)
        job = Job(what, site, sends, receives, writes, results, is_collective)
        self.jobs.append(job)
        job.exchange = self._thread.submit(self._exchange, job)
        return Work(self, job, event, reads)

    def finish(self, job: Job) -> None:
        """The host's memory holds the results of all jobs up to this one. (A GPU's host would not wait here.)"""
        try:
            job.exchange.result(self.timeout.total_seconds() + 5)  # the thread does them in order
        except CommunicatorError as error:
            device.lib.find("communicator", str(error))
            raise
        except TimeoutError:
            self.fail(f"{job.what} of {job.site} did not end")
        except Exception as error:
            late = f"did not end within {self.timeout.total_seconds():g} s, or a rank has gone"
            self.fail(f"{job.what} of {job.site} {late}", error)
        with self._lock:
            while not job.delivered:
                first = self.jobs.pop(0)
                for out, value in zip(first.writes, first.results(), strict=True):
                    device.lib.host_alias(out).copy_(value.view(out.shape))
                first.delivered = True

    def said(self, text: str) -> list[str]:
        """What each rank says."""
        gathered = [torch.zeros(HEADER, dtype=torch.uint8) for _ in self.ranks]
        self.gloo.allgather([gathered], [_encoded(text)]).wait()
        return [_decoded(one) for one in gathered]

    def _exchange(self, job: Job) -> None:
        """In the thread. After an error nothing is exchanged any more."""
        try:
            for error in self._broken:
                raise error
            self._exchange_next(job)
        except BaseException as error:
            self._broken = [error]
            raise

    @torch.inference_mode()  # else tensors that were made in it take nothing
    def _exchange_next(self, job: Job) -> None:
        """First what ranks call or send, then the bytes. They match by order alone."""
        sends, receives = ([(m, t) for m, t in each if m != self.index] for each in (job.sends, job.receives))
        own = iter([t for member, t in job.sends if member == self.index])
        for t in (t for member, t in job.receives if member == self.index):
            t.copy_(next(own))
        if job.is_collective:
            self._same(job)
        else:  # gloo waits for a message of the expected size
            texts = [(peer, torch.zeros(HEADER, dtype=torch.uint8)) for peer, _ in receives]
            self._move([(peer, _encoded(f"{t.numel()} x {t.dtype} of {job.site}")) for peer, t in sends], texts, 0)
            for (peer, t), (_, text) in zip(receives, texts, strict=True):
                if not (sent := _decoded(text)).startswith(mine := f"{t.numel()} x {t.dtype} of "):
                    raise CommunicatorError(
                        f"communicator {self.name!r}: rank {self.ranks[self.index]} receives {mine}{job.site}, "
                        f"rank {self.ranks[peer]} sends {sent}"
                    )
        self._move(sends, receives, 1)

    def _move(self, sends: Messages, receives: Messages, tag: int) -> None:
        works = [self.gloo.recv([_bytes(t)], peer, tag) for peer, t in receives if t.numel()]
        works += [self.gloo.send([_bytes(t)], peer, tag) for peer, t in sends if t.numel()]
        for work in works:
            work.wait()

    def _same(self, job: Job) -> None:
        text = json.dumps([job.what, job.site])
        for rank, other in zip(self.ranks, self.said(text), strict=True):
            if json.loads(other)[0] != job.what:
                both = sorted([(self.ranks[self.index], text), (rank, other)])
                calls = ", ".join(f"rank {who} calls {said}" for who, said in both)
                raise CommunicatorError(
                    f"communicator {self.name!r} of ranks {list(self.ranks)}: not the same order on all ranks: {calls}"
                )

    def abort(self) -> None:
        """End what is enqueued, here and on the other ranks."""
        self.aborted = True
        self.gloo.abort()


def _bytes(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)


def _encoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(HEADER)), dtype=torch.uint8)


def _decoded(header: Tensor) -> str:
    return bytes(header.tolist()).decode().strip()


class Work(dist._Work):
    """An entry of a queue, as ProcessGroupNCCL's Work."""

    def __init__(self, communicator: Communicator, job: Job, event: Any, keep: Any) -> None:
        super().__init__()
        self._communicator, self._job, self._event, self._keep = communicator, job, event, keep

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        torch.cuda.current_stream(self._communicator.stream.device).wait_event(self._event)
        self._keep = None
        return True

    synchronize = wait

    def _finish(self) -> None:
        self._communicator.finish(self._job)
        self._job.waited = True

    def is_completed(self) -> bool:
        if not (self._event.query() and self._job.exchange.done()):
            return False
        self._finish()
        return True

    def get_future(self) -> Any:
        """Whose `wait` makes the caller's stream wait. (DDP's reducer asks for it at once, and waits at the end.)"""
        self._finish()
        future: Any = torch.futures.Future(devices=[self._communicator.stream.device])
        with torch.cuda.stream(self._communicator.stream):
            future.set_result(list(self._job.writes))
        return future


def finish_all() -> None:
    """As after torch.cuda.synchronize: all that was enqueued has its results."""
    for communicator in World.communicators:
        if communicator.jobs and not communicator.aborted:
            communicator.finish(communicator.jobs[-1])


def at_the_end(failed: bool) -> tuple[list[Call], list[tuple[str, str, str, str, int]]]:
    """Let the other ranks end what they do with this one. This rank's calls in order; findings of works left alone."""
    found = []
    for communicator in World.communicators:
        for job in list(communicator.jobs):
            futures.wait([job.exchange], 0.5 if failed else communicator.timeout.total_seconds())
            if not failed and not job.waited:
                text = f"{job.what['op']} of communicator {communicator.name!r}"
                found.append(("never waited for", text, job.site, job.site, 1))
    return World.calls, found
