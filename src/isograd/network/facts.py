"""What a rank says of itself: its machine, the address at which others will look for it, its versions and its code."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from isograd import __version__
from isograd.comm import raw

_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR
CODE = (".py", ".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Facts:
    """Of one rank."""

    rank: int
    host: str
    backend: str
    variable: str  # NAME=value of what chooses the interface; empty: nothing does
    interface: str
    address: str  # where gloo or NCCL would listen; empty: the interface has none
    port: int  # where this check listens
    versions: dict[str, str]
    code: dict[str, str]  # file: hash


def read(said: dict[str, Any]) -> Facts:
    """What a rank says of itself, which may run another version of this file: differing versions are told, not met."""
    nothing: dict[str, Any] = {f.name: {} if f.name in ("versions", "code") else 0 if f.name in ("rank", "port") else ""
               for f in fields(Facts)}  # fmt: skip
    return Facts(**{name: said.get(name, value) for name, value in nothing.items()})


def own(rank: int, port: int, address: str, paths: Sequence[Path]) -> Facts:
    """This rank's."""
    backend = "nccl" if raw.device().type == "cuda" else "gloo"
    name = f"{backend.upper()}_SOCKET_IFNAME"
    variable = f"{name}={os.environ[name]}" if name in os.environ else ""
    interface = next((i for i, a in addresses().items() if a == address), "")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "isograd": __version__}
    code = hashes(Path(__file__).parents[1], "isograd", (".py",))
    for path in paths:
        code |= hashes(path, path.name)
    return Facts(rank, socket.gethostname(), backend, variable, interface, address, port, versions, code)


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def chosen() -> str:
    """The address that the backend will listen at; empty: it will find none.

    gloo takes the interface of GLOO_SOCKET_IFNAME, else the address of the host's own name, else loopback. NCCL takes
    the first interface whose name begins as NCCL_SOCKET_IFNAME says, else the first that is not loopback.
    """
    here = addresses()
    backend = "NCCL" if raw.device().type == "cuda" else "GLOO"
    wanted = os.environ.get(f"{backend}_SOCKET_IFNAME")
    if wanted:
        names = wanted.removeprefix("=").split(",")
        exact = backend == "GLOO" or wanted.startswith("=")
        fits = [i for i in here if any(i == name if exact else i.startswith(name) for name in names)]
        return here[fits[0]] if fits else ""
    if backend == "NCCL":
        return next((address for name, address in here.items() if not name.startswith(("lo", "docker"))), "")
    try:
        own_name = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return own_name if own_name in here.values() or own_name.startswith("127.") else "127.0.0.1"


def hashes(path: Path, name: str, kinds: Sequence[str] = CODE) -> dict[str, str]:
    """The hash of each file of code below a path, under names that do not depend on where it lies."""
    files = sorted(f for f in path.rglob("*") if f.suffix in kinds and f.is_file()) if path.is_dir() else [path]
    found = {}
    for file in files:
        place = f"{name}/{file.relative_to(path)}" if path.is_dir() else name
        found[place] = sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else "not there"
    return found
