"""The only file that calls torch.distributed.

Everything above speaks in `Group`s and tensors: names differ between torch versions, and primitives between backends.

On gloo every collective is built from one primitive, `exchange`: each member sends a list of tensors to each other
member and receives a list from each, all at once, straight from and into the memory it is given. Its bytes are the
lower bound for gathers and reduce-scatters, it needs no packing, sums happen here in a *chosen* order (rank order),
and it is 2-4x faster than gloo's own reductions (docs/log.md has the table). On NCCL the native collectives are used.

Invariant: members of a group that all-reduce or all-gather obtain the same bits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its defaults hold the world that is there when it is first imported: none
from torch.distributed import distributed_c10d

from isograd.comm import imagined, near, record, restarts
from isograd.comm.group import Group as Group  # noqa: PLC0414
from isograd.comm.group import even_sizes as even_sizes  # noqa: PLC0414
from isograd.comm.handle import Handle as Handle  # noqa: PLC0414  (other rooms import it from here)
from isograd.comm.handle import undivided as undivided  # noqa: PLC0414
from isograd.comm.record import recording as recording  # noqa: PLC0414
from isograd.errors import CommError

# torch 2.13 renamed both and warns at the old names.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Tensors = Sequence[Sequence[torch.Tensor]]  # for each member of a group
SMALL_BYTES = 1 << 16  # below this an all-reduce is one exchange of whole tensors: one latency instead of two


# -- the world ---------------------------------------------------------------------------------------------------


_timeout = timedelta(minutes=30)  # for which a collective waits for a silent rank


def be_patient(seconds: float) -> None:
    """Before a world is joined: let its collectives wait this long, longer than a watchdog that names silent ranks."""
    global _timeout  # noqa: PLW0603  (one per process, like the world itself)
    _timeout = max(_timeout, timedelta(seconds=seconds))


def join(rank: int, world_size: int, store_dir: str, interface: str | None = "lo", backend: str | None = None) -> None:
    """Join a world of local ranks that meet in a directory: no port is opened, and gloo binds to `interface`."""
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.FileStore(os.path.join(store_dir, "store"), world_size)  # type: ignore[attr-defined]
    chosen = backend or _best_backend(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    _take_card()
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=_timeout)
    _meet_near(rank, world_size)


def _take_card() -> None:
    """Before NCCL is joined: what names no card, in torch or in a user's program, means this rank's own."""
    if device().type == "cuda":
        torch.cuda.set_device(device())


def leave(why: str = "a stage of a pipeline failed") -> None:
    """Close the connections, which ends the waits of other ranks. They stay open while anything refers to them."""
    near.leave()
    for group in _given:
        group.handle = group.near = None
        _left.setdefault(group, why)
    for counted in (_made, _ranges, _serials):  # a rank that joins another world begins as a new process does
        counted.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def world() -> tuple[int, int]:
    """(rank, world size) of the running world: one already joined, else torchrun's, else a world of one."""
    rank, size = seat()
    if size > 1 and not dist.is_initialized():
        _take_card()
        place: dict[str, Any] = {}
        if restarts.possible():
            met = meet(seconds := _timeout.total_seconds())[0]
            met = dist.PrefixStore(restarts.name(met, rank, size, seconds), met)  # type: ignore[attr-defined]
            place = {"store": met, "rank": rank, "world_size": size}
        dist.init_process_group(_best_backend(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), timeout=_timeout, **place)
        _meet_near(rank, size)
    return rank, size


def _meet_near(rank: int, size: int) -> None:
    """Connect ranks of one machine that gloo would let talk through sockets. (In a world that somebody else has joined,
    not all ranks may come here: there they talk through gloo.)"""
    everyone = Group("world", tuple(range(size)), rank, dist.group.WORLD)
    if size > 1 and not native(everyone):
        near.meet(rank, size, lambda x: gather_list(x, everyone))


def seat() -> tuple[int, int]:
    """(rank, world size) that this process has or will have, without joining the others."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), size


def of_world() -> Any:
    """torch's own group of all ranks, for a library whose loop asks for one; None where no world was joined."""
    return dist.group.WORLD if dist.is_initialized() else None


