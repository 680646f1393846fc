"""Other people's loops on the engine: transformers' Trainer, accelerate, DeepSpeed's. docs/doors.md.

Names are loaded when first used; a package that is not installed is named by its error, with the extra to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.doors.trainers import trainer as trainer

__all__ = ["trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'isograd.doors' has no attribute {name!r}")
    from isograd.doors.trainers import trainer

    return {"trainer": trainer}[name]
