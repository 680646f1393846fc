"""Messages between two ranks of one machine, without a socket for the data: comm/near.py tells how.

A channel is one end of them. Threads of the program send and receive; the server, a thread of comm/near.py, takes what
the other rank says. What they share is under the channel's lock. An exception may reach a thread of the program at any
place (Ctrl-C): then a message that it was reading is still there for the next receive, or has been taken and the server
tells the sender.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, get_ident, local
from typing import Any

from torch import Tensor

from isograd.errors import CommError

INSIDE = 1 << 13  # bytes of a tensor up to which it travels in the packet
PACKET = 1 << 16  # bytes of a packet, at most
_MOST = 0x7FFFF000  # bytes that Linux copies in one call

_HEAD = struct.Struct("=BQqQQQ")  # kind, group, tag, number, address, bytes
_MEMORY, _IN_PACKET, _TAKEN = 1, 2, 3
_PIECE = struct.Struct("@PN")  # iovec: address, bytes
_POLLED = struct.Struct("=ihh")  # pollfd: file, events, what was seen
Place = tuple[int, int]  # what messages are told apart by: group, tag

LOST = "Connection closed by peer"
_libc = ctypes.CDLL(None, use_errno=True)
_poll = ctypes.PyDLL(None).poll  # this one keeps the interpreter's lock, for which a thread may wait milliseconds
CAN_COPY = hasattr(_libc, "process_vm_readv")


def copy_from(pid: int, source: int, target: int, size: int) -> bool:
    """Copy another process's memory here; whether the kernel did it."""
    at = 0
    while at < size:
        length = min(size - at, _MOST)
        here, there = _PIECE.pack(target + at, length), _PIECE.pack(source + at, length)
        got: int = _libc.process_vm_readv(pid, here, 1, there, 1, 0)
        if got <= 0:
            return False
        at += got
    return True


class Work:
    """A message of one tensor under way, to or from a near rank."""

    __slots__ = ("_waiters", "_what", "done", "error", "seconds", "tensor")

    def __init__(self, tensor: Tensor, seconds: float, what: str) -> None:
        """`what`: "send to rank 1"; `seconds`: how long `wait` waits."""
        self.tensor: Tensor | None = tensor
        self.done = False
        self.error: Exception | None = None
        self.seconds, self._what = seconds, what
        self._waiters: list[Any] = []

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.done

    def wait(self) -> None:
        """Wait until the tensor is filled, or until a sent one may be reused."""
        if not self.done:
            lock = _lock_of_thread()
            self._waiters.append(lock)
            while not self.done:
                if not lock.acquire(timeout=self.seconds) and not self.done:
                    raise RuntimeError(f"Timed out waiting {self.seconds * 1000:.0f}ms for {self._what} to complete")
        if self.error is not None:
            raise self.error

    def end(self, error: Exception | None = None) -> None:
        """It has arrived, or never will."""
        self.tensor, self.error = None, error
        self.done = True
        for lock in self._waiters:
            with suppress(RuntimeError):  # told already, by a message whose wait was given up
                lock.release()


_threads = local()


def _lock_of_thread() -> Any:
    """What this thread waits on, locked. One for all its waits: a lock for each message would be a piece of the heap
    between tensors, which come and go, and the heap would grow around it."""
    lock = getattr(_threads, "lock", None)
    if lock is None:
        lock = _threads.lock = Lock()
    lock.acquire(blocking=False)
    return lock


class _Message:
    """One that has been announced: its bytes lie at `address`, of the sender, or here if they came in the packet."""

    __slots__ = ("address", "bytes", "inside", "kept", "number", "said", "taken", "thread")

    def __init__(self, number: int, address: int, size: int, inside: bool) -> None:
        self.number, self.address, self.bytes, self.inside = number, address, size, inside
        self.kept = b""  # what came in a packet, and no memory waited for
        self.thread = 0  # which reads it
        self.taken = False  # its bytes are where they belong
        self.said = inside  # the sender knows


