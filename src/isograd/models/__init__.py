"""The one decoder and its configs."""

from isograd.models.config import PRESETS, TransformerConfig, preset
from isograd.models.measured import measured_split
from isograd.models.transformer import Transformer

__all__ = ["PRESETS", "Transformer", "TransformerConfig", "measured_split", "preset"]
