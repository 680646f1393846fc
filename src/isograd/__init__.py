"""isograd: the gradient of one device under every parallel layout, proven.

Names are loaded when first used, so that `isograd --help` and `isograd.Layout` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Layout": "isograd.layout",
    "Mesh": "isograd.mesh",
    "Contract": "isograd.contract",
    "Shard": "isograd.contract",
    "contracts": "isograd.contract",
    "declare": "isograd.contract",
    "DataParallel": "isograd.engine",
    "Engine": "isograd.engine",
    "Joined": "isograd.engine",
    "Muon": "isograd.engine",
    "empty_parameters": "isograd.engine",
    "LossScale": "isograd.engine",
    "Stats": "isograd.engine",
    "Terms": "isograd.terms",
    "launch": "isograd.comm.launch",
    "World": "isograd.comm.launch",
    "IsogradError": "isograd.errors",
}
_MODULES = (
    "checkpoint",
    "comm",
    "contrastive",
    "data",
    "doors",
    "engine",
    "errors",
    "hugging",
    "losses",
    "models",
    "nn",
    "pipeline",
    "random",
    "sequence",
    "verify",
)

__all__ = [*_HOMES, *_MODULES]  # noqa: PLE0604

if TYPE_CHECKING:
    from isograd import checkpoint as checkpoint
    from isograd import comm as comm
    from isograd import contrastive as contrastive
    from isograd import data as data
    from isograd import doors as doors
    from isograd import engine as engine
    from isograd import errors as errors
    from isograd import hugging as hugging
    from isograd import losses as losses
    from isograd import models as models
    from isograd import nn as nn
    from isograd import pipeline as pipeline
    from isograd import random as random
    from isograd import sequence as sequence
    from isograd import verify as verify
    from isograd.comm.launch import World as World
    from isograd.comm.launch import launch as launch
    from isograd.contract import Contract as Contract
    from isograd.contract import Shard as Shard
    from isograd.contract import contracts as contracts
    from isograd.contract import declare as declare
    from isograd.engine import DataParallel as DataParallel
    from isograd.engine import Engine as Engine
    from isograd.engine import Joined as Joined
    from isograd.engine import LossScale as LossScale
    from isograd.engine import Muon as Muon
    from isograd.engine import Stats as Stats
    from isograd.engine import empty_parameters as empty_parameters
    from isograd.errors import IsogradError as IsogradError
    from isograd.layout import Layout as Layout
    from isograd.mesh import Mesh as Mesh
    from isograd.terms import Terms as Terms


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"isograd.{name}")
    raise AttributeError(f"module 'isograd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
