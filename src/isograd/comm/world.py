"""Who is here: the world of this process, the groups that were made in it, and how a rank leaves.

Only this file and comm/transport.py call torch.distributed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its defaults hold the world that is there when it is first imported: none
from torch.distributed import distributed_c10d

from isograd.comm import restarts
from isograd.comm.device import Asked, agree, forget, refuse_late
from isograd.comm.device import device as device  # noqa: PLC0414
from isograd.comm.fake import FakeRank, FakeTransport
from isograd.comm.group import Group, RankContext
from isograd.comm.threads import ThreadTransport
from isograd.comm.threads import member as thread_member
from isograd.comm.transport import LOST_RANK, Transport, of_torch
from isograd.errors import CommError, IsogradError, headline

_timeout = timedelta(minutes=30)  # for which a collective waits for a silent rank
AGAIN_S = 30.0  # for which a rank waits for the others, to make a world in the place of one that a failure has ended


def set_collective_timeout(seconds: float) -> None:
    """Before a world is joined: let its collectives wait this long, longer than a watchdog that names silent ranks."""
    global _timeout  # noqa: PLW0603  (one per process, like the world itself)
    _timeout = max(_timeout, timedelta(seconds=seconds))


def join(rank: int, world_size: int, store_dir: str, asked: Asked = None) -> None:
    """Join a world of local ranks that meet in a directory: no port is opened, and gloo binds to the loopback."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = dist.FileStore(os.path.join(store_dir, "store"), world_size)  # type: ignore[attr-defined]
    _make_world(store, rank, world_size, asked, _timeout.total_seconds())


def _make_world(store: Any, rank: int, size: int, asked: Asked, seconds: float) -> None:
    backend = agree(store, rank, size, asked, seconds)
    place: dict[str, Any] = {"rank": rank, "world_size": size, "device_id": _card(backend)}
    dist.init_process_group(backend, store=store, timeout=_timeout, **place)


def world(asked: Asked = None) -> tuple[int, int]:
    """(rank, world size) of the running world: one already joined, else torchrun's, else a world of one. Behind a
    failure that has ended a world, another one of the same ranks, who meet where they had met.

    asked: "cpu" computes on the CPU on purpose; None: on cards, where the machines have any."""
    rank, size = rank_and_size()
    if thread_member() is not None:
        return rank, size
    if dist.is_initialized():
        refuse_late(asked, dist.get_backend())
    elif process.left:
        try:
            _make_world(dist.PrefixStore("again", process.left[0]), rank, size, process.left[1], AGAIN_S)  # type: ignore[attr-defined]
        except RuntimeError as error:  # no answer, or no connection
            seen = f"the others have not begun anew within {AGAIN_S:g} s: they have ended, or are elsewhere"
            raise CommError("IG213", seen=seen) from error
    elif size > 1:
        seconds = _timeout.total_seconds()
        met = meet(seconds)[0]
        name = restarts.name(met, rank, size, seconds) if restarts.possible() else "default_pg"
        _make_world(dist.PrefixStore(name, met), rank, size, asked, seconds)  # type: ignore[attr-defined]
    return rank, size


def rank_and_size() -> tuple[int, int]:
    """(rank, world size) that this process has or will have, without joining the others."""
    if (here := thread_member()) is not None:
        return here.rank, here.world.size
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), size) if size > 1 and "RANK" in os.environ else (0, 1)


def process_group_of(group: Group | None = None) -> Any:
    """torch's own group of these ranks, or of all, for a library that asks for one; None where no world was joined."""
    if group is None or not dist.is_initialized():
        return dist.group.WORLD if dist.is_initialized() else None
    key, made = (group.purpose, group.ranks), _transports()
    if key not in made:  # of one rank, which has nobody to talk to
        made[key] = of_torch(_new_process_group(*key, 0), group.ranks, 0)
    return made[key].process_group


def group_of_torch(process_group: Any, axes: str) -> Group:
    """One of torch's process groups as one of ours, whose waits are watched (deadlock.py)."""
    ranks, index = tuple(dist.get_process_group_ranks(process_group)), dist.get_rank(process_group)
    key = f"torch {process_group.group_name}", ranks
    transport = _transports().setdefault(key, of_torch(process_group, ranks, index))
    return Group(axes, ranks, index, transport, key[0], process)


