"""Pipelines: schedules as data, the way of activations and gradients between stages, and models cut into stages."""

from isograd.pipeline.run import Pipeline
from isograd.pipeline.schedule import Schedule, build, check
from isograd.pipeline.split import balanced
from isograd.pipeline.stages import Stages

__all__ = ["Pipeline", "Schedule", "Stages", "balanced", "build", "check"]
