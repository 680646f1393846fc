"""Machines that no longer reach each other are noticed on both sides, long before a collective gives up.

Every rank has a thread that writes a sign of life into the store where the ranks met (torchrun's), over a connection of
its own, and reads that of the next rank. A rank whose neighbour has given no sign for half of `limit` seconds tells the
others through the store; one that gets no answer from the store is itself cut off. The store lies on one machine, so
each side of a cut sees one of the two. No collective is used: a collective is what waits for the machine that is gone.

A rank that computes gives its signs, however long it takes: the watchdog of stall.py finds it when it does not go on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from isograd.comm import raw

OFTEN = 16  # signs of life within the limit
_VERDICT = "isograd/pulse/verdict"


class Pulse:
    """This rank's signs of life, and what it knows of those of others."""

    def __init__(self, rank: int, size: int, limit: float) -> None:
        """Before a collective of all ranks, after which `start` may read what the others have written."""
        self.rank, self.size, self.limit = rank, size, limit
        self.patience = 1.0  # times the limit
        self._store = raw.store_line() if size > 1 else None
        self._heard = self._changed = time.monotonic()  # when the store answered; when the neighbour's sign changed
        self._silent: list[int] = []
        self._rounds = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._store.set(_sign(rank), "0")

    def start(self, hosts: Sequence[str]) -> None:
        """Give signs of life. On one machine the launcher sees deaths, and there is no network to lose."""
        if self._store is not None and len(set(hosts)) > 1:
            self._heard = self._changed = time.monotonic()
            self._thread = threading.Thread(target=self._beat, args=(self._store,), daemon=True, name="isograd pulse")
            self._thread.start()

    def close(self) -> None:
        """The run has ended: the other ranks expect no sign from here."""
        self._over.set()

    def lost(self) -> tuple[list[int], bool] | None:
        """(the ranks that give no sign of life, whether this rank is itself cut off); None: all is well."""
        if self._thread is None or self._over.is_set():
            return None
        if self._silent:
            return self._silent, False
        return ([], True) if self._quiet(self._heard) else None

    def _quiet(self, since: float) -> bool:
        return time.monotonic() - since > self.limit * self.patience / 2

    def _beat(self, store: Any) -> None:
        """Never raises: a store that answers with an error does not answer."""
        neighbour, before = (self.rank + 1) % self.size, b""
        try:
            while not self._over.wait(self.limit / OFTEN):
                self._rounds += 1
                store.set(_sign(self.rank), str(self._rounds))
                now = store.get(_sign(neighbour))
                if now != before:
                    before, self._changed = now, time.monotonic()
                if now != _GONE and self._quiet(self._changed):
                    store.set(_VERDICT, json.dumps(self._behind(store)))
                if store.check([_VERDICT]):
                    self._silent = json.loads(store.get(_VERDICT))
                self._heard = time.monotonic()
            store.set(_sign(self.rank), _GONE)
        except (RuntimeError, ValueError, OSError):  # torch's errors of a broken connection are RuntimeErrors
            return

    def _behind(self, store: Any) -> list[int]:
        """The ranks that stopped giving signs when the neighbour did: all count at the same pace."""
        said = [sign.decode() for sign in store.multi_get([_sign(rank) for rank in range(self.size)])]
        behind = OFTEN * self.patience / 4
        neighbour = (self.rank + 1) % self.size
        return [
            rank
            for rank, sign in enumerate(said)
            if rank == neighbour or (sign != _GONE.decode() and self._rounds - int(sign) > behind)
        ]


_GONE = b"gone"


def _sign(rank: int) -> str:
    return f"isograd/pulse/{rank}"
