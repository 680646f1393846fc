"""Causal self-attention with grouped queries, cut over heads.

One device: softmax(q k^T / sqrt(d) + causal mask) v for each head, key/value heads shared by groups of query heads;
as an option, a window.

Query heads are distributed evenly over tp. With fewer key/value heads than tp ranks, each rank holds the one head that
its queries need. Ranks with the same head are replicas, and its gradient is a sum over them ("tp/2": blocks of two).
Norms of query and key heads are shared by heads on different ranks and owe tp, with or without sequence parallelism.

Under cp each rank projects its own tokens to all heads of its tp rank, and isograd.sequence brings queries and keys
together. Contracts do not change: cp is a data axis, over which every gradient is partial.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd import sequence
from isograd.core import rng
from isograd.core.contract import Shard
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ModelError
from isograd.nn.linear import ColumnLinear, RowLinear
from isograd.nn.norm import RMSNorm
from isograd.nn.parameter import FactoryKwargs
from isograd.nn.rotary import Rotary
from isograd.nn.stream import Stream, gather_tokens
from isograd.sequence import whole
from isograd.sequence.block import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What attention reads of a model's config: models.TransformerConfig adds the rest."""

    hidden: int  # the width of the stream
    heads: int  # of queries
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden / heads
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # of each head
    norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    init_std: float = 0.02

    @property
    def features_per_head(self) -> int:
        """`head_dim`, or what it is when left out."""
        return self.head_dim or self.hidden // self.heads


class Attention(nn.Module):
    """Causal self-attention of a block, with grouped queries, rotary positions and norms of heads as options."""

    def __init__(
        self,
        config: AttentionConfig,
        mesh: Mesh,
        *,
        key: Key,
        window: int | None = None,
        rotary: Rotary | None = None,
        out_std: float | None = None,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        """window: how many tokens each sees, itself included; None: all before it. out_std: of the output projection's
        first values; None: that of the others."""
        super().__init__()
        tp, heads, dropout = mesh.size("tp"), config.heads, config.attention_dropout
        kv_heads, head_dim = config.kv_heads or heads, config.features_per_head
        if heads % kv_heads:
            raise ModelError("IG405", seen=f"{heads} and {kv_heads}")
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            fits = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
            nearest = min(fits, key=lambda t: (abs(t - tp), t))
            where = mesh.describe_rank()
            raise ModelError("IG406", where=where, heads=heads, kv_heads=kv_heads, tp=tp, nearest=nearest)
        if dropout and mesh.layout.ring > 1:
            raise ModelError("IG408", where=mesh.describe_rank(), dropout=dropout, layout=str(mesh.layout))
        self.mesh, self.head_dim, self.rotary = mesh, head_dim, rotary
        self.window, self.dropout = window, dropout
        self.heads, self.kv_heads = heads // tp, max(1, kv_heads // tp)
        start, stop = sequence.heads_here(self.heads, self.kv_heads, mesh)  # of this tp rank's, while attending
        self.attending = range(mesh.index("tp") * self.heads + start, mesh.index("tp") * self.heads + stop)
        shard, partial_over = _kv_shard(kv_heads, head_dim, tp)
        hidden = config.hidden
        same: dict[str, Any] = {"bias": config.qkv_bias, "std": config.init_std, **made}
        self.q = ColumnLinear(hidden, heads * head_dim, mesh, key=key.fold("q"), **same)
        kv = {**same, "shard": shard, "partial_over": partial_over}
        self.k = ColumnLinear(hidden, kv_heads * head_dim, mesh, key=key.fold("k"), **kv)
        self.v = ColumnLinear(hidden, kv_heads * head_dim, mesh, key=key.fold("v"), **kv)
        same |= {"bias": config.out_bias, "std": out_std or config.init_std}
        self.out = RowLinear(heads * head_dim, hidden, mesh, key=key.fold("out"), **same)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            about: dict[str, Any] = {"partial_over": ("tp",), "eps": config.norm_eps, **made}
            self.q_norm, self.k_norm = RMSNorm(head_dim, mesh, **about), RMSNorm(head_dim, mesh, **about)

    def forward(self, x: Tensor, stream: Stream, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The residual stream in and out. `angles`: of the rotary positions, the same for all blocks."""
        x = gather_tokens(x, self.mesh)
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))  # [T, heads, d]
        k = self.k(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None and angles is not None:
            q, k = self.rotary.turn(q, *angles), self.rotary.turn(k, *angles)
        q, k, v = (t.view(stream.batch, stream.length, *t.shape[1:]) for t in (q, k, v))
        if stream.cache is not None:
            before = stream.cache.get(self, (k[:, :0], v[:, :0]))
            k, v = stream.cache[self] = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        if stream.places is None or stream.places.cp == 1:
            y = self._attend_full(q, k, v, stream)
        else:
            y = sequence.attend(
                partial(self._attend_full, stream=stream), q, k, v, self.mesh, stream.places, stream.starts,
                window=self.window,
            )  # fmt: skip
        return self.out(y.reshape(-1, self.heads * self.head_dim))  # type: ignore[no-any-return]

    def _attend_full(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream) -> Tensor:
        """Attention over whole sequences [b, s, heads, d] of the heads `attending` (without cp: all of the rank's)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if q.shape[2] < k.shape[2]:  # one token behind those of the cache
            k, v = (t[:, :, -(self.window or t.shape[2]) :] for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        elif self.dropout and stream.key is not None and stream.ids is not None:
            y = self._with_dropout(q, k, v, stream)
        else:
            y = whole.attention(q, k, v, window=self.window, starts=stream.starts, bounds=stream.bounds)
        return y.transpose(1, 2)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream) -> Tensor:
        """Dropout needs explicit probabilities; its mask is a function of (query token, head, key position)."""
        ids = stream.whole_ids()
        assert stream.key is not None and ids is not None
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril()
        seen = seen if stream.starts is None else whole.same_document(stream.starts)
        seen = seen if self.window is None else seen.triu(1 - self.window)
        wide = accumulation_dtype(q.dtype)
        probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(q.dtype)
        heads = torch.arange(self.attending.start, self.attending.stop, device=q.device)
        places = (heads[:, None] * (1 << 32) + torch.arange(length, device=q.device)).reshape(-1)
        keep = rng.keep(self.dropout, stream.key.fold("attention"), ids, places)
        keep = keep.view(stream.batch, length, len(heads), length).transpose(1, 2)  # [b, heads, query, key]
        return torch.where(keep, probabilities * (1.0 / (1.0 - self.dropout)), 0) @ v


def _kv_shard(kv_heads: int, head_dim: int, tp: int) -> tuple[Shard, tuple[str, ...]]:
    """The rows of the key and value weights that each tp rank holds, and the axes owed by replicas of a head."""
    if kv_heads >= tp:
        return Shard.even("tp", 0, kv_heads * head_dim, tp), ()
    copies = tp // kv_heads
    heads = [rank // copies for rank in range(tp)]
    return Shard("tp", 0, tuple((h * head_dim, (h + 1) * head_dim) for h in heads)), (f"tp/{copies}",)
