"""`isograd check network`: what the machines of a run are to each other, before a run finds out.

All ranks meet in the store where a run of theirs would meet, and say what they are: machine, address, versions. Each
then connects to all others over plain TCP, as gloo does; of many ranks, one of each machine. At last all of them join a
world, the run's own way of connecting, and sum numbers: one bandwidth. Rank 0 names what is wrong, and with which
ranks.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from isograd import __version__
from isograd.comm import raw, world
from isograd.comm.world import new_group
from isograd.errors import NetworkError

MANY = 32  # ranks, above which one of each machine connects to the others
SUMMED = 1 << 24  # bytes of each rank, whose sum is timed
SHOWN = 6
_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR


@dataclass(frozen=True)
class RankFacts:
    """What a rank says of itself. One that runs another version of this file may leave some of it out."""

    rank: int = 0
    host: str = ""
    backend: str = ""
    variable: str = ""  # NAME=value of what chooses the interface; empty: nothing does
    interface: str = ""
    address: str = ""  # where gloo or NCCL would listen; empty: the interface has none
    port: int = 0  # where this check listens
    versions: dict[str, str] = field(default_factory=dict)


def own_facts(rank: int, port: int, address: str) -> RankFacts:
    """This rank's."""
    backend = "nccl" if world.device().type == "cuda" else "gloo"
    name = f"{backend.upper()}_SOCKET_IFNAME"
    variable = f"{name}={os.environ[name]}" if name in os.environ else ""
    interface = next((i for i, a in addresses().items() if a == address), "")
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]  # a clone may have been edited
    own = f"{__version__} ({code})"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "isograd": own}
    return RankFacts(rank, socket.gethostname(), backend, variable, interface, address, port, versions)


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
    backend = "NCCL" if world.device().type == "cuda" else "GLOO"
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


@dataclass(frozen=True)
class RankLink:
    """From one rank to another that cannot be reached."""

    source: int
    target: int
    error: str


def connect(source: int, target: RankFacts, wait_s: float) -> list[RankLink]:
    """Why another rank cannot be reached, if it cannot."""
    try:
        socket.create_connection((target.address, target.port), wait_s).close()
    except OSError as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return [RankLink(source, target.rank, said)]
    return []


@dataclass(frozen=True)
class Preflight:
    """What all ranks know in the end."""

    facts: list[RankFacts]
    broken: list[RankLink]
    joined: dict[int, str]  # rank: why it could not join, or the wrong sum that it got
    bytes_per_s: float  # of the slowest rank in a sum of all ranks; 0: not measured


@dataclass(frozen=True)
class SharedNotes:
    """JSON by name, in the store where ranks meet."""

    store: Any
    rank: int
    size: int
    wait_s: float

    def put(self, name: str, value: Any) -> None:
        """Say something to the others."""
        self.store.set(f"isograd/preflight/{name}/{self.rank}", json.dumps(value))

    def gather(self, name: str, value: Any, times: float = 1.0) -> list[Any]:
        """What every rank says; None of those that have not in `times` the time to wait."""
        self.put(name, value)
        found, end = [], time.monotonic() + times * self.wait_s
        for rank in range(self.size):
            key = f"isograd/preflight/{name}/{rank}"
            while not (there := self.store.check([key])) and time.monotonic() < end:
                time.sleep(0.02)
            found.append(json.loads(self.store.get(key)) if there else None)
        return found


