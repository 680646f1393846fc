"""Checkpoints: saved beside the training, whole or not at all, loaded under any layout. docs/checkpoints.md.

Names are loaded when first used: `isograd ckpt --help` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isograd import lazily

if TYPE_CHECKING:
    from isograd.checkpoint.load import Loaded as Loaded
    from isograd.checkpoint.manager import CheckpointManager as CheckpointManager
    from isograd.checkpoint.manager import NotFinite as NotFinite
    from isograd.checkpoint.read import SavedWeights as SavedWeights

__all__ = ["CheckpointManager", "Loaded", "NotFinite", "SavedWeights"]

__getattr__ = lazily(__name__, {"load": "Loaded", "manager": "CheckpointManager NotFinite", "read": "SavedWeights"})
