"""An imagined NCCL between real processes: the bytes travel by gloo, the order and the streams are NCCL's.

A communicator is a queue with a stream of its own. A collective first makes that stream wait for the caller's current
stream, and `work.wait()` makes the caller's current stream wait for it, never the host. (A collective that is not
asynchronous runs on the current stream, as in ProcessGroupNCCL.) A thread per communicator exchanges what was enqueued,
in order; each exchange begins with what the ranks have called, and a difference is an error with a name. Results are
put into the outputs when somebody waits; until then these hold NaN.

A communicator is made at its first use, and that blocks the host until all its ranks have come. Messages between two
ranks outside a batch make one of two ranks, unless `init_process_group` was given a `device_id`. There are no tags.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import device

BACKEND = "imagined_nccl"
HEADER = 2048  # bytes in which a rank says what it calls


Call = tuple[str, tuple[int, ...], str, str]  # communicator, ranks, operation, place


class CommunicatorError(dist.DistBackendError):
    """Ranks called different things, one of them did not come, or the communicator was aborted."""


class _World:
    """What this process has done with communicators."""

    eager = False  # init_process_group was given a device_id
    longest = timedelta.max  # of any group's timeout
    communicators: list[Communicator] = []  # noqa: RUF012
    calls: list[Call] = []  # noqa: RUF012


class Job:
    """One entry of a communicator's queue."""

    def __init__(
        self, what: dict[str, Any], exchange: Callable[[Job], Any], deliver: Callable[[Any], None], site: str
    ) -> None:
        self.what, self.exchange, self.deliver, self.site = what, exchange, deliver, site
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.delivered = self.waited = False


