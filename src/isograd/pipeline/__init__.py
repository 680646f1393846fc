"""Pipelines: schedules as data, messages between stages, and models cut into stages.

Modules are imported when a name is first used: schedules and their pictures need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isograd import lazily

if TYPE_CHECKING:
    from isograd.pipeline.costs import measure as measure
    from isograd.pipeline.run import Pipeline as Pipeline
    from isograd.pipeline.schedule import Schedule as Schedule
    from isograd.pipeline.schedule import build as build
    from isograd.pipeline.schedule import check as check
    from isograd.pipeline.split import balanced as balanced
    from isograd.pipeline.stages import Stages as Stages

__getattr__ = lazily(
    __name__,
    {
        "costs": "measure",
        "run": "Pipeline",
        "schedule": "Schedule build check",
        "split": "balanced",
        "stages": "Stages",
    },
)
