"""Pipelines: schedules as data, messages between stages, and models cut into stages.

Modules are imported when a name is first used: schedules and their pictures need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.pipeline.costs import measure as measure
    from isograd.pipeline.run import Pipeline as Pipeline
    from isograd.pipeline.schedule import Schedule as Schedule
    from isograd.pipeline.schedule import build as build
    from isograd.pipeline.schedule import check as check
    from isograd.pipeline.split import balanced as balanced
    from isograd.pipeline.stages import Stages as Stages

_HOMES = {
    "Pipeline": "run",
    "Schedule": "schedule",
    "Stages": "stages",
    "balanced": "split",
    "build": "schedule",
    "check": "schedule",
    "measure": "costs",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"isograd.pipeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'isograd.pipeline' has no attribute {name!r}")
