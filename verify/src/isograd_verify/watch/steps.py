"""Which optimizer steps are watched: '3' the first three, 'first' the first one, 'every 1000' each thousandth as well.

Between watched steps nothing of the watcher is in the program but one hook that counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from isograd_verify.errors import ConfigError


@dataclass(frozen=True)
class Steps:
    """The first ones, and each `every`-th (0: none)."""

    first: int = 3
    every: int = 0

    @classmethod
    def of(cls, text: str | int) -> Steps:
        """From '3', 'first', 'every 1000', or several with commas; the first step is always one of them."""
        first, every = 1, 0
        for part in str(text).split(","):
            found = re.fullmatch(r"\s*(?:(first)|(\d+)|every\s+(\d+))\s*", part)
            if found is None or found[2] == "0" or (found[3] is not None and int(found[3]) < 1):
                raise ConfigError(
                    "IG622", "--steps does not say which steps to watch", seen=str(text),
                    expected="a number of first steps, 'first', 'every 1000', or several: 'first,every 1000'",
                    fix="--steps 3",
                )  # fmt: skip
            first = max(first, int(found[2] or 1))
            every = int(found[3] or every)
        return cls(first, every)

    def watches(self, step: int) -> bool:
        """Whether this one is watched, counted from 1."""
        return step <= self.first or (self.every > 0 and step % self.every == 0)