class Buffer:
    """Memory for a packet, which is used again and again: see `_lock_of_thread`."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(PACKET))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.end = 0  # of what is in it


class Channel:
    """The messages between this process and one near rank."""

    def __init__(self, rank: int, pid: int, line: socket.socket) -> None:
        self.rank, self.pid, self.socket = rank, pid, line
        self.lost = ""  # why nothing comes or goes any more
        self._polled = ctypes.create_string_buffer(_POLLED.pack(line.fileno(), 0, 0))
        self.given = 0  # bytes of tensors that were sent
        self._lock = Lock()
        self._number = 0
        self._sent: dict[int, Work] = {}  # which the other rank has not taken yet
        self._waiting: dict[Place, list[Work]] = {}  # memory that was posted
        self._came: dict[Place, list[_Message]] = {}  # messages that nothing waited for
        self._taking: dict[_Message, Place] = {}  # of those, what threads of the program read
        # Packets for which the socket had no room, and the messages that they hold.
        self.queue: deque[tuple[bytes, list[Work]]] = deque()
        self.wake: Callable[[], None] = lambda: None  # lets the server look at the queue
        self._packet, self._inside = Buffer(), list[Work]()  # that is being written, and the messages in it

    # -- what threads of the program call

    def send(self, tensors: Sequence[Tensor], group: int, tag: int, seconds: float) -> list[Work]:
        """Send contiguous tensors, each a message."""
        works = [Work(tensor, seconds, f"send to rank {self.rank}") for tensor in tensors]
        with self._lock:
            if self.lost:
                for work in works:
                    work.end(self._error())
                return works
            for tensor, work in zip(tensors, works, strict=True):
                self._number += 1
                address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
                self.given += size
                if size <= INSIDE:
                    self._write(_IN_PACKET, group, tag, self._number, address, size)
                    self._inside.append(work)
                else:
                    self._sent[self._number] = work
                    self._write(_MEMORY, group, tag, self._number, address, size)
            self._push()
        return works

    def receive(self, tensor: Tensor, group: int, tag: int, seconds: float) -> Work:
        """Fill a contiguous tensor with the next message of this group and tag."""
        work = Work(tensor, seconds, f"receive from rank {self.rank}")
        place = group, tag
        with self._lock:
            message = self._first(place)
            if message is None:
                if self.lost:
                    work.end(self._error())
                else:
                    self._waiting.setdefault(place, []).append(work)
                return work
            self._taking[message] = place
        # An exception may come at any place from here on (Ctrl-C). Until `taken` is set nothing has happened; after it
        # the server tells the sender, if this thread does not.
        error = self._read(message, tensor)
        message.taken = True
        work.end(error)
        self._say(message)
        return work

    # -- what the server calls

    def read(self, buffer: Buffer) -> bool:
        """Take what the other rank says; whether it is still there."""
        try:
            end = self.socket.recv_into(buffer.memory)
        except (BlockingIOError, ConnectionResetError):  # reset: the kernel says so before it gives what came before
            return True
        except OSError:
            end = 0
        at = 0
        while at < end:
            kind, group, tag, number, address, size = _HEAD.unpack_from(buffer.memory, at)
            at += _HEAD.size
            if kind == _TAKEN:
                with self._lock:
                    work = self._sent.pop(number, None)
                if work is not None:
                    work.end()
            elif kind == _MEMORY:
                self._arrive((group, tag), _Message(number, address, size, False))
            else:
                self._arrive((group, tag), _Message(number, buffer.address + at, size, True))
                at += size
        return end > 0

    def flush(self) -> bool:
        """Send packets that wait for room; whether none is left."""
        with self._lock:
            while self.queue and self._put(*self.queue[0]):
                self.queue.popleft()
            return not self.queue

    def sweep(self) -> None:
        """Tell the other rank of messages that were read by a thread which an exception kept from saying so."""
        for message in list(self._taking):
            if message.taken:
                self._say(message)

    def end(self, why: str) -> None:
        """Nothing comes or goes any more."""
        with self._lock:
            self.lost = self.lost or why
            works = [*self._sent.values(), *(work for several in self._waiting.values() for work in several)]
            works += [work for _, inside in self.queue for work in inside]
            for kept in (self._sent, self._waiting, self.queue):
                kept.clear()
        with suppress(OSError):  # the other end is closed
            self.socket.shutdown(socket.SHUT_RDWR)
        for work in works:  # behind it: see _hung_up
            work.end(self._error())
        self.socket.close()

    # -- the rest

    def _arrive(self, place: Place, message: _Message) -> None:
        with self._lock:
            several = self._waiting.get(place)
            if not several:
                if message.inside:
                    message.kept = ctypes.string_at(message.address, message.bytes)
                self._came.setdefault(place, []).append(message)
                return
            work = several.pop(0)
            if not several:
                del self._waiting[place]
        error = self._read(message, work.tensor)  # no name for it here, which would keep it alive behind `end`
        message.taken = True
        work.end(error)
        self._say(message)

    def _first(self, place: Place) -> _Message | None:
        """The first message that came for a place and that nobody has taken."""
        me = get_ident()
        for message in self._came.get(place, ()):
            if not message.taken and message.thread in (0, me):  # mine: an exception ended this thread's last attempt
                message.thread = me
                return message
        return None

    def _read(self, message: _Message, tensor: Tensor | None) -> Exception | None:
        """Put a message into memory; why it could not be."""
        assert tensor is not None, "memory that waits is let go of when its message has come"
        room = tensor.numel() * tensor.element_size()
        if message.bytes > room:
            return CommError(
                "IG209",
                f"a message of rank {self.rank} is longer than the memory that waits for it",
                seen=f"{message.bytes} bytes",
                expected=f"at most {room}: the same operation, in the same order and of the same sizes on all ranks",
                fix="look at what both ranks did last: one left out a backward or a collective, or has other shapes",
            )
        if message.inside:
            ctypes.memmove(tensor.data_ptr(), message.kept or message.address, message.bytes)
        elif not copy_from(self.pid, message.address, tensor.data_ptr(), message.bytes) or self._hung_up():
            return self._error()
        return None

    def _hung_up(self) -> bool:
        """Whether the sender may have let go of its memory: until it closes its end, it keeps what it has sent."""
        return bool(self.lost or _poll(self._polled, 1, 0))

    def _error(self) -> Exception:
        return RuntimeError(f"rank {self.rank}: {self.lost or LOST}")

    def _say(self, message: _Message) -> None:
        """Tell the sender that a message was taken, and forget it."""
        with self._lock:
            if not message.said and not self.lost:
                self._write(_TAKEN, 0, 0, message.number, 0, 0)
                self._push()
            message.said = True
            place = self._taking.pop(message, None)
            if place is not None:
                kept = self._came[place]
                kept.remove(message)
                if not kept:
                    del self._came[place]

    def _write(self, kind: int, group: int, tag: int, number: int, address: int, size: int) -> None:
        """Add to the packet that is being written; the caller holds the lock."""
        packet, inside = self._packet, kind == _IN_PACKET
        if packet.end + _HEAD.size + size * inside > PACKET:
            self._push()
        _HEAD.pack_into(packet.memory, packet.end, kind, group, tag, number, address, size)
        packet.end += _HEAD.size
        if inside:
            ctypes.memmove(packet.address + packet.end, address, size)
            packet.end += size

    def _push(self) -> None:
        """Send the packet that was written now, or when there is room; the caller holds the lock."""
        packet, inside = self._packet.memory[: self._packet.end], self._inside
        self._packet.end, self._inside = 0, []
        if packet and (self.queue or not self._put(packet, inside)):
            self.queue.append((bytes(packet), inside))
            self.wake()

    def _put(self, packet: bytes | memoryview, inside: Sequence[Work]) -> bool:
        try:
            self.socket.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:  # the server finds the end of the connection
            pass
        for work in inside:
            work.end()
        return True
