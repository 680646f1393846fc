"""How a run is asked to end: a signal, or a file named STOP in its folder. All ranks end after the same step.

A rank only notes the request; the loop exchanges it once per step, so that no rank leaves while others compute. The run
then saves and exits with 75, "try again later" in sysexits.h, which schedulers take as a reason to queue it again.

A command that starts ranks itself takes the signals for all of them, from its first moment on: ranks that are still
being made could not hear them. It passes a request on as a file, which the first rank looks for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from isograd.train import grow

STOPPED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOPPING = b"stopping: a step that has begun is finished and saved; Ctrl-C again ends at once\n"


class Asked:
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
                    self._before[number] = signal.signal(number, self._hear)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self.why = self.why or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if self._file is not None:
            self._file.touch()
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            with suppress(OSError):
                os.write(2, STOPPING)  # print could be interrupted by itself

    def pass_on(self, file: Path) -> None:
        """Make this file when asked, or now if that was earlier."""
        self._file = file
        if self.why:
            file.touch()

    def close(self) -> None:
        """Give the handlers back."""
        for number, before in self._before.items():
            signal.signal(number, before)


class Wish:
    """What a rank knows of requests to stop: its own signals, the launcher's file, and STOP in the run's folder."""

    def __init__(
        self, folder: Path, asked: Asked, *, looks: bool, passed_on: Path | None = None, grows: bool | None = None
    ) -> None:
        """looks: whether this rank looks for the files (one does). grows: whether the one of grow.py ends the run, as
        it has fewer ranks than it may have; None: it is not looked for."""
        self.file, self._grow, self._grows = folder / "STOP", folder / grow.FILE, grows
        self._asked, self._looks, self._passed_on = asked, looks, passed_on
        self._seen = ""

    @property
    def why(self) -> str:
        """Who asked; empty: nobody."""
        return self._asked.why or self._seen

    def heard(self) -> bool:
        """Whether this rank was asked."""
        if self._looks and not self.why:
            if self._passed_on is not None and self._passed_on.exists():
                self._seen = "asked to stop"
            elif self.file.exists():
                self._seen = "a STOP file"
            elif self._grows and self._grow.exists():
                self._seen = grow.WHY
        return bool(self.why)

    def in_vain(self) -> bool:
        """Whether a file asked for ranks to come back where none is missing; it would be granted after a later death,
        so it is removed."""
        if not self._looks or self._grows is not False or not self._grow.exists():
            return False
        self._grow.unlink(missing_ok=True)
        return True

    def done(self) -> None:
        """The request was granted: the next run shall not find the file."""
        if self._looks:
            self.file.unlink(missing_ok=True)
