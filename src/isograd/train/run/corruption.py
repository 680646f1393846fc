"""Checks for silent corruption in a run: which steps are checked, and a step that is refused is done again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from isograd.engine import Engine, MemoryChecksum, ReplayCheck, Stats
from isograd.engine.batches import micro_batches
from isograd.errors import EngineError
from isograd.train.config import Config

CHANGED = "IG583"
FOUND = ("IG580", "IG581", CHANGED)
TRIES = 2  # a fault that comes again is no accident


class CorruptionChecks:
    """Of one run on this rank."""

    def __init__(self, config: Config, engine: Engine, tell: Callable[[str, int], None]) -> None:
        """`tell(text, step)`: where a step that was refused goes into the log."""
        self._safety, self._micro_batches, self._engine, self._tell = config.safety, config.micro_batches, engine, tell
        self._replay = ReplayCheck(engine) if config.safety.replay_every else None
        self._seal: MemoryChecksum | None = None
        self._writes = 0  # of the optimizer when the seal was set: a schedule-free one also writes to be evaluated
        self.from_copy: Callable[[Iterable[str]], None] | None = None  # brings back rows of this rank from a copy

    def step(self, step: int, batch: Any, gather: Callable[[], None]) -> Stats:
        """Step number `step`: `gather` runs its backwards. Done again when a check refuses it; the second time it is
        refused it raises, on all ranks."""
        sums = is_due(step, self._safety.sums_every)
        replay = self._replay if is_due(step, self._safety.replay_every) else None
        if self._seal is None and is_due(step, self._safety.state_every):  # the first one
            self._set()
        for tries in range(1, TRIES + 1):
            try:
                if sums:
                    self._engine.check_sums()
                if replay is not None:
                    replay.begin()
                gather()
                if replay is not None:
                    replay.compare(micro_batches(batch, self._micro_batches)[0])
                stats = self._engine.step()
            except EngineError as error:
                if error.code not in FOUND or tries == TRIES:
                    raise
                self._engine.discard()
                lost = self._seal.restore(self.from_copy) if self._seal is not None and error.code == CHANGED else ""
                done = f"no copy brings back {lost}" if lost else "the step is done again"
                self._tell(f"{error.what} ({error.seen}); {done}", step)
                if lost:
                    raise
            else:
                self._seal = None
                if is_due(step + 1, self._safety.state_every):
                    self._set()
                return stats
        raise AssertionError("the last try returns or raises")

    def check_seal(self) -> None:
        """When all gradients of a step are there: what this rank keeps is what the step before has left."""
        if self._seal is not None and self._writes == self._engine.step_state.now.writes:
            self._seal.check()

    def _set(self) -> None:
        self._seal = MemoryChecksum(self._engine, optimizer=self._safety.state == "all")
        self._writes = self._engine.step_state.now.writes


def is_due(step: int, every: int | None) -> bool:
    """Whether a thing that happens every so many steps (0, None: never) happens after this one."""
    return bool(every) and step % (every or 1) == 0
