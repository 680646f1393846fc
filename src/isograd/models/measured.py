"""A split of the transformer by what its parts were measured to cost, on the machine it will run on.

    split = measured_split(config, mesh, tokens, labels)
    model = Transformer(config, mesh, split=split)

Embedding, one block and head are run as three stages of a pipeline of their own, on one rank: blocks are alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.models.config import TransformerConfig
from isograd.models.transformer import Transformer
from isograd.pipeline.costs import measure
from isograd.pipeline.split import balanced

PARTS = 3


def measured_split(
    config: TransformerConfig,
    mesh: Mesh,
    tokens: Tensor,
    labels: Tensor,
    *,
    dtype: torch.dtype | None = None,
    repeats: int = 5,
) -> tuple[int, ...]:
    """How many blocks each of the mesh's pp * vpp stages should hold; tokens and labels [b, s] are a micro-batch.

    All ranks call this together and get the same answer. Under tp and cp the parts are measured whole.
    """
    embed, block, head = measure(parts(config, mesh, tokens, labels, dtype), tokens, mesh, repeats=repeats)
    layout = mesh.layout
    return balanced([block] * config.layers, layout.pp * layout.vpp, first=embed, last=head, ranks=layout.pp)


def parts(
    config: TransformerConfig, mesh: Mesh, tokens: Tensor, labels: Tensor, dtype: torch.dtype | None
) -> list[nn.Module]:
    """Embedding, a block, head with its loss; dropout needs ids of its sequences, which are made up here."""
    small = replace(config.with_layers(1), dropout=0.0, attention_dropout=0.0)
    if small.experts is not None:  # a block with experts, and no loss but the language model's
        small = replace(small, experts=replace(small.experts, dense_first=0, every=1, balance="none", z_weight=0.0))
    layout = Layout(pp=PARTS)
    made = [
        Transformer(small, Mesh.unbound(layout, rank), split=(0, 1, 0), dtype=dtype, device=mesh.device)
        for rank in range(PARTS)
    ]
    return [_Part(model, stage, (tokens, labels)) for stage, model in enumerate(made)]


class _Part(nn.Module):
    def __init__(self, model: Transformer, stage: int, micro: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.model, self.stage, self.micro = model, stage, micro

    def forward(self, x: Tensor) -> Any:
        return self.model.chunks[self.stage](x, self.micro)
