"""An imagined NCCL between real processes: process groups of torch on imagined communicators (communicator.py).

A communicator is made at its first use, and that blocks the host until all its ranks have come. Messages between two
ranks outside a batch make one of two ranks, unless the group was given a `device_id`. There are no tags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import device
from .communicator import Communicator, Work, World, finish_all

Message = tuple[bool, Tensor, int]  # whether it is sent; to or from which member


class Group(dist.ProcessGroup):
    """What torch.distributed makes for "nccl", in the place of ProcessGroupNCCL."""

    Options = SimpleNamespace
    supports_splitting = True  # with a device_id, torch asks the backend to connect at once
    _set_sequence_number_for_group = perform_nocolor_split = _group_start = _group_end = lambda *_: None
    _device_types = property(lambda self: [torch.device("cuda")])
    group_name = property(lambda self: self._label)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._store, self._label = store, options.group_name
        self._timeout = min(options._timeout, World.longest)
        self._ranks = list(options.global_ranks_in_group) or list(range(size))
        self._made: dict[tuple[int, ...], Communicator] = {}

    def getBackendName(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.bound_device_id = device
        self._whole(device)

    def _communicator(self, members: Sequence[int], card: torch.device) -> Communicator:
        key = tuple(members)
        if key not in self._made:
            ranks, name = [self._ranks[m] for m in key], self._label
            if len(key) < self.size():
                name += f" {ranks[0]}-{ranks[1]}"
            store = dist.PrefixStore(f"nccl/{key}", self._store)
            self._made[key] = Communicator(name, ranks, key.index(self.rank()), store, self._timeout, card)
        return self._made[key]

    def _whole(self, card: torch.device) -> Communicator:
        return self._communicator(range(self.size()), card)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _collective(
        self, op: str, mine: Sequence[Tensor], outs: Sequence[Tensor],
        results: Callable[[list[Tensor]], Sequence[Tensor]], options: Any = None, elements: Any = None, **what: Any,
    ) -> Work:  # fmt: skip
        """`mine` is this rank's row. The rows of all ranks are gathered, and of them `results` are what `outs` hold.
        `elements`: what all ranks have to say that they are."""
        one, members = (*mine, *outs)[0], range(self.size())
        row = torch.cat([torch.empty(0, dtype=one.dtype), *(device.lib.host_alias(t).reshape(-1) for t in mine)])
        elements = row.numel() if elements is None else elements
        what = {"op": op, "elements": elements, "dtype": str(one.dtype)[6:], **what}
        sends, receives = [(member, what, row) for member in members], [(member, what) for member in members]
        work = Work(op, tuple(self._ranks), mine, outs, sends, receives, results)
        return self._whole(one.device).enqueue(work, getattr(options, "asyncOp", True))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        op, sizes = _reduction(opts), [t.numel() for t in tensors]
        sums = lambda rows: _reduced(rows, op).split(sizes)  # noqa: E731
        return self._collective("all_reduce", tensors, tensors, sums, opts, by=op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        root = opts.rootRank
        return self._collective("broadcast", tensors, tensors, lambda rows: [rows[root]], opts, root=root)

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        (into,) = outs or [[]]
        _fit("gather", into, tensors * len(into))
        return self._collective("gather", tensors, into, lambda rows: rows if into else [], opts, root=opts.rootRank)

    def scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Work:
        (mine,) = tensors or [[]]
        _fit("scatter", mine, outs * len(mine))
        part = lambda rows: [rows[opts.rootRank].view(self.size(), -1)[self.rank()]]  # noqa: E731
        return self._collective("scatter", mine, outs, part, opts, outs[0].numel(), root=opts.rootRank)

    def allgather(self, outs: Sequence[Sequence[Tensor]], tensors: list[Tensor], opts: Any = None) -> Work:
        """Of uneven sizes: a broadcast from each rank, and so every rank has to know all sizes."""
        (into,) = outs
        _fit("all_gather", [into[self.rank()]], tensors)
        return self._collective("all_gather", tensors, into, lambda rows: rows, opts, _sizes(into))

    def all_gather_single_coalesced(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Work:
        return self.allgather([out.view(-1).tensor_split(self.size()) for out in outs], ins, opts)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([out], [x], opts)

    def reduce_scatter(self, outs: list[Tensor], tensors: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        """Of uneven sizes: a reduction to each rank."""
        op, (pieces,) = _reduction(opts), tensors
        _fit("reduce_scatter", outs, [pieces[self.rank()]])
        sizes = [t.numel() for t in pieces]
        sum_ = lambda rows: [_reduced([row.split(sizes)[self.rank()] for row in rows], op)]  # noqa: E731
        return self._collective("reduce_scatter", pieces, outs, sum_, opts, _sizes(pieces), by=op)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Work:
        return self.reduce_scatter(outs, [x.view(-1).tensor_split(self.size()) for x in ins], opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def barrier(self, opts: Any = None) -> Work:
        x = torch.zeros(1, device="cuda")
        work = self._collective("barrier", [x], [], lambda _: [], opts)
        work.wait()
        torch.cuda.current_stream().synchronize()
        return work

    # -- messages ------------------------------------------------------------------------------------------------------

    def _messages(self, op: str, messages: list[Message], communicator: Communicator) -> Work:
        """The communicator has all of this group's members or two."""
        what = lambda t: {"op": "message", "elements": t.numel(), "dtype": str(t.dtype)[6:]}  # noqa: E731
        sends, receives = (
            [(communicator.ranks.index(self._ranks[member]), t) for sending, t, member in messages if sending is which]
            for which in (True, False)
        )
        work = Work(
            op,
            ranks=tuple(sorted({self._ranks[member] for _, _, member in messages} | {self._ranks[self.rank()]})),
            reads=[t for _, t in sends],
            writes=[t for _, t in receives],
            sends=[(index, what(t), device.lib.host_alias(t).clone()) for index, t in sends],
            receives=[(index, what(t)) for index, t in receives],
            results=lambda rows: rows,
        )
        return communicator.enqueue(work, asynchronous=True)

    def batch(self, messages: list[Message]) -> Work:
        return self._messages("batch", messages, self._whole(messages[0][1].device))

    def _alone(self, sending: bool, tensor: Tensor, peer: int) -> Work:
        what = "send to" if sending else "recv from"
        if self.bound_device_id is not None:
            communicator = self._whole(tensor.device)
        else:
            why = "a communicator of two ranks, which blocks the host until both have come"
            device.lib.find("unbatched pair", f"{what[:4]} outside batch_isend_irecv and without device_id: {why}")
            communicator = self._communicator(sorted((self.rank(), peer)), tensor.device)
        return self._messages(f"{what} {self._ranks[peer]}", [(sending, tensor, peer)], communicator)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._alone(True, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._alone(False, tensors[0], peer)

    def abort(self) -> None:
        for communicator in self._made.values():
            communicator.abort()


def _fit(op: str, some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(some, others, strict=True)):
        if one.numel() != other.numel():
            sizes = f"expected {tuple(other.shape)}, got {tuple(one.shape)}"
            raise ValueError(f"ProcessGroupNCCL::{op}: invalid tensor size at index {index} ({sizes})")


def _sizes(of_ranks: Sequence[Tensor]) -> Any:
    sizes = [t.numel() for t in of_ranks]
    return sizes[0] if len(set(sizes)) == 1 else sizes


REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: rows.sum(0).div(len(rows), rounding_mode=None if rows.is_floating_point() else "trunc"),
    "MAX": lambda rows: rows.amax(0),
    "MIN": lambda rows: rows.amin(0),
    "PRODUCT": lambda rows: rows.prod(0),
}


def _reduction(options: Any) -> str:
    op = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    for name in REDUCE:
        if op == getattr(dist.ReduceOp, name):
            return name
    raise NotImplementedError(f"imagined NCCL has no {op}")


def _reduced(rows: Sequence[Tensor], op: str) -> Tensor:
    half = rows[0].dtype in (torch.bfloat16, torch.float16)
    return REDUCE[op](torch.stack([row.float() if half else row for row in rows])).to(rows[0].dtype)


def install() -> None:
    """Make 'nccl' mean the imagined one, for torch.distributed's own functions."""
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = Group, True
    torch.cuda.nccl.version = lambda: (2, 0)  # which torch puts into the log of an error
    torch.cuda.before_synchronize.append(finish_all)  # type: ignore[attr-defined]
    batch = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[Any]) -> list[Any]:
        group = ops[0].group or dist.group.WORLD
        if not isinstance(group, Group):
            return batch(ops)
        return [group.batch([(op.op is dist.isend, op.tensor, op.group_peer) for op in ops])]

    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
