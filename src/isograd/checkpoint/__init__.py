"""Checkpoints: saved beside the training, whole or not at all, loaded under any layout. docs/checkpoints.md."""

from isograd.checkpoint.hugging import export_hf
from isograd.checkpoint.keeper import Keeper
from isograd.checkpoint.load import Loaded

__all__ = ["Keeper", "Loaded", "export_hf"]
