"""Collectives of groups, not differentiable (comm/ops.py has those that are).

A `Transport` (comm/transport.py) moves the messages of a group: gloo, NCCL, threads, or a simulation. Where it has
no reductions of its own, every collective is built from one primitive, `exchange`: each member sends a list of tensors
to each other member and receives a list from each, all at once, straight from and into the memory it is given. Its
bytes are the lower bound for gathers and reduce-scatters, it needs no packing, sums happen here in a *chosen* order
(rank order), and it is 2-4x faster than gloo's own reductions. On NCCL the native collectives are used.

Invariant: members of a group that all-reduce or all-gather obtain the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from isograd.comm import record
from isograd.comm.group import Group, even_sizes
from isograd.comm.handle import Handle
from isograd.comm.transport import Nccl, Tensors, Transport
from isograd.comm.world import ABORTED, abort_group_on_interrupt, leave, store_check
from isograd.errors import CommError

LAYER_S = 5.0  # after which a rank that gives up a step closes its connections, where layers wait for it
LATE_S = 1.0  # seconds after which a rank that waits for a card asks whether others are still there
SPIN_S = 5e-4  # for which the host asks a card without a pause
MANY = 8  # members, of more of which a gather takes rounds: each of thousands would have a message for each other one
SMALL_BYTES = 1 << 16  # below this an all-reduce is one exchange of whole tensors: one latency instead of two


def _transport(group: Group) -> Transport:
    group.refuse_closed()
    if group.transport is None:
        raise CommError("IG201", seen=f"group of ranks {group.ranks}", axes=group.axes)
    found: Transport = group.transport
    return found


def exchange(out: Tensors, into: Tensors, group: Group, tag: int = 0, *, control: bool = False) -> Handle:
    """Send the tensors out[i] to member i while filling into[i] with what member i sends here. My own entry is skipped.

    Tensors are contiguous; empty ones are not sent. On gloo, messages with different tags never meet, and messages with
    one tag are received in the order in which they were sent. NCCL has no tags: there the order is all that counts.
    `control`: values by which ranks decide something, rather than data; only records and simulated worlds look at it.
    """
    transport, handle = _transport(group), Handle(group, keep=(out, into))
    with abort_group_on_interrupt():
        transport.exchange(handle, out, into, tag, control)
    return handle.and_then(record.noted(group, out, into, tag, control))


def send_start(
    tensors: Sequence[torch.Tensor], group: Group, peer: int, tag: int = 0, *, control: bool = False
) -> Handle:
    """Start sending contiguous tensors to member `peer`. Messages between two members arrive in the order sent."""
    transport, handle = _transport(group), Handle(group, keep=tensors)
    with abort_group_on_interrupt():
        transport.send(handle, tensors, peer, tag, control)
    return handle.and_then(record.noted_to(group, [peer], tensors, True, tag, control))


def receive_start(
    tensors: Sequence[torch.Tensor], group: Group, peer: int, tag: int = 0, *, control: bool = False
) -> Handle:
    """Start filling tensors with the messages of member `peer`."""
    transport, handle = _transport(group), Handle(group, keep=tensors)
    with abort_group_on_interrupt():
        transport.receive(handle, tensors, peer, tag, control)
    return handle.and_then(record.noted_to(group, [peer], tensors, False, tag, control))


def all_reduce(x: torch.Tensor, group: Group, *, control: bool = False) -> torch.Tensor:
    """A new tensor: the sum over the group, in rank order, the same bits on every member. `control`: as in exchange."""
    if group.size == 1:
        return x
    transport = _transport(group)
    if isinstance(transport, Nccl):
        with abort_group_on_interrupt():
            transport.all_reduce(total := x.contiguous().clone())
        return total
    if group.size == 2 or x.numel() * x.element_size() <= SMALL_BYTES:
        return add_up(_gather_exchanged(x, group, control), group.index)
    flat = x.contiguous().view(-1)
    sizes = even_sizes(flat.numel(), group.size)
    mine = reduce_scatter(flat, group, sizes)
    return record.summed(x, all_gather(mine, group, sizes).view(x.shape))


def add_up(pieces: Sequence[torch.Tensor], mine: int) -> torch.Tensor:
    """The sum in rank order, in the memory of a received piece: mine is the caller's. (a + b is b + a, bitwise.)"""
    total = pieces[1].add_(pieces[0]) if mine == 0 else pieces[0].add_(pieces[1])
    for piece in pieces[2:]:
        total.add_(piece)
    return total


