"""A rank that falls silent is named, with its stack, within the limit; then the run ends with exit code 7.

Every rank's watchdog sees its own loop stand still, because the others wait for the silent one in a collective. Each
then writes where it is into the run's folder. Whoever is *not* inside a collective, or gives no sign at all, is the one
that the others wait for. No collective is used to find out: they are what hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from isograd import inside
from isograd.errors import TrainError

STALLED = 7
_WAITS = "isograd/comm/raw.py"  # the only file from which ranks talk to each other
FIRST = 10.0  # times the limit, until the first step is done


def patience(limit: float) -> float:
    """Seconds that collectives must wait at least, so that the watchdog is the first to speak."""
    return 2 * FIRST * limit + 60


def happened(folder: Path) -> bool:
    """Whether the run's last end was a stall; every run sweeps its ranks' reports at its start."""
    return any((folder / "stalled").glob("rank-*.txt"))


class Watchdog:
    """`beat(what)` says that this rank makes progress; without a beat for `limit` seconds the process ends.

    Between `joined` and `stepped` it has ten times as long: first steps import, compile and load.
    """

    def __init__(self, folder: Path, rank: int, size: int, limit: float) -> None:
        """Started before the ranks have joined each other: a rank that never comes is named, too."""
        self.folder, self.rank, self.size, self.limit = folder / "stalled", rank, size, limit
        self.where, self.has_joined = f"rank {rank}", False
        self.main = threading.main_thread().ident
        self._what, self._last = "joining the other ranks", time.monotonic()
        self.patience = 1.0
        self.before_end: Callable[[], None] = lambda: None  # what the process may still finish
        self._over = threading.Event()
        for report in self.folder.glob("rank-*"):  # of an earlier run
            report.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="isograd stall watchdog")
        self._thread.start()

    def beat(self, what: str) -> None:
        """This rank makes progress, and does `what` next."""
        self._what, self._last = what, time.monotonic()

    def joined(self, where: str) -> None:
        """All ranks are there; `where` says which one this is."""
        self.where, self.has_joined, self.patience = where, True, FIRST
        self.beat("starting")

    def stepped(self) -> None:
        """The first step is done: from now on the limit itself counts."""
        self.patience = 1.0

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _report(self, rank: int | None = None) -> Path:
        return self.folder / f"rank-{self.rank if rank is None else rank:05d}.txt"

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.limit / 10)):
            if time.monotonic() - self._last > self.limit * self.patience:
                self._end()

    def _end(self) -> None:
        frames = sys._current_frames()
        stack = traceback.format_stack(frames[self.main or 0])
        # On a GPU backward runs in threads of its own, and may wait there.
        waits = any(_WAITS in line for frame in frames.values() for line in traceback.format_stack(frame))
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._report().with_suffix(".partial")
        said = f"{'waits' if waits else 'silent'}\n{self.where}: {self._what}\n{''.join(stack)}"
        inside.write_text(partial, said)
        partial.replace(self._report())
        end = time.monotonic() + min(10.0, max(1.0, self.limit / 4))
        while time.monotonic() < end and not all(self._report(rank).exists() for rank in range(self.size)):
            time.sleep(0.05)
        if self._speaks():
            print(self.diagnosis(), file=sys.stderr, flush=True)
        self.before_end()
        time.sleep(0.5)  # the first to leave would look like the culprit
        os._exit(STALLED)

    def _speaks(self) -> bool:
        """The first rank that gave a sign speaks for all."""
        return all(not self._report(rank).exists() for rank in range(self.rank))

    def diagnosis(self) -> str:
        """The silent ranks and where they were, from the reports of all ranks."""
        reports = {rank: _read(self._report(rank)) for rank in range(self.size)}
        silent = [rank for rank, (kind, _) in reports.items() if kind != "waits"]
        spelled = f"rank{'s' if len(silent) > 1 else ''} {_spell(silent)}"
        seen = f"the others wait for {spelled}" if self.has_joined else f"{spelled} of {self.size} did not join"
        if not silent and len({_stack(text) for _, text in reports.values()}) == 1:
            seen = "every rank waits at the same place in the program: their connections are lost"
        elif not silent:
            seen = "every rank waits in a collective, at different places: they wait for different ones"
        error = TrainError(
            "IG980",
            f"no progress for {self.limit * self.patience:g} s",
            seen=seen,
            expected="a step within safety.stall_s on every rank" if self.has_joined else f"{self.size} ranks",
            fix=f"read the stacks below; all of them are in {self.folder}"
            if self.has_joined
            else "start the missing ranks, or look at MASTER_ADDR and the network of their machines",
        )
        lines = [str(error)]
        for rank in (silent or list(reports))[:4]:
            kind, text = reports[rank]
            gave_none = "gave no sign: stopped, dead or out of reach" if self.has_joined else "was never seen"
            lines.append(f"\nrank {rank}:" if kind else f"\nrank {rank} {gave_none}")
            lines.append(text.rstrip())
        return "\n".join(lines)


def _read(file: Path) -> tuple[str, str]:
    """(waits or silent, where and stack); both empty when the rank wrote nothing."""
    try:
        with file.open() as opened:
            kind, _, text = opened.read(1 << 16).partition("\n")
            return kind, text
    except OSError:
        return "", ""


def _stack(text: str) -> str:
    """A report without its first line, which says which rank it is of."""
    return text.partition("\n")[2]


def _spell(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
