"""What two ranks measure between them, over plain TCP as gloo's: can they connect, latency, bandwidth, clocks.

Each rank listens, in a thread that answers whoever connects. One letter says what is wanted:

    P  each byte comes back at once                          latency
    T  the time of day comes back                            clock
    S  blocks until an empty one; their total comes back     bandwidth there
    R  blocks come until an empty one                        bandwidth back
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass
from statistics import median

PINGS = 40
BLOCK = b"\0" * (1 << 18)
SENDS_S = 0.25  # how long blocks are sent


@dataclass(frozen=True)
class Line:
    """From one rank to another; None: not measured, or not to be had."""

    source: int
    target: int
    error: str | None = None
    latency_us: float | None = None  # half of the way there and back, the median
    there: float | None = None  # bytes a second
    back: float | None = None
    clock_s: float | None = None  # how far the target's clock is ahead
    clock_error_s: float | None = None


class Listener:
    """Answers the ranks that connect, until it is closed."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="isograd check network").start()

    def close(self) -> None:
        """Accept no more."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while wanted := connection.recv(1):
                if wanted == b"P":
                    connection.sendall(wanted)
                elif wanted == b"T":
                    connection.sendall(struct.pack("<d", time.time()))
                elif wanted == b"S":
                    connection.sendall(struct.pack("<q", _take(connection)))
                elif wanted == b"R":
                    _send(connection)
        except OSError:
            return


def measure(source: int, target: int, address: str, port: int, wait_s: float, *, speed: bool) -> Line:
    """What this rank sees of another one. `speed`: bandwidth too, not only whether it can be reached."""
    try:
        with socket.create_connection((address, port), wait_s) as connection:
            connection.settimeout(max(wait_s, 10 * SENDS_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = sorted(_ping(connection) for _ in range(PINGS))
            clocks = sorted(_clock(connection) for _ in range(5))
            there = back = None
            if speed:
                began = time.monotonic()
                connection.sendall(b"S")
                _send(connection)
                (taken,) = struct.unpack("<q", _exactly(connection, 8))
                there = taken / (time.monotonic() - began)
                began = time.monotonic()
                connection.sendall(b"R")
                back = _take(connection) / (time.monotonic() - began)
            error, ahead = clocks[0]
            return Line(source, target, None, median(trips) / 2 * 1e6, there, back, ahead, error)
    except OSError as error:
        return Line(source, target, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _ping(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(b"P")
    _exactly(connection, 1)
    return time.perf_counter() - began


def _clock(connection: socket.socket) -> tuple[float, float]:
    """(how far off this may be, how far the other clock is ahead)."""
    began = time.time()
    connection.sendall(b"T")
    (there,) = struct.unpack("<d", _exactly(connection, 8))
    ended = time.time()
    return abs(ended - began) / 2, there - (began + ended) / 2


def _send(connection: socket.socket) -> None:
    end = time.monotonic() + SENDS_S
    head = struct.pack("<i", len(BLOCK))
    while time.monotonic() < end:
        connection.sendall(head)
        connection.sendall(BLOCK)
    connection.sendall(struct.pack("<i", 0))


def _take(connection: socket.socket) -> int:
    total, into = 0, memoryview(bytearray(len(BLOCK)))
    while True:
        (size,) = struct.unpack("<i", _exactly(connection, 4))
        if not 0 < size <= len(BLOCK):
            return total
        got = 0
        while got < size:
            part = connection.recv_into(into[: size - got])
            if not part:
                raise ConnectionError("the other side has closed the connection")
            got += part
        total += size


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        found += part
    return found
