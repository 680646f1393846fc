"""Messages between ranks of one machine on CPUs: the receiver reads the sender's memory.

gloo sends every message through a socket of the loopback interface: two copies by the kernel, in pieces, and threads
that wake for each piece. Ranks of one machine need none of that (docs/log.md, 2026-11-25, has the table).

Who does what, for a message of one tensor:

1. The sender keeps the tensor, and writes down where it lies, and how long it is, in a packet on a Unix socket that
   the two processes have between them. Tensors of up to `INSIDE` bytes travel in the packet itself: done.
2. A thread of the receiver, its server, finds the memory that waits for this message (the first one that was posted
   for the sender, group and tag), has the kernel copy the sender's memory into it (process_vm_readv, one copy), and
   sends a packet back: taken. A message for which no memory waits is read by whoever posts memory for it.
3. The sender's server lets go of the tensor.

So as on gloo: messages of one sender, group and tag are received in the order in which they were sent, those of
different groups or tags never meet, a shorter message goes to the beginning of the memory, and a sent tensor must not
change before `wait` has returned. A rank that ends closes its sockets: whoever waits for it is told at once.

Ranks find out whether they are near when they join a world (`meet`): the same machine, network, processes and user, and
both can read each other's memory. Where one cannot, both use gloo.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Thread

import torch
from torch import Tensor

from isograd.comm.channel import CAN_COPY, LOST, Buffer, Channel, copy_from
from isograd.comm.group import Group

CONNECT_S = 30.0  # for which a rank waits for another one's connection when a world is joined
SWEEP_S = 1.0  # how often a server looks for what an exception has kept a thread from saying
AT_ONCE = 16  # sockets that a server hears of at once: memory for more would come from the heap
_FACTS = 8  # numbers by which ranks tell each other where they are
_HELLO = struct.Struct("=qq")  # rank, and the number that the other one has told
_PEER = struct.Struct("3i")  # process, user, group of a socket's other end
_SET_PTRACER = 0x59616D61  # prctl's, of the Yama security module


class Hub:
    """The near ranks of this process, and the thread that serves them."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = {channel.rank: channel for channel in channels}
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)[::-1]
        self._closing = False
        self._poll = select.epoll()
        self._poll.register(self._woken, select.EPOLLIN)
        self._by_file = {channel.socket.fileno(): channel for channel in channels}
        for file, channel in self._by_file.items():
            self._poll.register(file, select.EPOLLIN)
            channel.wake = self.wake
        self._thread = Thread(target=self._serve, name="isograd near", daemon=True)
        self._thread.start()

    @property
    def given(self) -> int:
        """Bytes of tensors that this process has sent to near ranks."""
        return sum(channel.given for channel in self.channels.values())

    def wake(self) -> None:
        """Let the server look at queues, and whether to end."""
        with suppress(OSError):  # full: it looks in any case; closed: nothing is left to look at
            os.write(self._wake, b"x")

    def close(self) -> None:
        """Close the connections, which ends the waits of other ranks and of this one's threads."""
        self._closing = True
        self.wake()
        self._thread.join()
        for channel in self.channels.values():
            channel.end("this rank has closed its connections")
        self._close_files()

    def forget(self) -> None:
        """In a process that was forked off this one: the connections are its parent's, which alone keeps them open."""
        for channel in self.channels.values():
            channel.lost = "this process was forked off the rank that is connected"
            channel.socket.close()
        self._close_files()

    def _close_files(self) -> None:
        self._poll.close()
        for file in (self._wake, self._woken):
            with suppress(OSError):
                os.close(file)

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except BaseException as error:
            for channel in self.channels.values():
                channel.end(f"this rank's server of messages failed: {error!r}")
            raise

    def _serve_until_closed(self) -> None:
        files, queued, buffer = self._by_file, set[int](), Buffer()
        swept = time.monotonic()
        while not self._closing:
            for file, event in self._poll.poll(SWEEP_S, AT_ONCE):
                channel = files.get(file)
                if channel is None:
                    with suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                    self._watch_queues(queued)
                elif event & select.EPOLLOUT and channel.flush():
                    queued.discard(file)
                    self._poll.modify(file, select.EPOLLIN)
                if channel is not None and event & ~select.EPOLLOUT and not channel.read(buffer):
                    with suppress(OSError):  # closed by another thread
                        self._poll.unregister(file)
                    del files[file]
                    channel.end(LOST)
            if time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                for channel in files.values():
                    channel.sweep()

    def _watch_queues(self, queued: set[int]) -> None:
        for file, channel in self._by_file.items():
            if channel.queue and file not in queued:
                queued.add(file)
                self._poll.modify(file, select.EPOLLIN | select.EPOLLOUT)


_hub: Hub | None = None  # of the world that this process has joined
_hubs = weakref.WeakSet[Hub]()


