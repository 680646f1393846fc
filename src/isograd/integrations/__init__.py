"""Other people's loops on the engine: Trainer, accelerate, Lightning, Fabric, DeepSpeed, verl. docs/integrations.md.

Names are loaded when first used; a package that is not installed is named by its error, with the line that installs it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.integrations import deepspeed as deepspeed
    from isograd.integrations import verl as verl
    from isograd.integrations.accelerator import Accelerator as Accelerator
    from isograd.integrations.fabric import FabricStrategy as FabricStrategy
    from isograd.integrations.lightning import LightningStrategy as LightningStrategy
    from isograd.integrations.trainer_class import trainer as trainer

__all__ = ["Accelerator", "FabricStrategy", "LightningStrategy", "deepspeed", "trainer", "verl"]


# The module of each name, the packages that it needs, and one that will do instead.
_HOMES = {
    "Accelerator": ("accelerator", ["accelerate"], ""),
    "FabricStrategy": ("fabric", ["lightning"], "lightning_fabric"),
    "LightningStrategy": ("lightning", ["lightning"], "pytorch_lightning"),
    "deepspeed": ("deepspeed", [], ""),
    "trainer": ("trainer_class", ["transformers", "accelerate"], ""),
    "verl": ("verl", ["verl"], ""),
}


def __getattr__(name: str) -> Any:
    from isograd.integrations.world import require_packages

    if name not in _HOMES:
        raise AttributeError(f"module 'isograd.integrations' has no attribute {name!r}")
    home, packages, instead = _HOMES[name]
    if not (instead and find_spec(instead)):
        require_packages(packages, f"ig.integrations.{name}")
    module = import_module(f"isograd.integrations.{home}")
    return module if home == name else getattr(module, name)
