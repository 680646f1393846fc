"""Scaled rotary positions are those of transformers' ROPE_INIT_FUNCTIONS, bit for bit up to the order of a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isograd.core.mesh import Mesh
from isograd.hf.configs import from_hf_config
from isograd.models import Transformer

BASE = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 44, "max_position_embeddings": 4096,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama 3.1": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 256},
    "yarn, DeepSeek's": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0,
                         "beta_fast": 20, "beta_slow": 2, "truncate": False, "original_max_position_embeddings": 256},
    "yarn, its own factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.7,
                             "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [7, 150])
def test_cosines_and_sines_are_those_of_transformers(name: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**{n: v for n, v in BASE.items() if n != "model_type"}, rope_parameters=dict(ROPES[name]))
    frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
    positions = torch.arange(length)
    theirs = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    rotary = Transformer(from_hf_config(config), Mesh.unbound("1")).rotary
    assert rotary is not None
    for mine, their, direct in zip(rotary.table(positions, torch.float32), theirs, (torch.cos, torch.sin), strict=True):
        angles = positions.float()[:, None] * frequencies
        torch.testing.assert_close(mine[:, 0, :8], direct(angles) * factor, rtol=0, atol=2e-5)
        torch.testing.assert_close(mine[:, 0], their[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(rotary.frequencies(positions.device), frequencies, rtol=2e-7, atol=0)
    assert rotary.attention_factor == pytest.approx(factor, rel=1e-15)
