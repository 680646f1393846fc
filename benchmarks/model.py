"""One Llama-like decoder in plain torch: the model code is the same for every contestant, only the engine differs.

Data-parallel contestants and isograd's Engine wrap it as it is; torch's tensor parallelism cuts it by module name.
Names and shapes are those of isograd.models.Transformer, so weights and gradients compare by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.task import IGNORE, Sizes


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.hidden // sizes.heads
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.v = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # -1 heads: under tensor parallelism a rank has only some of them. [b, heads, s, d]
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.gate = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(sizes.hidden, eps=1e-6), Attention(sizes)
        self.norm2, self.mlp = nn.RMSNorm(sizes.hidden, eps=1e-6), MLP(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        cos, sin = _angles(sizes.seq, sizes.hidden // sizes.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        source = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=source)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over labels that count."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)


def _angles(length: int, dims: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [s, d], in the two-halves convention of Hugging Face."""
    frequency = 10000.0 ** -(torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)
    angles = (torch.arange(length).float()[:, None] * frequency).repeat(1, 2)
    return angles.cos(), angles.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
