"""Names the ranks that the others wait for, step after step, though they do come: stragglers.

A thread looks EVERY seconds whether its rank waits for a message. The seconds so spent travel with the flag that ranks
exchange after each step in any case, so no message is added. The rank that all others wait for waits least: by how much
less than the median of the others, that is how late it came. This holds whatever ranks do within a step: under dp they
meet at its end, under tp in each layer, under pp at each micro-batch.

On NCCL it is the GPU that waits, and nothing is seen here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from isograd.comm.world import process

EVERY = 0.02
STEPS, OFTEN = 10, 8  # a straggler is late in so many of so many steps
LEAST, SHARE = 0.05, 0.1  # what counts as late: so many seconds, and this share of the step


class Waiting:
    """How long this rank has waited for messages of others."""

    def __init__(self) -> None:
        self._seconds = self._taken = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="isograd waiting")
        self._thread.start()

    def _look(self) -> None:
        before = time.monotonic()
        while not self._over.wait(EVERY):
            now = time.monotonic()
            if process.awaited() is not None:
                self._seconds += min(now - before, 5 * EVERY)  # longer: this process itself got no turn
            before = now

    def take(self) -> float:
        """Seconds since the last call."""
        before, self._taken = self._taken, self._seconds
        return self._taken - before

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._thread.join()


class Stragglers:
    """What the ranks of a run have said after each step."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: of each rank, its machine."""
        self._hosts, self._late = hosts, deque[list[float]](maxlen=STEPS)
        # Of each rank: steps since it was named, and how many there must be before it is named again.
        self._count, self._pause = [0] * len(hosts), [STEPS] * len(hosts)

    def after(self, seconds: float, waited: Sequence[float]) -> list[str]:
        """Each rank has waited so long in a step of so many seconds. A sentence for each rank to be named now: one that
        is late all the time is named after 10 steps, 20 more, 40 more, and so on."""
        others = [median([*waited[:rank], *waited[rank + 1 :]]) for rank in range(len(waited))]
        late = [theirs - own for theirs, own in zip(others, waited, strict=True)]
        self._late.append([each if each > max(LEAST, SHARE * seconds) else 0.0 for each in late])
        return [text for rank in range(len(waited)) if (text := self._named(rank))]

    def _named(self, rank: int) -> str:
        late = [step[rank] for step in self._late if step[rank]]
        self._count[rank] += 1
        if len(late) < OFTEN or self._count[rank] < self._pause[rank]:
            return ""
        self._count[rank], self._pause[rank] = 0, 2 * self._pause[rank]
        on = f" on {self._hosts[rank]}" if len(set(self._hosts)) > 1 else ""
        often = f"in {len(late)} of the last {STEPS} steps"
        return f"straggler: rank {rank}{on} came {median(late):.2g} s after the median {often}"