def _best_backend(local_world_size: int) -> str:
    # NCCL refuses two ranks on one card, so ranks that share a card talk through gloo.
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    return "nccl" if enough else "gloo"


def device() -> torch.device:
    """Where this rank's tensors live: its own card when every local rank has one, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


# Process groups of the running world, by members: each costs sockets and threads, and meshes come and go.
_made: dict[tuple[str, tuple[int, ...]], Any] = {}
_given: WeakSet[Group] = WeakSet()  # every group that was given away
_left: WeakKeyDictionary[Group, str] = WeakKeyDictionary()  # why the connections of these were closed


def new_group(
    axes: str, ranks: tuple[int, ...], rank: int, purpose: str = "", member: imagined.Member | None = None
) -> Group:
    """The group of `ranks`. Only its members call this, in the same order on each of them.

    Groups of the same ranks and the same purpose share their connections. Messages of different purposes never meet:
    ranks may send and wait for them in different orders. `member`: of an imagined world.
    """
    group = Group(axes, ranks, ranks.index(rank), purpose=purpose)
    if len(ranks) == 1:
        return group
    if member is not None:
        group.handle = imagined.Line(member, axes, ranks, purpose)
        return group
    key = purpose, ranks
    if (purpose or len(ranks) < dist.get_world_size()) and key not in _made:
        with _named(" ".join(["isograd", purpose, *map(str, ranks)])):
            _made[key] = dist.new_group(list(ranks), timeout=_timeout, use_local_synchronization=True)
    group.handle = _made.get(key, dist.group.WORLD)
    _given.add(group)
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """torch names a group by its members *and by how many the rank has*: stages with ties would wait for each other."""
    before = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


TAGS = 1 << 20  # of one range
_ranges: Counter[tuple[int, ...]] = Counter()  # how many ranges of tags the groups of these ranks have given away


def reserve_tags(group: Group) -> int:
    """The first of TAGS tags that nothing else uses on this group. Its members reserve them in the same order."""
    ranges = group.handle.member.tags if isinstance(group.handle, imagined.Line) else _ranges
    ranges[group.ranks] += 1
    return (1 << 30) + ranges[group.ranks] % 1023 * TAGS


_serials: Counter[tuple[int, ...]] = Counter()


def serial(group: Group) -> int:
    """How often this was asked for the group's ranks: a name for something that they all make in the same order."""
    _serials[group.ranks] += 1
    return _serials[group.ranks]


def raise_flag(name: str, note: str = "1", line: Any = None) -> None:
    """Let every rank see this name, without a message that another rank would have to wait for. line: of a thread."""
    if dist.is_initialized():
        (line or distributed_c10d._get_default_store()).set(f"isograd/{name}", note)


def flag_raised(name: str, line: Any = None) -> bool:
    """Whether any rank has raised it."""
    return dist.is_initialized() and bool((line or distributed_c10d._get_default_store()).check([f"isograd/{name}"]))


def note_of(name: str, line: Any = None) -> str:
    """What was noted with a flag; empty when none was raised, or when the store has ended with its rank."""
    with suppress(RuntimeError):
        if flag_raised(name, line):
            return bytes((line or distributed_c10d._get_default_store()).get(f"isograd/{name}")).decode()
    return ""


def store_line(flags: bool = False) -> Any:
    """For a thread: a connection of its own to the store, or to its flags; None: the ranks met in a file."""
    line: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None
    store = getattr(line, "_underlying_non_prefix_store", line)
    line = line if flags else store
    return line.clone() if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def meet(seconds: float) -> tuple[Any, int, int]:
    """(store, rank, how many) of the ranks that torchrun or variables like its have started; no world is joined."""
    return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=seconds))))  # type: ignore


def native(group: Group) -> bool:
    """Whether this group's backend has collectives worth using as they are (NCCL), or `exchange` is better (gloo)."""
    if group.handle is None or isinstance(group.handle, imagined.Line):
        return False
    return "nccl" in dist.get_backend(group.handle)


def in_host_memory(group: Group) -> bool:
    """Whether messages are read and written where tensors on the CPU lie: on gloo, not in an imagined world."""
    return device().type == "cpu" and not native(group) and not isinstance(group.handle, imagined.Line)


