"""The one decoder and its configs."""

from isograd.models.config import PRESETS, TransformerConfig, preset
from isograd.models.transformer import Transformer

__all__ = ["PRESETS", "Transformer", "TransformerConfig", "preset"]
