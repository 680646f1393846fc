"""`isograd check network`: what the machines of a run are to each other, before a run finds out.

All ranks meet in the store where a run of theirs would meet, and say what they are: machine, address, versions, code.
Every pair then connects over plain TCP, as gloo does, and one of them sends blocks for a moment: one bandwidth for each
link. Pairs measure in rounds in which no rank has two partners, so that a machine's bandwidth is not shared by more
pairs than it has ranks; of many ranks, one of each machine measures. At last all of them join a world and sum a number:
the run's own way of connecting. Rank 0 names what is wrong, and with which ranks.
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
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import torch

from isograd import __version__
from isograd.comm import raw
from isograd.errors import NetworkError

MANY = 32  # ranks, above which one of each machine measures
BLOCK = b"\0" * (1 << 18)
SEND_S = 0.25  # how long blocks are sent
SHOWN = 6
CODE = (".py", ".yaml", ".yml", ".json")
_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR


@dataclass(frozen=True)
class RankFacts:
    """What a rank says of itself."""

    rank: int
    host: str
    backend: str
    variable: str  # NAME=value of what chooses the interface; empty: nothing does
    interface: str
    address: str  # where gloo or NCCL would listen; empty: the interface has none
    port: int  # where this check listens
    versions: dict[str, str]
    code: dict[str, str]  # file: hash


def read_facts(said: dict[str, Any]) -> RankFacts:
    """What a rank says of itself, which may run another version of this file."""
    nothing: dict[str, Any] = {f.name: {} if f.name in ("versions", "code") else 0 if f.name in ("rank", "port") else ""
               for f in fields(RankFacts)}  # fmt: skip
    return RankFacts(**{name: said.get(name, value) for name, value in nothing.items()})


def own_facts(rank: int, port: int, address: str, paths: Sequence[Path]) -> RankFacts:
    """This rank's."""
    backend = "nccl" if raw.device().type == "cuda" else "gloo"
    name = f"{backend.upper()}_SOCKET_IFNAME"
    variable = f"{name}={os.environ[name]}" if name in os.environ else ""
    interface = next((i for i, a in addresses().items() if a == address), "")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "isograd": __version__}
    code = hashes(Path(__file__).parents[1], "isograd", (".py",))
    for path in paths:
        code |= hashes(path, path.name)
    return RankFacts(rank, socket.gethostname(), backend, variable, interface, address, port, versions, code)


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


@dataclass(frozen=True)
class RankLink:
    """From one rank to another."""

    source: int
    target: int
    error: str | None = None
    bytes_per_s: float | None = None  # None: not measured


class LinkListener:
    """Counts the blocks that each connection sends, until it is closed."""

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
            threading.Thread(target=_count, args=(connection,), daemon=True).start()


def _count(connection: socket.socket) -> None:
    """Answer the bytes that came, when the other side has finished sending."""
    total, into = 0, bytearray(len(BLOCK))
    with connection:
        connection.settimeout(60)
        try:
            while got := connection.recv_into(into):
                total += got
            connection.sendall(struct.pack("<q", total))
        except OSError:
            return


