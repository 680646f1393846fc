"""The engine: backward, step, no_sync at every ZeRO stage."""

from isograd.engine.engine import Engine, Stats
from isograd.engine.precision import LossScale
from isograd.engine.zero import Shards

__all__ = ["Engine", "LossScale", "Shards", "Stats"]