def channels_of(group: Group) -> tuple[int, list[Channel | None]]:
    """The number by which a group's messages are told from those of others, the same on all its members; and for each
    member its channel, or None where messages go through the backend."""
    if group.near is None:
        text = f"{group.purpose} {','.join(map(str, group.ranks))}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        group.near = number, [None if _hub is None else _hub.channels.get(rank) for rank in group.ranks]
    found: tuple[int, list[Channel | None]] = group.near
    return found


def given() -> int:
    """Bytes of tensors that this process has sent to near ranks of this world."""
    return 0 if _hub is None else _hub.given


def leave() -> None:
    """Close the connections to near ranks."""
    global _hub
    hub, _hub = _hub, None
    if hub is not None:
        hub.close()


def meet(rank: int, size: int, gather: Callable[[Tensor], list[Tensor]]) -> None:
    """When a world is joined, on all its ranks: find those that are near, and connect to them.

    `gather`: gives every rank's tensor, by the backend.
    """
    global _hub  # noqa: PLW0603
    leave()
    word = ctypes.c_int64(secrets.randbits(62))  # which the others try to read
    token = secrets.randbits(62)
    place, listener = _place(), None
    if place:
        _let_siblings_read()
        try:
            listener = _listen(token, size)
        except OSError:
            place = 0
    facts = [place, os.getpid(), ctypes.addressof(word), word.value, token]
    seats = [s.tolist() for s in gather(torch.tensor(facts + [0] * (_FACTS - len(facts)), dtype=torch.int64))]
    near = [r for r in range(size) if r != rank and place and seats[r][0] == place]
    connected = _connect(rank, near, seats, listener) if listener is not None else {}
    reads = torch.zeros(size, dtype=torch.uint8)
    for r in connected:
        reads[r] = _can_read(seats[r])
    able = gather(reads)
    channels = []
    for r, connection in connected.items():
        if able[rank][r] and able[r][rank]:
            connection.setblocking(False)
            channels.append(Channel(r, seats[r][1], connection))
        else:
            connection.close()
    if listener is not None:
        listener.close()
    if channels:
        _hub = Hub(channels)
        _hubs.add(_hub)


def _place() -> int:
    """A number for this machine, network, processes and user; 0 where memory of others cannot be read."""
    if sys.platform != "linux" or not CAN_COPY:
        return 0
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "user")]
    except OSError:
        return 0
    text = " ".join([boot, *spaces, str(os.geteuid())]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") | 1


def _let_siblings_read() -> None:
    """Where Yama lets a process be read by its ancestors alone (Ubuntu), let what started this one, and what else it
    has started, read it, too. Elsewhere the kernel does not know the request."""
    parent = os.getppid()
    if parent > 1:  # else it was started by something that is gone, and anybody would be let in
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)


def _name(token: int) -> str:
    return f"\0isograd-{token:016x}"  # an abstract name: no file, and gone with its process


def _listen(token: int, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_name(token))
    listener.listen(size)
    return listener


def _connect(
    rank: int, near: Sequence[int], seats: Sequence[Sequence[int]], listener: socket.socket
) -> dict[int, socket.socket]:
    """A connection for each near rank with which one comes about: lower ranks connect to higher ones."""
    found: dict[int, socket.socket] = {}
    for r in near:
        if r > rank:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(CONNECT_S)
            try:
                connection.connect(_name(seats[r][4]))
                connection.send(_HELLO.pack(rank, seats[r][4]))
            except OSError:
                connection.close()
                continue
            found[r] = connection
    lower, until = {r for r in near if r < rank}, time.monotonic() + CONNECT_S
    while lower and (left := until - time.monotonic()) > 0:  # whoever is missing then talks by the backend
        listener.settimeout(left)
        try:
            connection = listener.accept()[0]
        except OSError:
            break
        who = _rank_of(connection, rank, lower, seats)
        if who is None:
            connection.close()
        else:
            lower.discard(who)
            found[who] = connection
    return found


def _rank_of(
    connection: socket.socket, rank: int, expected: Iterable[int], seats: Sequence[Sequence[int]]
) -> int | None:
    """Which of the expected ranks has connected; None: a stranger."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid() or pid not in {seats[r][1] for r in expected}:
        return None
    connection.settimeout(CONNECT_S)
    with suppress(OSError, struct.error):
        r, token = _HELLO.unpack(connection.recv(_HELLO.size))
        if r in expected and token == seats[rank][4] and pid == seats[r][1]:
            return int(r)
    return None


def _can_read(seat: Sequence[int]) -> bool:
    got = ctypes.c_int64(0)
    return copy_from(seat[1], seat[2], ctypes.addressof(got), 8) and got.value == seat[3]


def _after_fork() -> None:
    global _hub  # noqa: PLW0603
    for hub in list(_hubs):
        hub.forget()
    _hub = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