def _handle(group: Group, control: bool = False) -> Any:
    if group in _left:
        raise CommError(
            "IG207", f"a collective over {group.axes!r} after this rank's connections were closed: {_left[group]}",
            fix="end the processes, and resume from the last checkpoint",
        )  # fmt: skip
    if group.handle is None:
        raise CommError(
            "IG201", f"a collective over {group.axes!r} was called on a mesh that is bound to no world",
            seen=f"group of ranks {group.ranks}", expected="a mesh made by Mesh(layout) inside a running world",
            fix="use isograd.launch(fn, nproc) or torchrun; Mesh.unbound is for looking only",
        )  # fmt: skip
    if isinstance(group.handle, imagined.Line):
        group.handle.control = control
    return group.handle


def exchange(
    out: Tensors,
    into: Tensors,
    group: Group,
    tag: int = 0,
    *,
    control: bool = False,
    beside: tuple[Tensors, Tensors] | None = None,
) -> Handle:
    """Send the tensors out[i] to member i while filling into[i] with what member i sends here. My own entry is skipped.

    Tensors are contiguous; empty ones are not sent. On gloo, messages with different tags never meet, and messages with
    one tag are received in the order in which they were sent. NCCL has no tags: there the order is all that counts.
    `control`: values by which ranks decide something, rather than data; only records and imagined worlds look at it.
    `beside`: (to each member, from each member) what travels at the same time in messages that others send: a record
    has it as one message more.
    """
    pg = _handle(group, control)
    if native(group):
        return record.noted(_exchange_nccl(out, into, group), group, out, into, tag, control)
    if any(t.is_cuda for pieces in (*out, *into) for t in pieces):
        return _exchange_staged(out, into, group, tag, control)
    if isinstance(pg, imagined.Line) and not control:
        pg.fill(into)
        return record.noted(Handle(keep=(out, into)), group, out, into, tag, control)
    works: list[Any] = []
    members: list[int] = []
    with undivided():
        # Receives are posted first so that nothing that arrives waits in a kernel buffer.
        for sending, messages, way in ((False, into, -1), (True, out, 1)):
            for step in range(1, group.size):
                peer = (group.index + way * step) % group.size
                works += _move([t for t in messages[peer] if t.numel()], group, pg, peer, tag, sending)
                members += [peer] * (len(works) - len(members))
    handle = Handle(works, keep=(out, into), members=members, group=group)
    return record.noted(handle, group, out, into, tag, control, beside)


def _move(tensors: Sequence[torch.Tensor], group: Group, pg: Any, peer: int, tag: int, sending: bool) -> list[Any]:
    """Start messages to or from a member: from memory to memory where it is near, else by the backend."""
    number, channels = near.channels_of(group)
    channel, seconds = channels[peer], _timeout.total_seconds()
    if channel is None:
        move = pg.send if sending else pg.recv
        return [move([t], peer, tag) for t in tensors]
    if sending:
        return channel.send(tensors, number, tag, seconds)
    return [channel.receive(t, number, tag, seconds) for t in tensors]


def _exchange_nccl(out: Tensors, into: Tensors, group: Group) -> Handle:
    ops = []
    for peer in range(group.size):
        if peer != group.index:
            ops += [dist.P2POp(dist.isend, t, group.ranks[peer], group.handle) for t in out[peer] if t.numel()]
            ops += [dist.P2POp(dist.irecv, t, group.ranks[peer], group.handle) for t in into[peer] if t.numel()]
    return Handle(dist.batch_isend_irecv(ops) if ops else (), keep=(out, into))


def _exchange_staged(out: Tensors, into: Tensors, group: Group, tag: int, control: bool) -> Handle:
    """gloo sends host memory only: ranks that share a card pass through it."""
    host_out = [[t.cpu() for t in pieces] if i != group.index else [] for i, pieces in enumerate(out)]
    host_in = [[torch.empty_like(t, device="cpu") for t in p] if i != group.index else [] for i, p in enumerate(into)]
    inner = exchange(host_out, host_in, group, tag, control=control)

    def finish() -> None:
        for host, target in zip(host_in, into, strict=True):
            for h, t in zip(host, target, strict=False):
                t.copy_(h)

    return Handle(inner._works, keep=(inner, into), then=finish, members=inner._members, group=group)


