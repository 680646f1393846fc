"""`isograd train --profile STEPS`: torch's profiler over some steps, as a trace for Perfetto and chrome://tracing.

What the rank's watchdog hears it do stands as ranges in the trace ("in step 3, forward and backward"); inside of them
the engine's own ("isograd: forward", "isograd: reduce gradients") and a pipeline's actions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class StepProfile:
    """Of the steps `first` to `last` (the first step of a run is 1) on this rank."""

    def __init__(
        self, steps: tuple[int, int] | None, folder: Path, rank: int, tell: Callable[[str, int], None]
    ) -> None:
        """`steps`: None: it does nothing. `tell(text, step)`: where it is said what was written."""
        self.first, self.last = steps or (0, 0)
        self._file = folder / "profile" / f"steps-{self.first}-{self.last}" / f"rank-{rank:05d}.json.gz"
        self._tell = tell
        self._profile: profile | None = None
        self._range: record_function | None = None

    def before(self, step: int) -> None:
        """Called before each step; begins with the first one that is asked for, also after a resume."""
        if self._profile is None and self.first <= step <= self.last:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds)
            self._profile.start()

    def enter(self, phase: str) -> None:
        """The rank does something else from here on."""
        self._end_range()
        if self._profile is not None:
            self._range = record_function(phase)
            self._range.__enter__()

    def after(self, step: int) -> None:
        """Called after each step, with all that follows it; writes the trace after the last one."""
        if self._profile is None or step < self.last:
            return
        self._end_range()
        stopped, self._profile = self._profile, None
        stopped.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        stopped.export_chrome_trace(str(self._file))
        self._tell(f"traces of all ranks are in {self._file.parent}: open one in ui.perfetto.dev", step)

    def close(self) -> None:
        """However the run ends, the profiler does not stay on: a run that ends before has a shorter trace."""
        if self._profile is not None:
            self.after(self.last)

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
