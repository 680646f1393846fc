"""Checkpoints: saved beside the training, whole or not at all, loaded under any layout. docs/checkpoints.md.

Names are loaded when first used: `isograd ckpt --help` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isograd.checkpoint.adapters import export_adapters as export_adapters
    from isograd.checkpoint.hugging import export_hf as export_hf
    from isograd.checkpoint.keeper import Keeper as Keeper
    from isograd.checkpoint.keeper import NotFinite as NotFinite
    from isograd.checkpoint.load import Loaded as Loaded
    from isograd.checkpoint.read import SavedWeights as SavedWeights

__all__ = ["Keeper", "Loaded", "NotFinite", "SavedWeights", "export_adapters", "export_hf"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'isograd.checkpoint' has no attribute {name!r}")
    from isograd.checkpoint import adapters, hugging, keeper, load, read

    homes = {
        "Keeper": keeper,
        "NotFinite": keeper,
        "Loaded": load,
        "SavedWeights": read,
        "export_adapters": adapters,
        "export_hf": hugging,
    }
    return getattr(homes[name], name)