def send_start(tensors: Sequence[torch.Tensor], group: Group, peer: int, tag: int = 0, **noted: Any) -> Handle:
    """Start sending contiguous tensors to member `peer`. Messages between two members arrive in the order sent.

    `noted`: `control`, as in exchange; `head`: how many elements of each tensor a record has, if not all."""
    return _to_one(tensors, group, peer, tag, sending=True, **noted)


def receive_start(tensors: Sequence[torch.Tensor], group: Group, peer: int, tag: int = 0, **noted: Any) -> Handle:
    """Start filling tensors with the messages of member `peer`, which may be shorter on gloo. `noted`: as above."""
    return _to_one(tensors, group, peer, tag, sending=False, **noted)


def _to_one(
    tensors: Sequence[torch.Tensor], group: Group, peer: int, tag: int, *, sending: bool, control: bool = False,
    head: int | None = None,
) -> Handle:  # fmt: skip
    pg = _handle(group, control)
    tensors = [t for t in tensors if t.numel()]
    if not native(group) and any(t.is_cuda for t in tensors):  # gloo sends host memory only
        host = [t.cpu() if sending else torch.empty_like(t, device="cpu") for t in tensors]
        inner = _to_one(host, group, peer, tag, sending=sending, control=control, head=head)

        def finish() -> None:
            inner.wait()
            for target, arrived in zip(() if sending else tensors, host, strict=False):
                target.copy_(arrived)

        return Handle(then=finish, keep=(host, tensors))
    works = _move(tensors, group, pg, peer, tag, sending)
    handle = Handle(works, keep=tensors, members=[peer] * len(works), group=group)
    noted = tensors if head is None else [t[:head] for t in tensors]
    return record.noted_to_one(handle, group, noted, peer, tag, control, sending)


# -- collectives, built on it or native --------------------------------------------------------------------------


def all_reduce(x: torch.Tensor, group: Group, *, control: bool = False) -> torch.Tensor:
    """A new tensor: the sum over the group, in rank order, the same bits on every member. `control`: as in exchange."""
    if group.size == 1:
        return x
    if native(group):
        dist.all_reduce(total := x.contiguous().clone(), group=group.handle)
        return total
    if group.size == 2 or x.numel() * x.element_size() <= SMALL_BYTES:
        return _add_up(_gather_whole(x, group, control), group.index)
    flat = x.contiguous().view(-1)
    sizes = even_sizes(flat.numel(), group.size)
    mine = reduce_scatter(flat, group, sizes)
    return record.summed(x, all_gather(mine, group, sizes).view(x.shape))


def _add_up(pieces: list[torch.Tensor], mine: int) -> torch.Tensor:
    """The sum in rank order, in the memory of a received piece: mine is the caller's. (a + b is b + a, bitwise.)"""
    total = pieces[1].add_(pieces[0]) if mine == 0 else pieces[0].add_(pieces[1])
    for piece in pieces[2:]:
        total.add_(piece)
    return total


def all_max(x: torch.Tensor, group: Group) -> torch.Tensor:
    """A new tensor: the elementwise maximum over the group."""
    if group.size == 1:
        return x
    if not native(group):
        return torch.stack(gather_list(x, group)).amax(0)
    dist.all_reduce(top := x.contiguous().clone(), op=dist.ReduceOp.MAX, group=group.handle)
    return top


def gather_list(x: torch.Tensor, group: Group, *, control: bool = True) -> list[torch.Tensor]:
    """Every member's tensor (all of one shape), in rank order. `control`: as in exchange."""
    if group.size == 1:
        return [x]
    if native(group):
        _gather_equal(flat := x.new_empty(group.size * x.numel()), x.contiguous().view(-1), group=group.handle)
        return list(flat.view(group.size, *x.shape))
    if control and isinstance(group.handle, imagined.Line):  # no message for each rank of a large world
        record.noted(Handle(), group, [[x]] * group.size, [[x]] * group.size, 0, control).wait()
        return group.handle.gather(x.contiguous())
    return _gather_whole(x, group, control)


