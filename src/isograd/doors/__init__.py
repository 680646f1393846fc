"""Other people's loops on the engine: transformers' Trainer, accelerate, DeepSpeed's. docs/doors.md.

Names are loaded when first used; a package that is not installed is named by its error, with the extra to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.doors.accelerator import Accelerator as Accelerator
    from isograd.doors.trainers import trainer as trainer

__all__ = ["Accelerator", "trainer"]


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        from isograd.doors.world import need

        need(["accelerate"], "ig.doors.Accelerator", "hf")
        from isograd.doors.accelerator import Accelerator

        return Accelerator
    if name == "trainer":
        from isograd.doors.trainers import trainer

        return trainer
    raise AttributeError(f"module 'isograd.doors' has no attribute {name!r}")
