"""All ranks meet in the store where a run of theirs would meet, say what they are, and measure every pair.

Pairs measure in rounds in which nobody has two partners, so that a machine's bandwidth is not shared by more pairs than
it has ranks. Of many ranks, one of each machine measures. At last all of them join a world and sum a number: the run's
own way of connecting.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from isograd.comm import raw
from isograd.errors import NetworkError
from isograd.network.facts import Facts, addresses, chosen, own, read
from isograd.network.line import Line, Listener, measure

MANY = 32  # ranks, above which one of each machine measures


@dataclass(frozen=True)
class Survey:
    """What rank 0 knows in the end."""

    facts: list[Facts]
    lines: list[Line]
    joined: dict[int, str]  # rank: why it could not join, or the wrong sum that it got


class _Store:
    """JSON by name, with a time limit."""

    def __init__(self, store: Any, wait_s: float) -> None:
        self._store, self.wait_s = store, wait_s

    def put(self, name: str, value: Any) -> None:
        self._store.set(f"isograd/network/{name}", json.dumps(value))

    def get(self, name: str, wait_s: float | None = None) -> Any:
        """None: nobody has put it in time."""
        key, end = f"isograd/network/{name}", time.monotonic() + (self.wait_s if wait_s is None else wait_s)
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        return json.loads(self._store.get(key))


def survey(paths: Sequence[Path], wait_s: float) -> tuple[Survey | None, int, _Store]:
    """(everything, on rank 0, else None; this rank; the store)."""
    store, rank, size = _meet(wait_s)
    address = chosen()
    listener = Listener(address or "127.0.0.1")
    mine = own(rank, listener.port, address, paths)
    store.put(f"rank/{rank}", asdict(mine))
    end = time.monotonic() + wait_s
    said = [store.get(f"rank/{other}", max(0.0, end - time.monotonic())) for other in range(size)]
    absent = [other for other, found in enumerate(said) if found is None]
    if absent:
        raise _absent(f"ranks {absent} of {size}", wait_s, rank)
    facts = [read(found) for found in said]
    lines: list[Line] = []
    for number, pairs in enumerate(rounds(measuring(facts))):
        for a, b in pairs:
            if rank in (a, b):
                peer = facts[b if rank == a else a]
                if peer.address:
                    lines.append(measure(rank, peer.rank, peer.address, peer.port, wait_s / 2, speed=rank == a))
        store.put(f"round/{number}/{rank}", True)
        for other in range(size):
            store.get(f"round/{number}/{other}", 2 * wait_s)
    bad = any(line.error for line in lines)
    store.put(f"bad/{rank}", bad)
    any_bad = [store.get(f"bad/{other}", 2 * wait_s) for other in range(size)] != [False] * size
    joined = None if any_bad or not all(one.address for one in facts) else _join(rank, size, wait_s)
    listener.close()
    store.put(f"found/{rank}", {"lines": [asdict(line) for line in lines], "joined": joined})
    if rank:
        return None, rank, store
    found = [store.get(f"found/{other}", 3 * wait_s) or {"lines": [], "joined": "no answer"} for other in range(size)]
    every = [Line(**line) for one in found for line in one["lines"]]
    return Survey(facts, every, {r: one["joined"] for r, one in enumerate(found) if one["joined"]}), rank, store


def _absent(seen: str, wait_s: float, rank: int | str) -> NetworkError:
    return NetworkError(
        "IG291", f"ranks that did not come within {wait_s:g} s", seen=seen,
        expected="every rank of the world, started at about the same time (--wait)",
        fix="start this command on every machine with the same --nnodes, --master-addr and --master-port, and a "
        "--node-rank of its own", where=f"rank {rank} on {socket.gethostname()}",
    )  # fmt: skip


def _meet(wait_s: float) -> tuple[_Store, int, int]:
    place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, rank, size = raw.meet(wait_s)
    except (RuntimeError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise NetworkError(
                "IG299", "another program has the port at which ranks meet", seen=f"{place} on {socket.gethostname()}",
                expected="a free port of the first machine",
                fix="ss -ltnp names the program (an earlier run?): end it, or take another MASTER_PORT on all machines",
                where=f"rank {os.environ.get('RANK', '?')}",
            ) from None  # fmt: skip
        if came := re.search(r"(\d+)/(\d+) clients joined", str(error)):
            raise _absent(f"{came[1]} of {came[2]} ranks had come to {place}", wait_s, os.environ["RANK"]) from None
        raise NetworkError(
            "IG290", f"the place where ranks meet, {place}, cannot be reached",
            seen=str(error).splitlines()[0][:200], expected="a connection within the time limit",
            fix="start the command on the first machine, too; MASTER_ADDR is an address of it that the others reach "
            "(not 127.0.0.1), MASTER_PORT a port that is open between them; this machine's addresses are "
            f"{', '.join(f'{address} ({name})' for name, address in addresses().items())}",
            where=f"rank {os.environ.get('RANK', '?')}",
        ) from None  # fmt: skip
    return _Store(store, wait_s), rank, size


def measuring(facts: Sequence[Facts]) -> list[int]:
    """All ranks; of many, the first of each machine."""
    if len(facts) <= MANY:
        return [one.rank for one in facts]
    first: dict[str, int] = {}
    for one in facts:
        first.setdefault(one.host, one.rank)
    return sorted(first.values())


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