def _gather_whole(x: torch.Tensor, group: Group, control: bool) -> list[torch.Tensor]:
    x = x.contiguous()
    pieces = [x if i == group.index else torch.empty_like(x) for i in range(group.size)]
    exchange([[x]] * group.size, [[p] for p in pieces], group, control=control).wait()
    return pieces


def all_gather(x: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    """Concatenation along dim 0 of every member's tensor; member i's has sizes[i] rows."""
    if group.size == 1:
        return x
    x = x.contiguous()
    whole = x.new_empty((sum(sizes), *x.shape[1:]))
    if native(group) and len(set(sizes)) == 1:
        _gather_equal(whole, x, group=group.handle)
        return whole
    pieces = whole.split(list(sizes))
    handle = exchange([[x]] * group.size, [[p] for p in pieces], group)
    pieces[group.index].copy_(x)
    handle.wait()
    return whole


def reduce_scatter(x: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    """The sum over the group, of which member i keeps the rows (dim 0) of its sizes[i]; summed in rank order."""
    if group.size == 1:
        return x
    x = x.contiguous()
    if native(group) and len(set(sizes)) == 1:
        mine = x.new_empty((sizes[group.index], *x.shape[1:]))
        _reduce_scatter_equal(mine, x, group=group.handle)
        return mine
    pieces = x.split(list(sizes))
    own = pieces[group.index]
    arrived = [own if i == group.index else torch.empty_like(own) for i in range(group.size)]
    exchange([[p] for p in pieces], [[t] for t in arrived], group).wait()
    return _add_up(arrived, group.index)


def reduce_scatter_start(flat: torch.Tensor, group: Group) -> tuple[torch.Tensor, Handle]:
    """Start a native reduce-scatter of equal chunks of a flat buffer: (my chunk, handle)."""
    mine = flat.new_empty(flat.numel() // group.size)
    work = _reduce_scatter_equal(mine, flat, group=_handle(group), async_op=True)
    return mine, Handle([work], keep=(flat, mine))


def all_gather_start(whole: torch.Tensor, mine: torch.Tensor, group: Group) -> Handle:
    """Start a native all-gather of equal chunks into a flat buffer."""
    return Handle([_gather_equal(whole, mine, group=_handle(group), async_op=True)], keep=(whole, mine))


def all_to_all(
    pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: Group, *, control: bool = False
) -> list[torch.Tensor]:
    """Send pieces[i] to member i; return the tensor that each member sent here, of shape shapes[i] from member i."""
    out = [[p.contiguous()] for p in pieces]
    into = [out[i] if i == group.index else [pieces[i].new_empty(tuple(shapes[i]))] for i in range(group.size)]
    if control and isinstance(group.handle, imagined.Line):  # every member says to me what I say to myself
        record.noted(Handle(), group, out, into, 0, control).wait()
        return [pieces[group.index]] * group.size
    exchange(out, into, group, control=control).wait()
    return [t for (t,) in into]


def shift(x: torch.Tensor, group: Group, by: int) -> torch.Tensor:
    """Each member sends x to the member `by` places ahead on the ring and returns what it receives."""
    if group.size == 1 or by % group.size == 0:
        return x
    x = x.contiguous()
    got = torch.empty_like(x)
    out = [[x] if i == (group.index + by) % group.size else [] for i in range(group.size)]
    into = [[got] if i == (group.index - by) % group.size else [] for i in range(group.size)]
    exchange(out, into, group).wait()
    return got


def broadcast_(x: torch.Tensor, group: Group, source: int = 0) -> None:
    """Overwrite x with the x of member `source`."""
    if group.size > 1:
        if not isinstance(_handle(group), imagined.Line):
            dist.broadcast(x, group.ranks[source], group=group.handle)
        record.noted_broadcast(x, group, source)


def barrier(group: Group) -> None:
    """Wait until every member has come here."""
    if group.size > 1 and not isinstance(_handle(group), imagined.Line):
        dist.barrier(group=_handle(group))
