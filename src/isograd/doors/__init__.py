"""Other people's loops on the engine: Trainer, accelerate, Lightning, Fabric, DeepSpeed, verl. docs/doors.md.

Names are loaded when first used; a package that is not installed is named by its error, with the extra to install.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.doors import deepspeed as deepspeed
    from isograd.doors import verl as verl
    from isograd.doors.accelerator import Accelerator as Accelerator
    from isograd.doors.fabric import FabricStrategy as FabricStrategy
    from isograd.doors.lightning import LightningStrategy as LightningStrategy
    from isograd.doors.trainers import trainer as trainer

__all__ = ["Accelerator", "FabricStrategy", "LightningStrategy", "deepspeed", "trainer", "verl"]


def __getattr__(name: str) -> Any:
    from isograd.doors.world import need

    if name == "Accelerator":
        need(["accelerate"], "ig.doors.Accelerator", "hf")
        from isograd.doors.accelerator import Accelerator

        return Accelerator
    if name == "FabricStrategy":
        if find_spec("lightning_fabric") is None:
            need(["lightning"], "ig.doors.FabricStrategy", "lightning")
        from isograd.doors.fabric import FabricStrategy

        return FabricStrategy
    if name == "LightningStrategy":
        if find_spec("pytorch_lightning") is None:
            need(["lightning"], "ig.doors.LightningStrategy", "lightning")
        from isograd.doors.lightning import LightningStrategy

        return LightningStrategy
    if name == "deepspeed":
        import isograd.doors.deepspeed

        return isograd.doors.deepspeed
    if name == "verl":
        need(["verl"], "ig.doors.verl", "verl")
        import isograd.doors.verl

        return isograd.doors.verl
    if name == "trainer":
        need(["transformers", "accelerate"], "ig.doors.trainer", "hf")
        from isograd.doors.trainers import trainer

        return trainer
    raise AttributeError(f"module 'isograd.doors' has no attribute {name!r}")
