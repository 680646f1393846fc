"""Whether the machine is quiet: how much its processors work for others than the race."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

ALLOWED = 0.05  # of all processors' time


class Watch:
    """From its making on, what the machine works for other processes than its own ones.

    Contestants that wait for their turn belong to the race: each of their connections wakes a hundred times a second,
    and a dozen of contestants would look like another job.
    """

    def __init__(self, own: Iterable[int] = ()) -> None:
        """`own`: the ids of the race's processes, besides this one."""
        self._own = [psutil.Process(), *map(psutil.Process, own)]
        self._began, self._work, self._mine = time.perf_counter(), _work(), self._worked()

    def foreign(self, more: float = 0.0) -> float:
        """The share of the processors' time that others used. `more`: seconds that own processes worked which have
        come and gone since."""
        available = (time.perf_counter() - self._began) * psutil.cpu_count()
        return max(0.0, _work() - self._work - (self._worked() - self._mine) - more) / available

    def disturbed(self, more: float = 0.0) -> bool:
        return self.foreign(more) > ALLOWED

    def _worked(self) -> float:
        return sum(map(_of, self._own))


def refuse_noise(seconds: float = 3.0) -> None:
    """End the program where other jobs use the machine, and name the largest of them."""
    processes = list(psutil.process_iter(["name"]))
    before = {p.pid: _of(p) for p in processes}
    watch = Watch()
    time.sleep(seconds)
    share = watch.foreign()
    if share > ALLOWED:
        used = sorted(((_of(p) - before[p.pid], p) for p in processes), key=lambda pair: pair[0], reverse=True)
        names = ", ".join(f"{p.info['name']} ({p.pid})" for seconds_used, p in used[:4] if seconds_used > 0.01)
        raise SystemExit(
            f"the machine is not quiet: other jobs use {share:.0%} of its processors ({names}). "
            "Times measured now would be wrong. Stop them, or say --anyway."
        )


def _work() -> float:
    """Seconds, over all processors. What the kernel does for the network on interrupts belongs to nobody."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
