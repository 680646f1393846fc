"""Checkpoints: saved beside the training, whole or not at all, loaded under any layout. docs/checkpoints.md.

Names are loaded when first used: `isograd ckpt --help` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.checkpoint.load import Loaded as Loaded
    from isograd.checkpoint.manager import CheckpointManager as CheckpointManager
    from isograd.checkpoint.manager import NotFinite as NotFinite
    from isograd.checkpoint.read import SavedWeights as SavedWeights

__all__ = ["CheckpointManager", "Loaded", "NotFinite", "SavedWeights"]


def __getattr__(name: str) -> Any:
    if name == "Keeper":
        raise AttributeError("isograd.checkpoint.Keeper is called isograd.checkpoint.CheckpointManager now")
    if name in ("export_hf", "export_adapters"):
        raise AttributeError(f"isograd.checkpoint.{name} is called isograd.hf.{name} now")
    if name not in __all__:
        raise AttributeError(f"module 'isograd.checkpoint' has no attribute {name!r}")
    from isograd.checkpoint import load, manager, read

    homes = {
        "CheckpointManager": manager,
        "NotFinite": manager,
        "Loaded": load,
        "SavedWeights": read,
    }
    return getattr(homes[name], name)