def preflight(wait_s: float) -> tuple[Preflight, SharedNotes]:
    """Look at the machines, on all ranks together."""
    notes = _connect_store(wait_s)
    rank, address = notes.rank, chosen()
    with socket.create_server((address or "127.0.0.1", 0), backlog=1024) as listener:  # the system answers
        said = notes.gather("rank", asdict(own_facts(rank, listener.getsockname()[1], address)))
        absent = [other for other, found in enumerate(said) if found is None]
        if absent:
            raise _absent(f"ranks {absent} of {notes.size}", wait_s, rank)
        known = {each.name for each in fields(RankFacts)}
        facts = [RankFacts(**{name: value for name, value in found.items() if name in known}) for found in said]
        peers = [facts[peer] for peer in connecting(facts) if peer != rank and rank in connecting(facts)]
        with ThreadPoolExecutor(MANY) as pool:
            found = pool.map(partial(connect, rank, wait_s=wait_s / 2), [peer for peer in peers if peer.address])
            broken = list(chain.from_iterable(found))
        well = notes.gather("well", not broken, 2.0)
    joins = all(well) and all(one.address for one in facts)
    joined, bytes_per_s = _join(rank, notes.size, wait_s) if joins else (None, 0.0)
    mine = {"broken": [asdict(link) for link in broken], "joined": joined, "bytes_per_s": bytes_per_s}
    lost: dict[str, Any] = {"broken": [], "joined": "no answer", "bytes_per_s": 0.0}
    every = [one or lost for one in notes.gather("found", mine, 3.0)]
    unjoined = {other: one["joined"] for other, one in enumerate(every) if one["joined"]}
    links = [RankLink(**link) for one in every for link in one["broken"]]
    return Preflight(facts, links, unjoined, min(one["bytes_per_s"] for one in every)), notes


def _absent(seen: str, wait_s: float, rank: int | str) -> NetworkError:
    return NetworkError("IG291", seen=seen, wait_s=wait_s, where=f"rank {rank} on {socket.gethostname()}")


