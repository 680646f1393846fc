"""Bytes sent are those of this process's own TCP sockets, counted by the kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from benchmarks.seat import sent_on_loopback
from isograd.comm.wire import sent_by_me

SENT = 12_345


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            yield here, there


def test_what_a_tcp_socket_sends_is_counted_once_and_to_the_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    before, carried = sent_by_me(), sent_on_loopback()
    here.sendall(b"x" * SENT)
    arrived = 0
    while arrived < SENT:
        arrived += len(there.recv(1 << 16))
    assert sent_by_me() - before == SENT  # `there` is ours, too: what it receives does not count
    assert sent_on_loopback() - carried >= SENT  # with headers, and with the traffic of others


def test_pipes_files_and_other_sockets_do_not_count(tmp_path) -> None:
    one, other = socket.socketpair()
    read, write = os.pipe()
    with one, other, (tmp_path / "file").open("wb") as file:
        before = sent_by_me()
        one.sendall(b"x" * SENT)
        os.write(write, b"x" * 100)
        file.write(b"x" * SENT)
        assert sent_by_me() == before
    os.close(read)
    os.close(write)


def test_counting_leaves_no_descriptor_open(pair: tuple[socket.socket, socket.socket]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sent_by_me()
    assert len(os.listdir("/proc/self/fd")) == before
