"""Bytes on the wire, counted by this rank's own sockets."""

from __future__ import annotations

import os
import socket
import struct

NOT_SENT = 144  # offset of tcpi_notsent_bytes in Linux's struct tcp_info
BYTES_SENT = 200  # of tcpi_bytes_sent and tcpi_bytes_retrans (4.19 and later); the first includes the second
INFO_SIZE = 256


def sent_by_me() -> int:
    """The payload bytes that this process has given to its open TCP sockets: those that were sent, and those that wait
    for room at the receiver."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_SIZE)
        except OSError:  # the listing's own descriptor, or one closed meanwhile
            continue
        if len(info) < BYTES_SENT + 16:
            raise OSError("this kernel's tcp_info does not count bytes sent")
        sent, again = struct.unpack_from("=QQ", info, BYTES_SENT)
        total += sent - again + struct.unpack_from("=I", info, NOT_SENT)[0]
    return total
