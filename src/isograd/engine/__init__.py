"""The engine: backward, step, no_sync at every ZeRO stage."""

from isograd.engine.engine import Engine, Evaluation, Stats
from isograd.engine.first import empty_parameters
from isograd.engine.precision import LossScale
from isograd.engine.zero import Shards

__all__ = ["Engine", "Evaluation", "LossScale", "Shards", "Stats", "empty_parameters"]