class Communicator:
    """Some ranks, a stream and a queue."""

    def __init__(self, name: str, ranks: Sequence[int], index: int, store: Any, timeout: timedelta) -> None:
        """`ranks`: global. The host waits here until all of them have come."""
        self.name, self.ranks, self.index, self.timeout = name, tuple(ranks), index, timeout
        try:
            self.gloo = dist.ProcessGroupGloo(store, index, len(ranks), timeout=timeout)
        except RuntimeError as error:
            self.fail(f"not all of ranks {list(ranks)} came to make it within {timeout.total_seconds():g} s", error)
        self.stream: Any = None  # on the card of the first tensor
        self.jobs: list[Job] = []  # in order; the delivered ones are gone
        self.count, self.aborted, self._lock = 0, False, threading.Lock()
        self._queue: queue.Queue[Job] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()
        _World.communicators.append(self)

    def fail(self, why: str, cause: BaseException | None = None) -> Any:
        text = f"communicator {self.name!r} of ranks {list(self.ranks)}: {why}"
        device.lib.find("communicator", text)
        raise CommunicatorError(text) from cause

    def _work(self) -> None:
        broken: BaseException | None = None
        while True:
            job = self._queue.get()
            if broken is None:
                try:
                    job.result = job.exchange(job)
                except BaseException as error:
                    broken = error
            job.error = broken
            job.done.set()
            del job  # whose results are tensors of the program

    def enqueue(
        self, what: dict[str, Any], reads: Sequence[Tensor], writes: Sequence[Tensor],
        exchange: Callable[[list[Tensor]], Callable[[Job], Any]], deliver: Callable[[Any], None], asynchronous: bool,
    ) -> Work:  # fmt: skip
        """`exchange`: of copies of `reads`, a function for the thread. `deliver`: its result, into `writes`."""
        for t in (*reads, *writes):
            if not t.is_cuda:
                raise RuntimeError(f"No backend type associated with device type {t.device.type}")
            if not t.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if self.aborted:
            self.fail("it was aborted")
        self.count += "with" not in what  # of collectives: a rank without messages takes no part in a batch of them
        what = {"number": self.count, **what}
        site = device.lib.site()
        _World.calls.append((self.name, what.pop("with", self.ranks), what["op"], site))
        card = (*reads, *writes)[0].device
        self.stream = self.stream or torch.cuda.Stream(card)
        stream = torch.cuda.current_stream(card)
        if asynchronous:
            self.stream.wait_stream(stream)
            stream = self.stream
        copies = [device.lib.host_alias(t).clone() for t in reads]
        with torch.cuda.stream(stream):
            device.lib.launch(f"nccl:{what['op']}", list(reads), list(writes), stream.device_index)
        event = stream.record_event()
        for t in writes:
            _bytes(device.lib.host_alias(t)).fill_(255)
        job = Job(what, exchange(copies), deliver, site)
        self.jobs.append(job)
        self._queue.put(job)
        return Work(self, job, event, (reads, writes))

    def finish(self, job: Job) -> None:
        """The host's memory holds the results of all jobs up to this one. (A GPU's host would not wait here.)"""
        if not job.done.wait(self.timeout.total_seconds() + 5):  # the thread does them in order
            self.fail(f"{job.what} of {job.site} did not end")
        if isinstance(job.error, CommunicatorError):
            device.lib.find("communicator", str(job.error))
            raise job.error
        if job.error is not None:
            late = f"did not end within {self.timeout.total_seconds():g} s, or a rank has gone"
            self.fail(f"{job.what} of {job.site} {late}", job.error)
        with self._lock:
            while not job.delivered:
                first = self.jobs.pop(0)
                first.deliver(first.result)
                first.delivered = True

    def same(self, job: Job) -> None:
        """In the thread: all ranks have called the same."""
        text = json.dumps([job.what, job.site])
        gathered = [torch.zeros(HEADER, dtype=torch.uint8) for _ in self.ranks]
        self.gloo.allgather([gathered], [_encoded(text)]).wait()
        said = [_decoded(one) for one in gathered]
        for rank, other in zip(self.ranks, said, strict=True):
            if json.loads(other)[0] != job.what:
                both = sorted([(self.ranks[self.index], text), (rank, other)])
                calls = ", ".join(f"rank {who} calls {said}" for who, said in both)
                raise CommunicatorError(
                    f"communicator {self.name!r} of ranks {list(self.ranks)}: not the same order on all ranks: {calls}"
                )

    def gather(self, job: Job, mine: Tensor) -> list[Tensor]:
        """In the thread: every rank's tensor, after a check of what they call."""
        self.same(job)
        into = [torch.empty_like(mine) for _ in self.ranks]
        if mine.numel():
            self.gloo.allgather([[_bytes(t) for t in into]], [_bytes(mine)]).wait()
        return into

    def messages(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Tensor]:
        """In the thread: a group of messages to and from members by index. They match by order alone."""
        # gloo waits for a message of the expected size: the sizes travel first.
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in receives]
        works = [self.gloo.recv([size], peer, 0) for (peer, _), size in zip(receives, sizes, strict=True)]
        works += [self.gloo.send([torch.tensor([t.nbytes])], peer, 0) for peer, t in sends]
        for work in works:
            work.wait()
        for (peer, t), size in zip(receives, sizes, strict=True):
            if int(size) != t.nbytes:
                raise CommunicatorError(
                    f"communicator {self.name!r}: rank {self.ranks[self.index]} receives {t.nbytes} bytes, and rank "
                    f"{self.ranks[peer]} sends {int(size)}"
                )
        arrived = [torch.empty_like(t) for _, t in receives]
        works = [self.gloo.recv([_bytes(t)], peer, 1) for (peer, _), t in zip(receives, arrived, strict=True)]
        works += [self.gloo.send([_bytes(t)], peer, 1) for peer, t in sends]
        for work in works:
            work.wait()
        return arrived

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
        self._communicator.finish(self._job)
        self._job.waited = True
        torch.cuda.current_stream(self._communicator.stream.device).wait_event(self._event)
        self._keep = None
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        if not (self._event.query() and self._job.done.is_set()):
            return False
        self._communicator.finish(self._job)
        self._job.waited = True
        return True

    def is_success(self) -> bool:
        return self._job.done.is_set() and self._job.error is None

    def exception(self) -> BaseException | None:
        return self._job.error

    def get_future(self) -> Any:
        """Whose `wait` makes the caller's stream wait. (DDP's reducer asks for it at once, and waits at the end.)"""
        self._communicator.finish(self._job)
        self._job.waited = True
        future: Any = torch.futures.Future(devices=[self._communicator.stream.device])
        with torch.cuda.stream(self._communicator.stream):
            future.set_result(list(self._keep[1]))
        return future


