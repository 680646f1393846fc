"""A padding token's lookup gives the embedding no gradient, as in transformers, where a config names one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.errors import ConfigError
from isograd.hf.configs import from_hf_config, to_hf_config
from isograd.models import Transformer, TransformerConfig

PAD = 7
LLAMA = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 32,
}  # fmt: skip


def embedding_gradient(layout: str, pad: int | None, tied: bool) -> Tensor:
    mesh = Mesh(layout)
    config = TransformerConfig(vocab=11, hidden=8, layers=1, heads=2, mlp=12, tied=tied, pad_token=pad)
    model = Transformer(config, mesh, dtype=torch.float64)
    engine = ig.Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    tokens = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(0))
    tokens[:, ::4] = PAD
    loss, count = model(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss, weight=count)
    return dict(engine.grads().items())["embed.weight"].clone()


def test_only_the_lookup_of_the_padding_token_loses_its_gradient(worlds) -> None:
    plain, padded = (worlds(1).run(embedding_gradient, "dp1", pad, False)[0] for pad in (None, PAD))
    assert float(plain[PAD].norm()) > 0.01 and float(padded[PAD].norm()) == 0.0
    others = torch.arange(11) != PAD
    assert torch.equal(padded[others], plain[others])
    tied = worlds(1).run(embedding_gradient, "dp1", PAD, True)[0]
    assert float(tied[PAD].norm()) > 0.001  # what the head gives it stays
    for layout in ("tp2", "tp2 sp"):
        for of, expected in ((False, padded), (True, tied)):
            for found in worlds(2).run(embedding_gradient, layout, PAD, of):
                assert float((found - expected).abs().max()) < 1e-12, layout


def test_configs_of_transformers_name_it(tmp_path) -> None:
    assert from_hf_config(LLAMA).pad_token is None
    config = from_hf_config({**LLAMA, "pad_token_id": PAD})
    assert config.pad_token == PAD and to_hf_config(config)["pad_token_id"] == PAD
    assert from_hf_config({**LLAMA, "pad_token_id": -1}).pad_token == 10
    with pytest.raises(ConfigError, match="pad_token 11 is no token"):
        from_hf_config({**LLAMA, "pad_token_id": 11})
