"""Causal self-attention with grouped queries, cut over heads.

One device: softmax(q k^T / sqrt(d) + causal mask) v for each head, key/value heads shared by groups of query heads;
as options, the divisor, a window, and a cap on scores (they become cap * tanh(scores / cap)).

Query heads are distributed evenly over tp. With fewer key/value heads than tp ranks, each rank holds the one head that
its queries need. Ranks with the same head are replicas, and its gradient is a sum over them ("tp/2": blocks of two).
Norms of query and key heads are shared by heads on different ranks and owe tp, with or without sequence parallelism.

Under cp each rank projects its own tokens to all heads of its tp rank, and isograd.sequence brings queries and keys
together. Contracts do not change: cp is a data axis, which every parameter owes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd import random, sequence
from isograd.contract import Shard
from isograd.errors import ModelError
from isograd.mesh import Mesh
from isograd.nn.linear import ColumnLinear, RowLinear
from isograd.nn.norm import RMSNorm, WidthNorm
from isograd.nn.rotary import Rotary
from isograd.nn.stream import Stream, enter
from isograd.random import Key
from isograd.sequence import band


def workable_tp(heads: int, kv_heads: int, wanted: int) -> int:
    """The tp size nearest to `wanted` that these numbers of heads allow."""
    fits = [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    return min(fits, key=lambda t: (abs(t - wanted), t))


class Attention(nn.Module):
    """Causal self-attention of a block, with grouped queries, rotary positions and norms of heads as options."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        mesh: Mesh,
        *,
        key: Key,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        rotary: Rotary | None = None,
        qk_norm: str | None = None,
        norm_eps: float = 1e-6,
        norm_plus_one: bool = False,
        query_scalar: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        std: float = 0.02,
        out_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """qk_norm: queries and keys are normalised over each "head", over the "width" of all heads, or (None) not.
        query_scalar: scores are divided by its root; None: by that of head_dim.
        window: how many tokens each sees, itself included; None: all before it.
        """
        super().__init__()
        tp = mesh.size("tp")
        kv_heads, head_dim = kv_heads or heads, head_dim or hidden // heads
        if heads % kv_heads:
            raise ModelError(
                "IG405",
                "query heads must be a multiple of key/value heads",
                seen=f"{heads} and {kv_heads}",
                expected="heads % kv_heads == 0",
            )
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            raise ModelError(
                "IG406",
                f"{heads} query and {kv_heads} key/value heads cannot be dealt out over tp{tp}",
                seen=f"tp{tp}",
                expected="a tp that divides the query heads, and that divides or is divided by the key/value heads",
                fix=f"the nearest that works is tp{workable_tp(heads, kv_heads, tp)}",
                where=mesh.where(),
            )
        if dropout and mesh.layout.ring > 1:
            raise ModelError(
                "IG408",
                "dropout of attention probabilities is not built for ring attention",
                seen=f"attention dropout {dropout} under {str(mesh.layout)!r}",
                expected="attention dropout 0, or a cp of Ulysses alone",
                fix="set attention_dropout=0.0 in the config, or use 'cpN ulysses'; other dropout works with both",
                where=mesh.where(),
            )
        self.mesh, self.head_dim, self.rotary, self.dropout = mesh, head_dim, rotary, dropout
        self.scale = None if query_scalar is None else query_scalar**-0.5  # None: head_dim ** -0.5
        self.window, self.softcap = window, softcap
        self.heads, self.kv_heads = heads // tp, max(1, kv_heads // tp)
        start, stop = sequence.heads_here(self.heads, self.kv_heads, mesh)  # of this tp rank's, while attending
        self.attending = range(mesh.index("tp") * self.heads + start, mesh.index("tp") * self.heads + stop)
        shard, owes = _kv_shard(kv_heads, head_dim, tp)
        same: dict[str, Any] = {"bias": bias, "std": std, "dtype": dtype, "device": device}
        self.q = ColumnLinear(hidden, heads * head_dim, mesh, key=key.fold("q"), **same)
        self.k = ColumnLinear(hidden, kv_heads * head_dim, mesh, key=key.fold("k"), shard=shard, owes=owes, **same)
        self.v = ColumnLinear(hidden, kv_heads * head_dim, mesh, key=key.fold("v"), shard=shard, owes=owes, **same)
        self.out = RowLinear(
            heads * head_dim,
            hidden,
            mesh,
            key=key.fold("out"),
            std=out_std or std,
            bias=out_bias,
            dtype=dtype,
            device=device,
        )
        self.q_norm: RMSNorm | WidthNorm | None = None
        self.k_norm: RMSNorm | WidthNorm | None = None
        self.over_width = qk_norm == "width"
        about: dict[str, Any] = {"eps": norm_eps, "dtype": dtype, "device": device}
        if qk_norm == "head":
            self.q_norm = RMSNorm(head_dim, mesh, owes=("tp",), plus_one=norm_plus_one, **about)
            self.k_norm = RMSNorm(head_dim, mesh, owes=("tp",), plus_one=norm_plus_one, **about)
        elif qk_norm == "width":
            even = Shard.even("tp", 0, heads * head_dim, tp)
            self.q_norm = WidthNorm(heads * head_dim, mesh, even, over="tp", **about)
            once = f"tp%{max(1, tp // kv_heads)}"  # one rank of each block of replicas
            self.k_norm = WidthNorm(kv_heads * head_dim, mesh, shard, over=once, owes=owes, **about)

    def forward(self, x: Tensor, stream: Stream, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The residual stream in and out. `angles`: of the rotary positions, the same for all blocks."""
        x = enter(x, self.mesh)
        q, k = self.q(x), self.k(x)
        if self.over_width and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (self.heads, self.head_dim))  # [T, heads, d]
        k = k.unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if not self.over_width and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None and angles is not None:
            q, k = self.rotary.turn(q, *angles), self.rotary.turn(k, *angles)
        q, k, v = (t.view(stream.batch, stream.length, *t.shape[1:]) for t in (q, k, v))
        if stream.places is None or stream.places.cp == 1:
            y = self._whole(q, k, v, stream)
        else:
            y = sequence.attend(
                partial(self._whole, stream=stream), q, k, v, self.mesh, stream.places, stream.starts, self.scale,
                self.window, self.softcap,
            )  # fmt: skip
        return self.out(y.reshape(-1, self.heads * self.head_dim))  # type: ignore[no-any-return]

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream) -> Tensor:
        """Attention over whole sequences [b, s, heads, d] of the heads `attending` (without cp: all of the rank's)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        how: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1], "scale": self.scale}
        if self.dropout and stream.key is not None and stream.ids is not None:
            y = self._with_dropout(q, k, v, stream)
        elif self.softcap is not None or (self.window is not None and self.window < q.shape[2]):
            y = band.attention(
                q, k, v, scale=self.scale, window=self.window, softcap=self.softcap, starts=stream.starts
            )
        elif stream.starts is not None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=_seen(stream.starts), **how)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **how)
        return y.transpose(1, 2)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, stream: Stream) -> Tensor:
        """Dropout needs explicit probabilities; its mask is a function of (query token, head, key position)."""
        ids = stream.whole_ids()
        assert stream.key is not None and ids is not None
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * (self.scale or self.head_dim**-0.5)
        scores = scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()
        seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril()
        seen = seen if stream.starts is None else _seen(stream.starts)
        seen = seen if self.window is None else seen.triu(1 - self.window)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(q.dtype)
        heads = torch.arange(self.attending.start, self.attending.stop, device=q.device)
        places = (heads[:, None] * (1 << 32) + torch.arange(length, device=q.device)).reshape(-1)
        keep = random.keep(self.dropout, stream.key.fold("attention"), ids, places)
        keep = keep.view(stream.batch, length, len(heads), length).transpose(1, 2)  # [b, heads, query, key]
        return torch.where(keep, probabilities * (1.0 / (1.0 - self.dropout)), 0) @ v


def _seen(starts: Tensor) -> Tensor:
    """A mask [b, 1, query, key]: each token sees earlier tokens of its document, which begins at starts [b, s]."""
    return (starts[:, :, None] == starts[:, None, :]).tril()[:, None]


def _kv_shard(kv_heads: int, head_dim: int, tp: int) -> tuple[Shard, tuple[str, ...]]:
    """The rows of the key and value weights that each tp rank holds, and the axes owed by replicas of a head."""
    if kv_heads >= tp:
        return Shard.even("tp", 0, kv_heads * head_dim, tp), ()
    copies = tp // kv_heads
    heads = [rank // copies for rank in range(tp)]
    return Shard("tp", 0, tuple((h * head_dim, (h + 1) * head_dim) for h in heads)), (f"tp/{copies}",)
