"""The one decoder, its configs, and its ties to Hugging Face."""

from isograd.models.config import PRESETS, TransformerConfig, load_config, preset
from isograd.models.families import HuggingFace
from isograd.models.measured import measured_split
from isograd.models.transformer import Transformer

__all__ = ["PRESETS", "HuggingFace", "Transformer", "TransformerConfig", "load_config", "measured_split", "preset"]