def all_max(x: torch.Tensor, group: Group) -> torch.Tensor:
    """A new tensor: the elementwise maximum over the group, of a few numbers."""
    return gather(x, group).amax(0)


def gather_list(x: torch.Tensor, group: Group, *, control: bool = True) -> list[torch.Tensor]:
    """Every member's tensor, as `gather` gathers them."""
    return list(gather(x, group, control=control))


def gather(x: torch.Tensor, group: Group, *, control: bool = True, limit: float | None = None) -> torch.Tensor:
    """[members, ...]: every member's tensor (all of one shape), in rank order. `control`: as in exchange. `limit`:
    seconds after which this rank closes its connections and raises, of what lies in host memory."""
    if group.size == 1:
        return x[None]
    transport = _transport(group)
    if isinstance(transport, Nccl):
        flat, handle = x.new_empty(group.size * x.numel()), Handle(group)
        transport.all_gather(handle, flat, x.contiguous().view(-1))
        handle.wait()
        return flat.view(group.size, *x.shape)
    known = transport.gather_control(x) if control else None
    if known is not None:  # no message for each rank of a large simulated world
        record.noted(group, [[x]] * group.size, [[x]] * group.size, 0, control)()
        return torch.stack(known)
    if group.size > MANY:
        return _gather_in_rounds(x, group, control, limit)
    return torch.stack(_gather_exchanged(x, group, control, limit))


def _gather_in_rounds(x: torch.Tensor, group: Group, control: bool, limit: float | None) -> torch.Tensor:
    """Each member has its own, then of two, then of four: a message to, and from, one other member in each round."""
    found, size = x.contiguous()[None], group.size  # of me, and of members behind me
    with abort_group_on_interrupt():
        while (have := len(found)) < size:
            more = torch.empty_like(found[: size - have])
            arrives = receive_start([more], group, (group.index + have) % size, control=control)
            sent = send_start([found[: len(more)]], group, (group.index - have) % size, control=control)
            _wait_at_most(limit, arrives)
            sent.wait()
            found = torch.cat((found, more))
    return found.roll(group.index, 0)


def _gather_exchanged(x: torch.Tensor, group: Group, control: bool, limit: float | None = None) -> list[torch.Tensor]:
    x = x.contiguous()
    pieces = [x if i == group.index else torch.empty_like(x) for i in range(group.size)]
    _wait_at_most(limit, exchange([[x]] * group.size, [[p] for p in pieces], group, control=control))
    return pieces


def _wait_at_most(limit: float | None, handle: Handle) -> None:
    if limit is not None and not handle.arrived_within(limit):
        leave(f"it gave up a step, and other ranks did not come to its end within {limit:g} s: they wait in a layer")
        raise CommError("IG214", seen=f"no answer within {limit:g} s")
    handle.wait()


def to_host(x: torch.Tensor) -> torch.Tensor:
    """x in host memory."""
    return copy_to_host(x)()


