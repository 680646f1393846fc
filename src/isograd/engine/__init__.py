"""The engine: backward, step, no_sync at every ZeRO stage."""

from isograd.engine.data_parallel import DataParallel
from isograd.engine.engine import Engine
from isograd.engine.evaluation import Evaluation
from isograd.engine.first import empty_parameters
from isograd.engine.joined import Joined
from isograd.engine.muon import Muon
from isograd.engine.precision import LossScale
from isograd.engine.replay import Replay
from isograd.engine.seal import Seal
from isograd.engine.shares import Mean
from isograd.engine.stats import Stats
from isograd.engine.zero import Shards

__all__ = [
    "DataParallel",
    "Engine",
    "Evaluation",
    "Joined",
    "LossScale",
    "Mean",
    "Muon",
    "Replay",
    "Seal",
    "Shards",
    "Stats",
    "empty_parameters",
]
