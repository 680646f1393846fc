"""How long a recovery took, part by part: the launcher's parts first, then those of a rank of the next world."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Recovery:
    """One recovery, from the first sign of a death to the first step that is finished after it."""

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
