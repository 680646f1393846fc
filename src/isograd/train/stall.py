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
from pathlib import Path

from isograd import inside
from isograd.errors import TrainError

STALLED = 7
_WAITS = "isograd/comm/raw.py"  # the only file from which ranks talk to each other


def happened(folder: Path) -> bool:
    """Whether the run's last end was a stall; every run sweeps its ranks' reports at its start."""
    return any((folder / "stalled").glob("rank-*.txt"))


class Watchdog:
    """`beat(what)` says that this rank goes on; without one for `limit` seconds the process ends.

    Until `stepped` is called it has ten times as long: first steps import, compile and load.
    """

    def __init__(self, folder: Path, rank: int, size: int, limit: float, where: str) -> None:
        self.folder, self.rank, self.size, self.limit, self.where = folder / "stalled", rank, size, limit, where
        self.main = threading.main_thread().ident
        self._what, self._last = "starting", time.monotonic()
        self.patience = 10.0
        self._over = threading.Event()
        self._report().unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="isograd stall watchdog")
        self._thread.start()

    def beat(self, what: str) -> None:
        self._what, self._last = what, time.monotonic()

    def stepped(self) -> None:
        self.patience = 1.0

    def close(self) -> None:
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
        time.sleep(0.5)  # the first to leave would look like the culprit
        os._exit(STALLED)

    def _speaks(self) -> bool:
        """The first rank that gave a sign speaks for all."""
        return all(not self._report(rank).exists() for rank in range(self.rank))

    def diagnosis(self) -> str:
        reports = {rank: _read(self._report(rank)) for rank in range(self.size)}
        silent = [rank for rank, (kind, _) in reports.items() if kind != "waits"]
        others = f"the others wait for rank{'s' if len(silent) > 1 else ''} {_spell(silent)}"
        error = TrainError(
            "IG980",
            f"no progress for {self.limit * self.patience:g} s",
            seen=others if silent else "every rank waits in a collective, so they wait for different ones",
            expected="a step within safety.stall_s on every rank",
            fix=f"read the stacks below; all of them are in {self.folder}",
        )
        lines = [str(error)]
        for rank in (silent or list(reports))[:4]:
            kind, text = reports[rank]
            lines.append(f"\nrank {rank}:" if kind else f"\nrank {rank} gave no sign: stopped, dead or out of reach")
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


def _spell(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