class Group(dist.ProcessGroup):
    """A process group on imagined NCCL."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._store, self._label = options.store, options.group_id
        self._timeout = min(options.timeout, _World.longest)
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._made: dict[str, Communicator] = {}
        self._batch: list[tuple[bool, Tensor, int]] | None = None
        if _World.eager:
            self._whole()

    _device_types = property(lambda self: [torch.device("cuda")])
    group_name = property(lambda self: self._label)

    def getBackendName(self) -> str:
        return BACKEND

    supports_splitting = True  # with a device_id, torch asks the backend to connect at once

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._whole()

    def _communicator(self, members: list[int]) -> Communicator:
        key = "-".join(map(str, members))
        if key not in self._made:
            ranks, name = [self._ranks[m] for m in members], self._label
            if len(members) < self.size():
                name += f" {ranks[0]}-{ranks[1]}"
            store = dist.PrefixStore(f"nccl/{key}", self._store)
            self._made[key] = Communicator(name, ranks, members.index(self.rank()), store, self._timeout)
        return self._made[key]

    def _whole(self) -> Communicator:
        return self._communicator(list(range(self.size())))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _collective(
        self, op: str, mine: Tensor, outs: Sequence[Tensor], finish: Callable[[list[Tensor]], list[Tensor]],
        options: Any = None, **what: Any,
    ) -> Work:  # fmt: skip
        """Everybody's tensors are gathered, and `finish` makes of them what this rank's `outs` hold."""
        communicator = self._whole()
        what = {"op": op, "elements": mine.numel(), "dtype": str(mine.dtype)[6:], **what}

        def deliver(result: list[Tensor]) -> None:
            for out, value in zip(outs, finish(result), strict=True):
                device.lib.host_alias(out).copy_(value.view(out.shape))

        exchange = lambda copies: lambda job: communicator.gather(job, copies[0])  # noqa: E731
        asynchronous = getattr(options, "asyncOp", True)
        return communicator.enqueue(what, [mine], outs, exchange, deliver, asynchronous)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op = _reduction(opts)
        (x,) = tensors
        return self._collective("all_reduce", x, [x], lambda all_: [_reduced(all_, op)], opts, by=op)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        op, here = _reduction(opts), opts.rootRank == self.rank()
        (x,) = tensors
        outs = [x] if here else []
        finish = lambda all_: [_reduced(all_, op)] if here else []  # noqa: E731
        return self._collective("reduce", x, outs, finish, opts, by=op, root=opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank
        (x,) = tensors
        return self._collective("broadcast", x, [x], lambda all_: [all_[root]], opts, root=root)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self._collective("all_gather", x, [out], lambda all_: [torch.cat([t.view(-1) for t in all_])], opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        op, size = _reduction(opts), self.size()
        mine = lambda all_: _reduced([t.view(size, -1)[self.rank()] for t in all_], op)  # noqa: E731
        return self._collective("reduce_scatter", x, [out], lambda all_: [mine(all_)], opts, by=op)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Work:
        return self._collective("all_gather", tensors[0], outs[0], lambda all_: all_, opts)

    def all_to_all_single(self, out: Tensor, x: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Work:
        outs = out.split(list(out_sizes) or out.shape[0] // self.size())
        return self.alltoall(list(outs), list(x.split(list(in_sizes) or x.shape[0] // self.size())), opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Work:
        everyone = range(self.size())
        return self._messages(
            "all_to_all", list(zip(everyone, ins, strict=True)), list(zip(everyone, outs, strict=True)),
            self._whole(), getattr(opts, "asyncOp", True),
        )  # fmt: skip

    def barrier(self, opts: Any = None) -> Work:
        x = torch.zeros(1, device="cuda")
        work = self._collective("barrier", x, [], lambda _: [], opts)
        work.wait()
        torch.cuda.current_stream().synchronize()
        return work

    # -- messages ------------------------------------------------------------------------------------------------------

    def _messages(
        self, op: str, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], communicator: Communicator,
        asynchronous: bool = True,
    ) -> Work:  # fmt: skip
        """Members are this group's; the communicator has all of them or two."""
        index = {member: communicator.ranks.index(self._ranks[member]) for member, _ in (*sends, *receives)}
        me = communicator.index
        peers = sorted({self._ranks[m] for m, _ in (*sends, *receives)} | {self._ranks[self.rank()]})

        def exchange(copies: list[Tensor]) -> Callable[[Job], list[Tensor]]:
            out = [(index[m], t) for (m, _), t in zip(sends, copies, strict=True)]
            into = [(index[m], torch.empty_like(t, device="cpu")) for m, t in receives]
            own = [t for peer, t in out if peer == me]

            def run(job: Job) -> list[Tensor]:
                others = [pair for pair in into if pair[0] != me]
                came = iter(communicator.messages([pair for pair in out if pair[0] != me], others))
                mine = iter(own)
                return [next(mine) if peer == me else next(came) for peer, _ in into]

            return run

        def deliver(result: list[Tensor]) -> None:
            for (_, out), value in zip(receives, result, strict=True):
                device.lib.host_alias(out).copy_(value)

        what = {"op": op, "with": tuple(peers)}
        reads, writes = [t for _, t in sends], [t for _, t in receives]
        return communicator.enqueue(what, reads, writes, exchange, deliver, asynchronous)

    def _message(self, sending: bool, tensor: Tensor, peer: int) -> Work | None:
        if self._batch is not None:
            self._batch.append((sending, tensor, peer))
            return None
        if _World.eager:
            communicator = self._whole()
        else:
            device.lib.find(
                "unbatched pair",
                f"{'send' if sending else 'recv'} outside batch_isend_irecv and without device_id: a communicator of "
                "two ranks, which blocks the host until both have come",
            )
            communicator = self._communicator(sorted({self.rank(), peer}))
        pair = [(peer, tensor)]
        if sending:
            return self._messages(f"send to {self._ranks[peer]}", pair, [], communicator)
        return self._messages(f"recv from {self._ranks[peer]}", [], pair, communicator)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work | None:
        return self._message(True, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work | None:
        return self._message(False, tensors[0], peer)

    def _start_coalescing(self, _: Any) -> None:
        self._batch = []

    def _end_coalescing(self, _: Any) -> Work:
        batch, self._batch = self._batch or [], None
        sends = [(peer, t) for sending, t, peer in batch if sending]
        return self._messages("batch", sends, [(peer, t) for sending, t, peer in batch if not sending], self._whole())

    # -- the end -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        for communicator in self._made.values():
            communicator.abort()

    def shutdown(self) -> None:
        finish_all()


def _reduction(options: Any) -> str:
    op = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        if op == getattr(dist.ReduceOp, name):
            return name
    raise NotImplementedError(f"imagined NCCL has no {op}")


def _reduced(all_: list[Tensor], op: str) -> Tensor:
    wide = torch.stack([t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in all_])
    rounding = None if wide.is_floating_point() else "trunc"  # NCCL's average of integers
    average = lambda: wide.sum(0).div(len(all_), rounding_mode=rounding)  # noqa: E731
    of = {"SUM": lambda: wide.sum(0), "AVG": average, "PRODUCT": lambda: wide.prod(0)}
    value = {**of, "MAX": lambda: wide.amax(0), "MIN": lambda: wide.amin(0)}[op]()
    return value.to(all_[0].dtype)


def finish_all() -> None:
    """As after torch.cuda.synchronize: all that was enqueued has its results."""
    for communicator in _World.communicators:
        if communicator.jobs and not communicator.aborted:
            communicator.finish(communicator.jobs[-1])


def at_the_end(failed: bool) -> tuple[list[Call], list[tuple[str, str, str, str, int]]]:
    """Let the other ranks end what they do with this one. This rank's calls in order; findings of works left alone."""
    found = []
    for communicator in _World.communicators:
        for job in list(communicator.jobs):
            job.done.wait(0.5 if failed else communicator.timeout.total_seconds())
            if not failed and not job.waited:
                text = f"{job.what['op']} of communicator {communicator.name!r}"
                found.append(("never waited for", text, job.site, job.site, 1))
    return _World.calls, found


def at_most(seconds: float) -> None:
    """Let no group wait longer, whatever its program says."""
    _World.longest = timedelta(seconds=seconds)


def install() -> None:
    """Make 'nccl' mean the imagined one, in torch.distributed's own functions."""
    dist.Backend.register_backend(BACKEND, lambda options, _: Group(options), extended_api=True, devices=["cuda"])
    torch.cuda.before_synchronize.append(finish_all)  # type: ignore[attr-defined]
    if not hasattr(c10d, "ProcessGroupNCCL"):  # which torch asks for when it aborts
        c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})
    init, new_group, batch = dist.init_process_group, dist.new_group, dist.batch_isend_irecv

    def imagined(backend: Any) -> Any:
        return BACKEND if backend is None or "nccl" in str(backend) else backend

    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        _World.eager = device_id is not None
        init(imagined(backend), *args, **options)

    def of_ranks(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, timeout, backend and imagined(backend), **options)

    def batch_isend_irecv(ops: list[Any]) -> list[Any]:
        group = ops[0].group or dist.group.WORLD
        if not isinstance(group, Group):
            return batch(ops)
        group._start_coalescing(None)
        for op in ops:
            group._message(op.op is dist.isend, op.tensor, op.group_peer)
        return [group._end_coalescing(None)]

    for home in (dist, c10d):
        home.init_process_group, home.new_group = init_process_group, of_ranks
        home.batch_isend_irecv, home.is_nccl_available = batch_isend_irecv, lambda: True
