"""Other people's loops on the engine: Trainer, accelerate, Lightning, Fabric, DeepSpeed, verl. docs/integrations.md.

Names are loaded when first used; a package that is not installed is named by its error, with the line that installs it.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    from isograd.integrations.world import require_packages

    if name == "Accelerator":
        require_packages(["accelerate"], "ig.integrations.Accelerator")
        from isograd.integrations.accelerator import Accelerator

        return Accelerator
    if name == "FabricStrategy":
        if find_spec("lightning_fabric") is None:
            require_packages(["lightning"], "ig.integrations.FabricStrategy")
        from isograd.integrations.fabric import FabricStrategy

        return FabricStrategy
    if name == "LightningStrategy":
        if find_spec("pytorch_lightning") is None:
            require_packages(["lightning"], "ig.integrations.LightningStrategy")
        from isograd.integrations.lightning import LightningStrategy

        return LightningStrategy
    if name == "deepspeed":
        import isograd.integrations.deepspeed

        return isograd.integrations.deepspeed
    if name == "verl":
        require_packages(["verl"], "ig.integrations.verl")
        import isograd.integrations.verl

        return isograd.integrations.verl
    if name == "trainer":
        require_packages(["transformers", "accelerate"], "ig.integrations.trainer")
        from isograd.integrations.trainer_class import trainer

        return trainer
    raise AttributeError(f"module 'isograd.integrations' has no attribute {name!r}")