def meet(seconds: float) -> tuple[Any, int, int]:
    """(store, rank, how many) of the ranks that torchrun or variables like its have started; no world is joined."""
    return next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=seconds))))  # type: ignore


class Process(RankContext):
    """The process, when it is a rank. Its process groups cost sockets and threads."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: WeakSet[Any] = WeakSet()  # Handles
        self.left: list[Any] = []  # the store of a world that a failure has ended, and what it was asked to run on

    def leave(self, why: str) -> None:
        """As a new process: a rank may join another world."""
        forget()
        super().leave(why)
        for handle in list(self.unfinished):  # messages that will not arrive keep connections open
            handle.forget()
        for transport in self.made.values() if why else ():
            transport.close()
        self.made.clear()
        self.tags.clear()
        if dist.is_initialized():
            on_cards = "nccl" in dist.get_backend()
            self.left[:] = (_store(None), None if on_cards else "cpu") if why else ()
            if why and on_cards:
                distributed_c10d._abort_process_group()  # whose kernels may wait for messages that will not come
            else:
                dist.destroy_process_group()


process = Process()


def _forked() -> None:
    """A child of a rank would read its messages."""
    for transport in process.made.values():
        transport.shut(f"process {os.getpid()} was forked from a rank, and is none")


os.register_at_fork(after_in_child=_forked)
ON_HOST = frozenset({"step", "copies", "host"})  # purposes of groups whose messages lie in host memory: never NCCL's


def new_group(axes: str, ranks: tuple[int, ...], rank: int, purpose: str = "", member: FakeRank | None = None) -> Group:
    """The group of `ranks`. Only its members call this, in the same order on each of them.

    Groups of the same ranks and the same purpose share their connections. Messages of different purposes never meet:
    ranks may send and wait for them in different orders. `member`: of an imagined world.
    """
    here = thread_member()
    index, context = ranks.index(rank), member or here or process
    if len(ranks) == 1:
        return Group(axes, ranks, index, purpose=purpose, context=context)
    if member is not None:
        transport: Transport = FakeTransport(member, axes, ranks, purpose)
    else:
        key, made = (purpose, ranks), here.made if here is not None else _transports()
        if key not in made and here is not None:
            made[key] = ThreadTransport(here, ranks, purpose)
        elif key not in made:
            everyone = not purpose and len(ranks) == dist.get_world_size()
            process_group = dist.group.WORLD if everyone else _new_process_group(purpose, ranks, index)
            made[key] = of_torch(process_group, ranks, index)
        transport = made[key]
    return Group(axes, ranks, index, transport, purpose, context)


def _transports() -> dict[tuple[str, tuple[int, ...]], Any]:
    """Those of this process, in the world that torch has now: its program may have ended the one before."""
    if not any(transport.process_group in distributed_c10d._world.pg_map for transport in process.made.values()):
        process.made.clear()
    return process.made


def _new_process_group(purpose: str, ranks: tuple[int, ...], index: int) -> Any:
    """dist.new_group names a group by its members *and by how many the rank has*: stages with ties would wait for each
    other. Here members and purpose name it. And torch splits groups off a world that is bound to devices, in a
    collective that needs all ranks of the world."""
    world: Any = dist.group.WORLD
    backend, store = distributed_c10d._world.pg_map[world]
    backend = "gloo" if purpose in ON_HOST else backend
    name: Any = " ".join(["isograd", purpose, *map(str, ranks)])
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks), index, list(ranks), dist.Backend(backend), store, name, timeout=_timeout,
            device_id=_card(backend), group_desc=name,
        )  # fmt: skip
    finally:
        world.bound_device_id = bound
    distributed_c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _card(backend: str) -> torch.device | None:
    """The device for which NCCL makes a group's communicator at once, by all members, rather than by first messages."""
    return device() if "nccl" in backend else None


TAGS = 1 << 20  # of one range


def reserve_tags(group: Group) -> int:
    """The first of TAGS tags that nothing else uses on this group. Its members reserve them in the same order."""
    group.context.tags[group.ranks] += 1
    return int((1 << 30) + group.context.tags[group.ranks] % 1023 * TAGS)