def measure(source: int, target: int, address: str, port: int, wait_s: float, *, speed: bool) -> RankLink:
    """Connect to another rank; `speed`: and send blocks."""
    try:
        with socket.create_connection((address, port), wait_s) as connection:
            connection.settimeout(max(wait_s, 10 * SEND_S))
            began = time.monotonic()
            while speed and time.monotonic() < began + SEND_S:
                connection.sendall(BLOCK)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while len(answer) < 8:
                answer += (received := connection.recv(8 - len(answer)))
                if not received:
                    raise ConnectionError("the other side has closed the connection")
            rate = struct.unpack("<q", answer)[0] / (time.monotonic() - began) if speed else None
            return RankLink(source, target, bytes_per_s=rate)
    except OSError as error:
        return RankLink(source, target, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


@dataclass(frozen=True)
class Preflight:
    """What rank 0 knows in the end."""

    facts: list[RankFacts]
    links: list[RankLink]
    joined: dict[int, str]  # rank: why it could not join, or the wrong sum that it got


class _Store:
    """JSON by name, with a time limit."""

    def __init__(self, store: Any, wait_s: float) -> None:
        self._store, self.wait_s = store, wait_s

    def put(self, name: str, value: Any) -> None:
        self._store.set(f"isograd/preflight/{name}", json.dumps(value))

    def get(self, name: str, wait_s: float | None = None) -> Any:
        """None: nobody has put it in time."""
        key, end = f"isograd/preflight/{name}", time.monotonic() + (self.wait_s if wait_s is None else wait_s)
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        return json.loads(self._store.get(key))


def preflight(paths: Sequence[Path], wait_s: float) -> tuple[Preflight | None, int, _Store]:
    """(everything, on rank 0, else None; this rank; the store)."""
    store, rank, size = _connect_store(wait_s)
    address = chosen()
    listener = LinkListener(address or "127.0.0.1")
    mine = own_facts(rank, listener.port, address, paths)
    store.put(f"rank/{rank}", asdict(mine))
    end = time.monotonic() + wait_s
    said = [store.get(f"rank/{other}", max(0.0, end - time.monotonic())) for other in range(size)]
    absent = [other for other, found in enumerate(said) if found is None]
    if absent:
        raise _absent(f"ranks {absent} of {size}", wait_s, rank)
    facts = [read_facts(found) for found in said]
    links: list[RankLink] = []
    for number, pairs in enumerate(rounds(ranks_that_measure(facts))):
        for a, b in pairs:
            if rank in (a, b):
                peer = facts[b if rank == a else a]
                if peer.address:
                    links.append(measure(rank, peer.rank, peer.address, peer.port, wait_s / 2, speed=rank == a))
        store.put(f"round/{number}/{rank}", True)
        for other in range(size):
            store.get(f"round/{number}/{other}", 2 * wait_s)
    bad = any(link.error for link in links)
    store.put(f"bad/{rank}", bad)
    any_bad = [store.get(f"bad/{other}", 2 * wait_s) for other in range(size)] != [False] * size
    joined = None if any_bad or not all(one.address for one in facts) else _join(rank, size, wait_s)
    listener.close()
    store.put(f"found/{rank}", {"links": [asdict(link) for link in links], "joined": joined})
    if rank:
        return None, rank, store
    found = [store.get(f"found/{other}", 3 * wait_s) or {"links": [], "joined": "no answer"} for other in range(size)]
    every = [RankLink(**link) for one in found for link in one["links"]]
    return Preflight(facts, every, {r: one["joined"] for r, one in enumerate(found) if one["joined"]}), rank, store


def _absent(seen: str, wait_s: float, rank: int | str) -> NetworkError:
    return NetworkError(
        "IG291", f"ranks did not start within {wait_s:g} s", seen=seen,
        expected="every rank of the world, started at about the same time (--wait)",
        fix="start this command on every machine with the same --nnodes, --master-addr and --master-port, and a "
        "--node-rank of its own", where=f"rank {rank} on {socket.gethostname()}",
    )  # fmt: skip


def _connect_store(wait_s: float) -> tuple[_Store, int, int]:
    place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, rank, size = raw.meet(wait_s)
    except (RuntimeError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise NetworkError(
                "IG299", "the port at which ranks meet is used by another program",
                seen=f"{place} on {socket.gethostname()}",
                expected="a free port of the first machine",
                fix="ss -ltnp names the program (an earlier run?): end it, or take another MASTER_PORT on all machines",
                where=f"rank {os.environ.get('RANK', '?')}",
            ) from None  # fmt: skip
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
    return _Store(store, wait_s), rank, size


def ranks_that_measure(facts: Sequence[RankFacts]) -> list[int]:
    """All ranks; of many, the first of each machine."""
    if len(facts) <= MANY:
        return [one.rank for one in facts]
    return sorted({one.host: one.rank for one in reversed(facts)}.values())


def rounds(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds in which each rank has one partner at most."""
    ring: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _join(rank: int, size: int, wait_s: float) -> str | None:
    """Join the world as a run does, and sum the ranks' numbers; what went wrong, if anything did."""
    said = [f"no connection within {wait_s:g} s"]

    def go() -> None:
        try:
            raw.world()
            group = raw.new_group("world", tuple(range(size)), rank)
            total = raw.all_reduce(torch.tensor([rank + 1.0], device=raw.device()), group)
            right = size * (size + 1) / 2
            said[0] = "" if float(total) == right else f"a sum of {float(total)}, which is {right}"
        except Exception as error:
            said[0] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"

    thread = threading.Thread(target=go, daemon=True)  # gloo gives up after half an hour
    thread.start()
    thread.join(wait_s)
    return said[0] or None


def analyze(found: Preflight) -> list[NetworkError]:
    """Everything that is wrong, the causes first."""
    facts = found.facts
    return [
        *_interfaces(facts), *_connections(found), *_joins(found), *_differ(facts, "versions", "IG295"),
        *_differ(facts, "code", "IG296"),
    ]  # fmt: skip


def _interfaces(facts: Sequence[RankFacts]) -> list[NetworkError]:
    hosts = {one.host for one in facts}
    none = [one for one in facts if not one.address]
    looped = [one for one in facts if one.address.startswith("127.") and len(hosts) > 1]
    errors = []
    for wrong, seen in ((none, "no such interface, or none with an IPv4 address"), (looped, "the loopback address")):
        if wrong:
            said = [f"{one.variable or 'no variable set'}: {one.address or 'no address'}" for one in wrong]
            errors.append(NetworkError(
                "IG293", "the interface at which ranks would listen cannot be reached from other machines",
                seen=f"{seen} on {_ranks(wrong)} ({', '.join(sorted(set(said)))})",
                expected="the interface that connects the machines",
                fix=f"set {wrong[0].backend.upper()}_SOCKET_IFNAME to its name on every machine; "
                "'ip -brief address' lists them",
            ))  # fmt: skip
    return errors


def _connections(found: Preflight) -> list[NetworkError]:
    broken = [link for link in found.links if link.error]
    if not broken:
        return []
    facts = found.facts

    def spell(link: RankLink) -> str:
        a, b = facts[link.source], facts[link.target]
        return f"rank {a.rank} on {a.host} to rank {b.rank} on {b.host} ({b.address}:{b.port}): {link.error}"

    return [
        NetworkError(
            "IG292", f"{len(broken)} of {len(found.links)} connections between ranks cannot be made",
            seen="; ".join(map(spell, broken[:SHOWN])) + ("; ..." if len(broken) > SHOWN else ""),
            expected="TCP between all machines, in both directions, at any port above 1023",
            fix="open these ports between the machines; ranks listen at ports that the system chooses "
            "('sysctl net.ipv4.ip_local_port_range')",
        )
    ]  # fmt: skip


def _joins(found: Preflight) -> list[NetworkError]:
    if not found.joined:
        return []
    backend = found.facts[0].backend
    return [
        NetworkError(
            "IG297", f"a world of these ranks over {backend} does not work, although their connections do",
            seen="; ".join(f"rank {rank}: {why}" for rank, why in list(found.joined.items())[:SHOWN]),
            expected="a world that sums a number", fix="set NCCL_DEBUG=INFO for NCCL; read the first rank's error",
        )
    ]  # fmt: skip


def _differ(facts: Sequence[RankFacts], part: str, code: str) -> list[NetworkError]:
    """Of versions or code: which ranks are not as most are, and in what."""
    values: list[dict[str, str]] = [getattr(one, part) for one in facts]
    usual = Counter(json.dumps(value, sort_keys=True) for value in values).most_common(1)[0][0]
    most: dict[str, str] = json.loads(usual)
    other = [one for one, value in zip(facts, values, strict=True) if value != most]
    if not other:
        return []
    others: dict[str, str] = getattr(other[0], part)
    differ = "differs" if part == "code" else "differ"
    names = [name for name in sorted({*most, *others}) if most.get(name) != others.get(name)]
    seen = [f"{name} {others.get(name, 'is missing')} on {_ranks(other)}, {most.get(name, 'missing')} on the others"
            for name in names[:SHOWN]]  # fmt: skip
    return [
        NetworkError(
            code, f"{part} {differ} between ranks", seen="; ".join(seen) + ("; ..." if len(names) > SHOWN else ""),
            expected=f"the same {part} on every machine",
            fix="install the same versions" if part == "versions" else "copy the same files to every machine",
        )
    ]  # fmt: skip


def _ranks(facts: Sequence[RankFacts]) -> str:
    hosts = sorted({one.host for one in facts})
    numbers = ", ".join(str(one.rank) for one in facts[:SHOWN]) + (", ..." if len(facts) > SHOWN else "")
    return f"rank{'s' if len(facts) > 1 else ''} {numbers} ({', '.join(hosts[:SHOWN])})"


def render(found: Preflight, errors: Sequence[NetworkError]) -> str:
    """The tables, then what is wrong."""
    by_host: dict[str, list[RankFacts]] = {}
    for one in found.facts:
        by_host.setdefault(one.host, []).append(one)
    ranks: list[tuple[str, ...]] = [("machine", "ranks", "interface", "address", "python", "torch", "isograd")]
    for host, ours in by_host.items():
        first = ours[0]
        numbers = ",".join(str(one.rank) for one in ours[:SHOWN]) + (",..." if len(ours) > SHOWN else "")
        ranks.append((host, numbers, first.interface or "-", first.address or "-", *first.versions.values()))
    pairs: dict[tuple[str, str], list[RankLink]] = {}
    for link in found.links:
        low, high = sorted((found.facts[link.source].host, found.facts[link.target].host))
        pairs.setdefault((low, high), []).append(link)
    rows: list[tuple[str, ...]] = [("between", "and", "pairs", "Gbit/s", "worst")]
    for (a, b), links in sorted(pairs.items()):
        rates = [link.bytes_per_s * 8e-9 for link in links if link.bytes_per_s is not None]
        measured = (f"{median(rates):.2f}", f"{min(rates):.2f}") if rates else ("none", "none")
        rows.append((a, b, str(len(links) // 2), *measured))
    verdict = [str(error) for error in errors] or ["nothing is wrong"]
    return "\n\n".join(["\n".join(_columns(ranks)), "\n".join(_columns(rows)), *verdict])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def to_json(found: Preflight, errors: Sequence[NetworkError]) -> dict[str, Any]:
    """The same for programs; the code of ranks is left out."""
    said = [{"code": e.code, "what": e.what, "seen": e.seen, "expected": e.expected, "fix": e.fix} for e in errors]
    ranks = [{name: value for name, value in asdict(one).items() if name != "code"} for one in found.facts]
    return {"ranks": ranks, "links": [asdict(link) for link in found.links], "findings": said}
