"""How far this process has come: what a survivor can say when another rank has died."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Outlives the world, like the process."""

    step: int = 0  # the largest number of finished steps
    phase: str = ""  # what the rank did when its world ended


reached = Progress()
