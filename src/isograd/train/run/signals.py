"""How a run is asked to end: a signal, or a file named STOP in its folder. All ranks end after the same step.

A rank only notes the request; the loop exchanges it once per step, so that no rank leaves while others compute. The run
then saves and exits with 75, "try again later" in sysexits.h, which schedulers take as a reason to queue it again.

A command that starts ranks itself takes the signals for all of them, from its first moment on: ranks that are still
being made could not receive them. It passes a request on as a file, which the first rank looks for.

A file GROW makes a run that has become smaller grow again (docs/resilience.md). New processes import from the disk what
they still need: when isograd's files are no longer those that the run began with, they are refused.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPING = b"stopping: a step that has begun is finished and saved; Ctrl-C again ends at once\n"
GROW = "GROW"  # a file
GROWS = "ranks come back"
GROW_EVENT = "grow"  # in metrics.jsonl
NO_RANK_MISSING = f"no rank joins: a file {GROW} was found, and removed, while the run has all ranks of its layout"
SHOWN = 5  # files
_PACKAGE = Path(__file__).parents[2]


class SignalListener:
    """Notes the signals that ask this process to stop. Those that it was started to ignore (nohup) stay ignored."""

    def __init__(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        self.why = ""
        self._file: Path | None = None
        self._before: dict[signal.Signals, Any] = {}
        self.listen(signals)

    def listen(self, signals: Iterable[signal.Signals]) -> None:
        """Note these signals, too; SIGINT once, as a second Ctrl-C ends at once. Only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.why = self.why or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if self._file is not None:
            self._file.touch()
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            with suppress(OSError):
                os.write(2, STOPPING)  # print could be interrupted by itself

    def forward_to(self, file: Path) -> None:
        """Make this file when asked, or now if that was earlier."""
        self._file = file
        if self.why:
            file.touch()

    def close(self) -> None:
        """Give the handlers back."""
        for number, before in self._before.items():
            signal.signal(number, before)


class StopRequest:
    """What a rank knows of requests to stop: its own signals, the launcher's file, and STOP in the run's folder."""

    def __init__(
        self,
        folder: Path,
        listener: SignalListener,
        *,
        looks: bool,
        stop_file: Path | None = None,
        grows: bool | None = None,
    ) -> None:
        """looks: whether this rank looks for the files (one does). grows: whether the file GROW ends the run, as
        it has fewer ranks than it may have; None: it is not looked for."""
        self.file, self._grow, self._grows = folder / "STOP", folder / GROW, grows
        self._listener, self._looks, self._stop_file = listener, looks, stop_file
        self._seen = ""

    @property
    def why(self) -> str:
        """Who asked; empty: nobody."""
        return self._listener.why or self._seen

    def is_set(self) -> bool:
        """Whether this rank was asked."""
        if self._looks and not self.why:
            if self._stop_file is not None and self._stop_file.exists():
                self._seen = "asked to stop"
            elif self.file.exists():
                self._seen = "a STOP file"
            elif self._grows and self._grow.exists():
                self._seen = GROWS
        return bool(self.why)

    def drop_needless_grow(self) -> bool:
        """Whether a file asks for ranks where none is missing. It is removed: a later death would grant it."""
        if not self._looks or self._grows is not False or not self._grow.exists():
            return False
        self._grow.unlink(missing_ok=True)
        return True

    def done(self) -> None:
        """The request was granted: the next run shall not find the file."""
        if self._looks:
            self.file.unlink(missing_ok=True)


def source_hashes() -> dict[str, str]:
    """A hash of each of isograd's own files, as they are on the disk now."""
    return {
        str(file.relative_to(_PACKAGE)): sha256(file.read_bytes()).hexdigest()
        for file in sorted(_PACKAGE.rglob("*.py"))
    }


def changed_sources(before: dict[str, str]) -> str:
    """Why no rank may join a run that began with this code, naming the files; empty: it may."""
    now = source_hashes()
    changed = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
    if not changed:
        return ""
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"isograd's files have changed since this run began: {', '.join(changed[:SHOWN])}{more}"
