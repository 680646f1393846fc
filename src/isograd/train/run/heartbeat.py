"""Machines that no longer reach each other are noticed on both sides, long before a collective gives up.

Every rank has a thread that writes a sign of life into the store where the ranks met (torchrun's), over a connection of
its own, and reads that of the next rank. A rank whose neighbour has given no sign for half of `limit` seconds tells the
others through the store; one that gets no answer from the store is itself cut off. The store lies on one machine, so
each side of a cut sees one of the two. No collective is used: a collective is what waits for the machine that is gone.

A rank that computes gives its signs, however long it takes: the watchdog finds it when it does not go on.
Seconds in which this process itself was suspended do not count.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from isograd.comm.world import clone_store
from isograd.elastic.progress import StallTimer

OFTEN = 16  # signs of life within the limit
LAST_S = 5.0  # for the last sign, where the store does not answer
_VERDICT = "isograd/heartbeat/verdict"


class Heartbeat:
    """This rank's signs of life, and what it knows of those of others."""

    def __init__(self, rank: int, size: int, limit: float) -> None:
        """Before a collective of all ranks, after which `start` may read what the others have written."""
        self.rank, self.size, self.limit = rank, size, limit
        self.patience = 1.0  # times the limit
        self._store = clone_store() if size > 1 else None
        self.often = limit / OFTEN  # seconds between two signs
        self._cut_off = StallTimer(2 * self.often)  # since the store has answered, as `lost` sees it
        self._silent: list[int] = []
        self._rounds = 0  # that the store has answered
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._store.set(_sign(rank), "0")

    def start(self, hosts: Sequence[str]) -> None:
        """Give signs of life. On one machine the launcher sees deaths, and there is no network to lose."""
        if self._store is not None and len(set(hosts)) > 1:
            self._thread = threading.Thread(
                target=self._beat, args=(self._store,), daemon=True, name="isograd heartbeat"
            )
            self._thread.start()

    def close(self) -> None:
        """The run has ended: the other ranks expect no sign from here."""
        self._over.set()
        if self._thread is not None:  # torch's store aborts a process that ends while a thread is inside it
            self._thread.join(LAST_S)

    def lost(self) -> tuple[list[int], bool] | None:
        """(the ranks that give no sign of life, whether this rank is itself cut off); None: all is well."""
        if self._thread is None or self._over.is_set():
            return None
        if self._silent:
            return self._silent, False
        return ([], True) if self._cut_off.look(self._rounds) > self._longest else None

    @property
    def _longest(self) -> float:
        return self.limit * self.patience / 2

    def _beat(self, store: Any) -> None:
        """Never raises: a store that answers with an error does not answer."""
        neighbour, quiet, before = (self.rank + 1) % self.size, StallTimer(2 * self.often), list[bytes]()
        signs = [_sign(rank) for rank in range(self.size)]
        try:
            while not self._over.wait(self.often):
                store.set(_sign(self.rank), str(self._rounds + 1))
                now = store.get(_sign(neighbour))
                silent = 0.0 if now == _GONE else quiet.look(now)
                if silent <= self._longest / 2:
                    before = []
                elif not before:  # whose signs are the same from here on are silent, too
                    before = store.multi_get(signs)
                if silent > self._longest:
                    pairs = enumerate(zip(before, store.multi_get(signs), strict=True))
                    store.set(_VERDICT, json.dumps([rank for rank, (a, b) in pairs if a == b != _GONE]))
                if store.check([_VERDICT]):
                    self._silent = json.loads(store.get(_VERDICT))
                self._rounds += 1
            store.set(_sign(self.rank), _GONE)
        except (RuntimeError, ValueError, OSError):  # torch's errors of a broken connection are RuntimeErrors
            return


_GONE = b"gone"


def _sign(rank: int) -> str:
    return f"isograd/heartbeat/{rank}"
