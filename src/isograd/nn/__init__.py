"""Layers that declare what their gradients owe. All take and give a flattened stream of tokens, x [tokens, hidden]."""

from isograd.nn.attention import Attention
from isograd.nn.embedding import LearnedPositions, VocabEmbedding
from isograd.nn.float8 import use_float8
from isograd.nn.fp32_sums import use_fp32_sums
from isograd.nn.linear import ColumnLinear, RowLinear
from isograd.nn.loss import Head, cross_entropy
from isograd.nn.mlp import MLP
from isograd.nn.moe import MoE
from isograd.nn.norm import LayerNorm, RMSNorm
from isograd.nn.parameter import Layer
from isograd.nn.rotary import Rotary, RotaryScaling
from isograd.nn.routing import ExpertOptions
from isograd.nn.stream import Stream, gather_tokens, reduce_output

__all__ = [
    "MLP",
    "Attention",
    "ColumnLinear",
    "ExpertOptions",
    "Head",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "MoE",
    "RMSNorm",
    "Rotary",
    "RotaryScaling",
    "RowLinear",
    "Stream",
    "VocabEmbedding",
    "cross_entropy",
    "gather_tokens",
    "reduce_output",
    "use_float8",
    "use_fp32_sums",
]