def _connect_store(wait_s: float) -> SharedNotes:
    place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, rank, size = world.meet(wait_s)
    except (RuntimeError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise NetworkError(
                "IG299", seen=f"{place} on {socket.gethostname()}", where=f"rank {os.environ.get('RANK', '?')}"
            ) from None
        if came := re.search(r"(\d+)/(\d+) clients joined", str(error)):
            raise _absent(
                f"{came[1]} of {came[2]} ranks had connected to {place}", wait_s, os.environ["RANK"]
            ) from None
        raise NetworkError(
            "IG290", f"the place where ranks meet, {place}, cannot be reached",
            seen=str(error).splitlines()[0][:200], expected="a connection within the time limit",
            fix="start the command on the first machine, too; MASTER_ADDR is an address of it that the others reach "
            "(not 127.0.0.1), MASTER_PORT a port that is open between them; this machine's addresses are "
            f"{', '.join(f'{address} ({name})' for name, address in addresses().items())}",
            where=f"rank {os.environ.get('RANK', '?')}",
        ) from None  # fmt: skip
    return SharedNotes(store, rank, size, wait_s)


def connecting(facts: Sequence[RankFacts]) -> list[int]:
    """All ranks; of many, the first of each machine."""
    if len(facts) <= MANY:
        return [one.rank for one in facts]
    return sorted({one.host: one.rank for one in reversed(facts)}.values())


def _join(rank: int, size: int, wait_s: float) -> tuple[str | None, float]:
    """Join the world as a run does, and sum the ranks' numbers: what went wrong, if anything did, and the bandwidth."""
    said: list[tuple[str | None, float]] = [(f"no connection within {wait_s:g} s", 0.0)]

    def go() -> None:
        try:
            world.world()
            group = new_group("world", tuple(range(size)), rank)
            numbers = torch.full((SUMMED // 4,), rank + 1.0, device=world.device())
            raw.all_reduce(numbers[:1], group)
            began = time.monotonic()
            total = raw.to_host(raw.all_reduce(numbers, group))
            wrong = total[total != size * (size + 1) / 2]
            problem = f"a sum of {float(wrong[0])}, which is {size * (size + 1) / 2}" if len(wrong) else None
            said[0] = (problem, 2 * SUMMED * (size - 1) / size / (time.monotonic() - began))
        except Exception as error:
            said[0] = (f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", 0.0)

    thread = threading.Thread(target=go, daemon=True)  # gloo gives up after half an hour
    thread.start()
    thread.join(wait_s)
    return said[0]


def analyze(found: Preflight) -> list[NetworkError]:
    """Everything that is wrong, the causes first."""
    facts = found.facts
    wrong = [*_interfaces(facts)]
    if found.broken:
        ends = [(facts[link.source], facts[link.target], link.error) for link in found.broken]
        said = [f"{_place(a)} to {_place(b)} ({b.address}:{b.port}): {error}" for a, b, error in ends]
        wrong.append(NetworkError("IG292", seen=_listed(said)))
    if found.joined:
        wrong.append(NetworkError(
            "IG297", f"a world of these ranks over {facts[0].backend} does not work, although their connections do",
            seen=_listed([f"rank {rank}: {why}" for rank, why in found.joined.items()]),
            expected="a world that sums a number", fix="set NCCL_DEBUG=INFO for NCCL; read the first rank's error",
        ))  # fmt: skip
    if seen := _differ(facts):
        wrong.append(NetworkError(
            "IG295", "versions differ between ranks", seen=seen, expected="the same versions on every machine",
            fix="install the same versions",
        ))  # fmt: skip
    return wrong


def _place(one: RankFacts) -> str:
    return f"rank {one.rank} on {one.host}"


def _listed(said: Sequence[str]) -> str:
    return "; ".join(said[:SHOWN]) + ("; ..." if len(said) > SHOWN else "")


def _interfaces(facts: Sequence[RankFacts]) -> Iterator[NetworkError]:
    hosts = {one.host for one in facts}
    none = [one for one in facts if not one.address]
    looped = [one for one in facts if one.address.startswith("127.") and len(hosts) > 1]
    for wrong, seen in ((none, "no such interface, or none with an IPv4 address"), (looped, "the loopback address")):
        if wrong:
            said = [f"{one.variable or 'no variable set'}: {one.address or 'no address'}" for one in wrong]
            yield NetworkError(
                "IG293", "the interface at which ranks would listen cannot be reached from other machines",
                seen=f"{seen} on {_ranks(wrong)} ({', '.join(sorted(set(said)))})",
                expected="the interface that connects the machines",
                fix=f"set {wrong[0].backend.upper()}_SOCKET_IFNAME to its name on every machine; "
                "'ip -brief address' lists them",
            )  # fmt: skip


def _differ(facts: Sequence[RankFacts]) -> str:
    """Which ranks have not the versions that most have, and of what; empty: all are alike."""
    values = [one.versions for one in facts]
    usual = Counter(json.dumps(value, sort_keys=True) for value in values).most_common(1)[0][0]
    most: dict[str, str] = json.loads(usual)
    other = [one for one, value in zip(facts, values, strict=True) if value != most]
    others = other[0].versions if other else most
    names = [name for name in sorted({*most, *others}) if most.get(name) != others.get(name)]
    return _listed([
        f"{name} {others.get(name, 'is missing')} on {_ranks(other)}, {most.get(name, 'missing')} on the others"
        for name in names
    ])  # fmt: skip


def _ranks(facts: Sequence[RankFacts]) -> str:
    hosts = sorted({one.host for one in facts})
    numbers = ", ".join(str(one.rank) for one in facts[:SHOWN]) + (", ..." if len(facts) > SHOWN else "")
    return f"rank{'s' if len(facts) > 1 else ''} {numbers} ({', '.join(hosts[:SHOWN])})"


def render(found: Preflight, errors: Sequence[NetworkError]) -> str:
    """The table of machines, the bandwidth, then what is wrong."""
    by_host: dict[str, list[RankFacts]] = {}
    for one in found.facts:
        by_host.setdefault(one.host, []).append(one)
    ranks: list[tuple[str, ...]] = [("machine", "ranks", "interface", "address", "python", "torch", "isograd")]
    for host, ours in by_host.items():
        first = ours[0]
        numbers = ",".join(str(one.rank) for one in ours[:SHOWN]) + (",..." if len(ours) > SHOWN else "")
        ranks.append((host, numbers, first.interface or "-", first.address or "-", *first.versions.values()))
    speed = f"a sum over all ranks: {found.bytes_per_s * 8e-9:.2f} Gbit/s from and to each" if found.bytes_per_s else ""
    verdict = [str(error) for error in errors] or ["nothing is wrong"]
    widths = [max(len(row[at]) for row in ranks) for at in range(len(ranks[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in ranks]
    return "\n\n".join(["\n".join(table), *filter(None, [speed]), *verdict])
