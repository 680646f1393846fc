"""isograd: the gradient of one device under every parallel layout, proven.

Names are loaded when first used, so that `isograd --help` and `isograd.Layout` need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0rc1"

_HOMES = {
    "core.layout": "Layout",
    "core.mesh": "Mesh",
    "core.contract": "Contract Shard declare",
    "core.contract_table": "contracts",
    "engine": "ChainedOptimizer DataParallel Engine LossScale Muon Stats empty_parameters",
    "core.loss_terms": "Terms",
    "launcher.launch": "launch World",
    "errors": "IsogradError",
    "prove": "verify",
}
_MODULES = {
    **{name: name for name in ("checkpoint", "comm", "data", "engine", "errors", "hf", "integrations", "losses",
                               "models", "nn", "pipeline", "sequence", "prove")},
    "contrastive": "losses.contrastive",
    "rng": "core.rng",
}  # fmt: skip

__all__ = [*" ".join(_HOMES.values()).split(), *_MODULES]  # noqa: PLE0604

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
    from isograd.launcher.launch import World as World
    from isograd.launcher.launch import launch as launch
    from isograd.losses import contrastive as contrastive
    from isograd.prove import verify as verify


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, whose modules have these names: each is loaded when it is first used."""

    def loaded(name: str) -> Any:
        for home, names in homes.items():
            if name in names.split():
                module = import_module(f"{package}.{home}")
                return module if home == name else getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return loaded


_loaded = lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return import_module(f"isograd.{_MODULES[name]}") if name in _MODULES else _loaded(name)


def __dir__() -> list[str]:
    return sorted(__all__)
