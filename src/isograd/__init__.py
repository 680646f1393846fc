"""isograd: the gradient of one device under every parallel layout, proven.

Names are loaded when first used, so that `isograd --help` and `isograd.Layout` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Layout": "isograd.core.layout",
    "Mesh": "isograd.core.mesh",
    "Contract": "isograd.core.contract",
    "Shard": "isograd.core.contract",
    "contracts": "isograd.core.contract_table",
    "declare": "isograd.core.contract",
    "ChainedOptimizer": "isograd.engine",
    "DataParallel": "isograd.engine",
    "Engine": "isograd.engine",
    "Muon": "isograd.engine",
    "empty_parameters": "isograd.engine",
    "LossScale": "isograd.engine",
    "Stats": "isograd.engine",
    "Terms": "isograd.core.loss_terms",
    "launch": "isograd.comm.launch",
    "World": "isograd.comm.launch",
    "IsogradError": "isograd_verify.errors",
    "verify": "isograd.prove",
}
_MODULES = {
    "checkpoint": "isograd.checkpoint",
    "comm": "isograd.comm",
    "contrastive": "isograd.losses.contrastive",
    "data": "isograd.data",
    "engine": "isograd.engine",
    "errors": "isograd.errors",
    "hf": "isograd.hf",
    "integrations": "isograd.integrations",
    "losses": "isograd.losses",
    "models": "isograd.models",
    "nn": "isograd.nn",
    "pipeline": "isograd.pipeline",
    "rng": "isograd.core.rng",
    "sequence": "isograd.sequence",
    "prove": "isograd.prove",
}
_RENAMED = {
    "DoorError": "IntegrationError", "Joined": "ChainedOptimizer",
    "doors": "integrations", "hugging": "hf", "random": "rng",
}  # fmt: skip

__all__ = [*_HOMES, *_MODULES]  # noqa: PLE0604

if TYPE_CHECKING:
    from isograd import checkpoint as checkpoint
    from isograd import comm as comm
    from isograd import data as data
    from isograd import engine as engine
    from isograd import errors as errors
    from isograd import hf as hf
    from isograd import integrations as integrations
    from isograd import losses as losses
    from isograd import models as models
    from isograd import nn as nn
    from isograd import pipeline as pipeline
    from isograd import prove as prove
    from isograd import sequence as sequence
    from isograd.comm.launch import World as World
    from isograd.comm.launch import launch as launch
    from isograd.core import rng as rng
    from isograd.core.contract import Contract as Contract
    from isograd.core.contract import Shard as Shard
    from isograd.core.contract import declare as declare
    from isograd.core.contract_table import contracts as contracts
    from isograd.core.layout import Layout as Layout
    from isograd.core.loss_terms import Terms as Terms
    from isograd.core.mesh import Mesh as Mesh
    from isograd.engine import ChainedOptimizer as ChainedOptimizer
    from isograd.engine import DataParallel as DataParallel
    from isograd.engine import Engine as Engine
    from isograd.engine import LossScale as LossScale
    from isograd.engine import Muon as Muon
    from isograd.engine import Stats as Stats
    from isograd.engine import empty_parameters as empty_parameters
    from isograd.errors import IsogradError as IsogradError
    from isograd.losses import contrastive as contrastive
    from isograd.prove import verify as verify


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _RENAMED:
        raise AttributeError(f"isograd.{name} is called isograd.{_RENAMED[name]} now")
    raise AttributeError(f"module 'isograd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