def _store(line: Any) -> Any:
    if (here := thread_member()) is not None:
        return here.world.store
    return line or (distributed_c10d._get_default_store() if dist.is_initialized() else (process.left or [None])[0])


def store_set(name: str, note: str = "1", line: Any = None) -> None:
    """Let every rank see this name. line: of a thread, from `clone_store`."""
    if (store := _store(line)) is not None:
        store.set(f"isograd/{name}", note)


def store_check(name: str, line: Any = None) -> bool:
    """Whether any rank has raised it."""
    store = _store(line)
    return store is not None and bool(store.check([f"isograd/{name}"]))


def store_get(name: str, line: Any = None) -> str:
    """What was noted with a flag; empty when none was raised, or when the store has ended with its rank."""
    with suppress(RuntimeError):
        if store_check(name, line):
            return bytes(_store(line).get(f"isograd/{name}")).decode()
    return ""


def clone_store(flags: bool = False) -> Any:
    """For a thread: a connection of its own to the store, or to its flags; None: the ranks met in a file."""
    line = _store(None)
    store = getattr(line, "_underlying_non_prefix_store", line)
    line = line if flags else store
    return line.clone() if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


ABORTED = "aborted"  # the name of what the first rank that closed its connections said
LOST = ("closed by peer", "reset by peer", "broken pipe", "connection closed", "connection refused", "pair closure")
DEADLOCK = "ranks wait for each other"  # how it begins, where that is why


def leave(why: str = "", tell: bool = True) -> None:
    """Close the connections, which ends the waits of other ranks. `why`: after a failure. `tell`: they read it in the
    store."""
    why = why or (headline(error) if (error := sys.exception()) is not None else "")
    place = thread_member() or process
    if why and tell and (not place.made or any(not transport.closed for transport in place.made.values())):
        with suppress(RuntimeError):  # the store may have ended with its rank
            _tell(f"rank {rank_and_size()[0]}: {why}")
    for transport in place.made.values():
        transport.shut(why or "it has left the world")
    place.leave(why)


def _tell(why: str) -> None:
    if not store_check(ABORTED):
        store_set(ABORTED, why)


def cut(place: RankContext, why: str) -> None:
    """From a thread that watches a rank: close the connections for which the rank waits. It leaves by itself then."""
    for transport in place.made.values():
        transport.shut(why)
    _tell(why)
    if place is not process:
        place.leave(why)
    for transport in place.made.values():
        transport.close()


def is_lost_connection(error: BaseException) -> bool:
    """Whether a backend says that another rank cannot be reached any more."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)


def abort(error: BaseException) -> BaseException:
    """This rank communicated with others when an exception came. Messages that it has started, or not started, would
    be taken for later ones: its connections are closed, which tells the others, and its next collective is refused.
    Errors of isograd are raised on all ranks alike, and close nothing. Returns what to raise: where another rank had
    closed its connections before, an error that names it."""
    if isinstance(error, IsogradError):
        return error
    place = thread_member() or process
    first = next((t.closed for t in place.made.values() if t.closed), "") or store_get(ABORTED)
    if isinstance(error, RuntimeError) and first:
        leave(first, tell=False)
        return CommError("IG215", seen=first) if first.startswith(DEADLOCK) else CommError("IG213", seen=first)
    if is_lost_connection(error):
        noted = next((n.removeprefix("with ") for n in getattr(error, "__notes__", ()) if n.startswith(LOST_RANK)), "")
        waits = place.awaited()
        other = noted or ("a rank" if waits is None else f"rank {waits}")
        leave(why := f"{other} has ended, or the connection to it is lost")
        return CommError("IG213", seen=why)
    text = (str(error).splitlines() or [""])[0][:200]
    leave(f"{type(error).__name__} came while it communicated with other ranks ({text})")
    return error


@contextmanager
def abort_group_on_interrupt() -> Iterator[None]:
    """Around a stretch of messages of which this rank must leave none out."""
    try:
        yield
    except BaseException as error:
        found = abort(error)
        if found is error:
            raise
        raise found from error
