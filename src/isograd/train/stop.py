"""How a run is asked to end: a signal, or a file named STOP in its folder. All ranks end after the same step.

A rank only notes the wish; the loop shares it once per step, so that no rank leaves while others compute. The run then
saves and exits with 75, "try again later" in sysexits.h, which schedulers take as a reason to queue it again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PASSED_ON = signal.SIGUSR2  # what `isograd train` sends to ranks that it started, whose other signals are taken


class Wish:
    """Listens for signals and for the STOP file while a run lasts."""

    def __init__(self, folder: Path, *, looks: bool, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        """looks: whether this rank looks for the file (one does)."""
        self.file = folder / "STOP"
        self.looks = looks
        self.why = ""
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._before[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.why = self.why or ("asked to stop" if number == PASSED_ON else signal.Signals(number).name)

    def heard(self) -> bool:
        """Whether this rank was asked."""
        if self.looks and not self.why and self.file.exists():
            self.why = "a STOP file"
        return bool(self.why)

    def done(self) -> None:
        """The wish was granted: the next run shall not find the file."""
        if self.looks:
            self.file.unlink(missing_ok=True)

    def close(self) -> None:
        """A wish that is passed on may still come when another has been granted; it ends nobody."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if number == PASSED_ON else before)