def copy_to_host(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy x; what is returned waits. On a card this is where a step waits: for all that x depends on, other
    ranks' messages too. Of those it asks every LATE_S seconds whether one has closed its connections, as no card tells
    the host."""
    if not x.is_cuda:
        return lambda: x
    here, event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event()
    here.copy_(x, non_blocking=True)
    event.record()

    def wait() -> torch.Tensor:
        if event.query():
            return here
        began, asks = time.monotonic(), LATE_S
        with abort_group_on_interrupt():
            while not event.query():
                waited = time.monotonic() - began
                if waited > asks:
                    asks = waited + LATE_S
                    if store_check(ABORTED):
                        raise RuntimeError("another rank has closed its connections")
                if waited > SPIN_S:
                    time.sleep(SPIN_S / 10)  # other threads of this process go on
            event.synchronize()
        return here

    return wait


def all_gather(x: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    """Concatenation along dim 0 of every member's tensor; member i's has sizes[i] rows."""
    if group.size == 1:
        return x
    x = x.contiguous()
    whole = x.new_empty((sum(sizes), *x.shape[1:]))
    all_gather_start(whole, x, group, sizes).wait()
    return whole


def all_gather_start(
    whole: torch.Tensor, mine: torch.Tensor, group: Group, sizes: Sequence[int], tag: int = 0
) -> Handle:
    """Start filling `whole` with every member's rows (dim 0), of which member i has sizes[i]; `mine` are my own,
    perhaps in their place already. `tag`: on gloo, gathers with different tags never meet."""
    transport = _transport(group)
    if isinstance(transport, Nccl) and len(set(sizes)) == 1:
        transport.all_gather(handle := Handle(group, keep=(whole, mine)), whole, mine)
        return handle
    pieces = whole.split(list(sizes))
    if pieces[group.index].data_ptr() != mine.data_ptr():
        pieces[group.index].copy_(mine)
    return exchange([[mine]] * group.size, [[p] for p in pieces], group, tag)


def reduce_scatter(x: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    """The sum over the group, of which member i keeps the rows (dim 0) of its sizes[i]; summed in rank order."""
    if group.size == 1:
        return x
    pieces, handle = reduce_scatter_start(x.contiguous(), group, sizes)
    handle.wait()
    return pieces[0] if len(pieces) == 1 else add_up(pieces, group.index)


def scatter_start(
    x: torch.Tensor, group: Group, sizes: Sequence[int], tag: int = 0
) -> tuple[list[torch.Tensor], Handle]:
    """Start sending member i the sizes[i] rows (dim 0) that are its own: (what each member sends here, handle). My own
    piece is a view of x."""
    pieces = x.split(list(sizes))
    own = pieces[group.index]
    arrived = [own if i == group.index else torch.empty_like(own) for i in range(group.size)]
    return arrived, exchange([[p] for p in pieces], [[t] for t in arrived], group, tag)


def reduce_scatter_start(
    flat: torch.Tensor, group: Group, sizes: Sequence[int], tag: int = 0
) -> tuple[list[torch.Tensor], Handle]:
    """Start a reduce-scatter: (pieces that add up to my rows, handle). On NCCL that is one piece: the sum."""
    transport = _transport(group)
    if not (isinstance(transport, Nccl) and len(set(sizes)) == 1):
        return scatter_start(flat, group, sizes, tag)
    mine = flat.new_empty((sizes[group.index], *flat.shape[1:]))
    transport.reduce_scatter(handle := Handle(group, keep=(flat, mine)), mine, flat)
    return [mine], handle


def all_to_all(
    pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: Group, *, control: bool = False
) -> list[torch.Tensor]:
    """Send pieces[i] to member i; return the tensor that each member sent here, of shape shapes[i] from member i."""
    out = [[p.contiguous()] for p in pieces]
    into = [out[i] if i == group.index else [pieces[i].new_empty(tuple(shapes[i]))] for i in range(group.size)]
    if control and group.size > 1 and _transport(group).simulated:  # every member says to me what I say to myself
        record.noted(group, out, into, 0, control)()
        return [pieces[group.index]] * group.size
    exchange(out, into, group, control=control).wait()
    return [t for (t,) in into]


def broadcast_(x: torch.Tensor, group: Group, source: int = 0) -> None:
    """Overwrite x with the x of member `source`. As in every exchange, an empty tensor is no message."""
    if group.size > 1 and x.numel():
        with abort_group_on_interrupt():
            _transport(group).broadcast(x, source)
        sends, others = group.index == source, [i for i in range(group.size) if i != source]
        record.noted_to(group, others if sends else [source], [x], sends, 0, False)()
