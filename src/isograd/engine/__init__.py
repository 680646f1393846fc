"""The engine: backward, step, no_sync at every ZeRO stage."""

from isograd.engine.data_parallel import DataParallel
from isograd.engine.ema import WeightAverage
from isograd.engine.engine import Engine
from isograd.engine.evaluation import Evaluation, PendingStats, Stats
from isograd.engine.muon import ChainedOptimizer, Muon
from isograd.engine.precision import LossScale
from isograd.engine.sdc.memory import MemoryChecksum
from isograd.engine.sdc.replay import ReplayCheck
from isograd.engine.term_weights import Mean
from isograd.engine.zero import Shards
from isograd.engine.zero3.deferred_init import empty_parameters

__all__ = [
    "ChainedOptimizer",
    "DataParallel",
    "Engine",
    "Evaluation",
    "LossScale",
    "Mean",
    "MemoryChecksum",
    "Muon",
    "PendingStats",
    "ReplayCheck",
    "Shards",
    "Stats",
    "WeightAverage",
    "empty_parameters",
]
