"""How far this process has come, which is known when a rank has died; and how long something makes no progress."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


class Progress:
    """Outlives the world, like the process; its number of steps outlives the process, too."""

    def __init__(self) -> None:
        self.phase = ""  # what the rank did when its world ended
        self._file: int | None = None

    def enter(self, directory: str, rank: int) -> None:
        """A new world, whose ranks meet in this directory: what the launcher reads lies there, too."""
        if self._file is not None:
            os.close(self._file)
        self.phase = "joining the other ranks"
        self._file = os.open(_file(directory, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def finished(self, step: int) -> None:
        """So many steps of the run are done, in this world and before it."""
        if self._file is not None:
            with suppress(OSError):  # a full disk ends no run here
                os.pwrite(self._file, step.to_bytes(8, "little"), 0)


def finished(directory: str, ranks: int) -> int | None:
    """The most steps that a rank of this world says were done; None: none of them had loaded the state yet."""
    said = []
    for rank in range(ranks):
        with suppress(OSError):
            said.append(_file(directory, rank).read_bytes())
    return max((int.from_bytes(number, "little") for number in said if len(number) == 8), default=None)


def _file(directory: str, rank: int) -> Path:
    return Path(directory) / f"finished-{rank:05d}"


class StallTimer:
    """For how long a sign of progress has been the same, in seconds of this process's own running time.

    A process that was suspended, alone or with all others (docker pause, scontrol suspend), sees nothing meanwhile. So
    of the time between two looks at most `longest` counts, and it blames nobody when it wakes up.
    """

    def __init__(self, longest: float) -> None:
        """longest: above the usual time between two looks."""
        self._longest, self._sign = longest, object()
        self._looked, self.seconds = time.monotonic(), 0.0

    def look(self, sign: object = None) -> float:
        """How long `sign` has been equal to what it is now."""
        now = time.monotonic()
        self.seconds += min(now - self._looked, self._longest)
        if sign != self._sign:
            self._sign, self.seconds = sign, 0.0
        self._looked = now
        return self.seconds


process_progress = Progress()


@dataclass
class Recovery:
    """How long one recovery took, from the first sign of a death to the first step that is finished after it: the
    launcher's parts first, then those of a rank of the next world."""

    began: float  # when the launcher saw that sign, by `time.monotonic`: all processes of a machine read one clock
    ends: list[tuple[str, float]] = field(default_factory=list)  # of each part, when it ended

    def done(self, part: str) -> None:
        """A part has ended; the next one begins with it."""
        self.ends.append((part, time.monotonic()))

    @property
    def seconds(self) -> dict[str, float]:
        """What each part took."""
        starts = [self.began, *(when for _, when in self.ends)]
        return {part: when - before for (part, when), before in zip(self.ends, starts, strict=False)}

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"recovered in {self.ends[-1][1] - self.began:.1f} s: {parts}"
