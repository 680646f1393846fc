"""Checks for silent corruption in a run: which steps are checked, and a step that is refused is done again.

engine/sums.py checks what a reduction adds up, engine/replay.py what a rank computes. docs/corruption.md says what each
of them finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isograd.engine import Engine, Replay, Stats
from isograd.engine.batches import micro_batches
from isograd.errors import EngineError
from isograd.train.config import Config

FOUND = ("IG580", "IG581")
TRIES = 2  # a fault that comes again is no accident


class Checks:
    """Of one run on this rank."""

    def __init__(self, config: Config, engine: Engine, tell: Callable[[str, int], None]) -> None:
        """`tell(text, step)`: where a step that was refused goes into the log."""
        self._safety, self._micro_batches, self._engine, self._tell = config.safety, config.micro_batches, engine, tell
        self._replay = Replay(engine) if config.safety.replay_every else None

    def step(self, step: int, batch: Any, gather: Callable[[], None]) -> Stats:
        """Step number `step`: `gather` runs its backwards. Done again when a check refuses it; the second time it is
        refused it raises, on all ranks."""
        sums = _due(step, self._safety.sums_every)
        replay = self._replay if _due(step, self._safety.replay_every) else None
        for tries in range(1, TRIES + 1):
            try:
                if sums:
                    self._engine.check_sums()
                if replay is not None:
                    replay.begin()
                gather()
                if replay is not None:
                    replay.compare(micro_batches(batch, self._micro_batches)[0])
                return self._engine.step()
            except EngineError as error:
                if error.code not in FOUND or tries == TRIES:
                    raise
                self._engine.discard()
                self._tell(f"{error.what} ({error.seen}); the step is done again", step)
        raise AssertionError("the last try returns or raises")


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
