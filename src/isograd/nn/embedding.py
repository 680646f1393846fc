"""The token embedding, cut over the vocabulary, and learned positions.

One device: weight[tokens], and weight[positions].

On CPUs the backward of F.embedding adds the half-precision rows of one token in half precision, which loses most of the
gradient of a frequent token. `lookup` adds them in fp32 and rounds once. CUDA's kernel for long lists of tokens does so
by itself (acc_type in EmbeddingBackwardKernel.cu).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.core.contract import Shard
from isograd.core.input_checks import IdCheck
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ModelError
from isograd.nn.parameter import FactoryKwargs, Layer, make
from isograd.nn.stream import Stream, reduce_output, stream_partial_over


class VocabEmbedding(Layer):
    """Looks up tokens. Each tp rank gives its rows, and zeros for other tokens; the sum over tp is the lookup.

    The weight is partial over no axis beyond the data axes.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        partial_over: tuple[str, ...] = (),
        padding: int | None = None,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        """`partial_over`: the axes of a tie, when the head on another pipeline stage uses the same weight. `padding`: a
        token whose lookup gives its row no gradient, as torch's padding_idx."""
        super().__init__()
        if vocab < mesh.size("tp"):
            raise ModelError("IG402", seen=vocab, where=mesh.describe_rank(), vocab=vocab, tp=mesh.size("tp"))
        self.mesh = mesh
        self.wrong = IdCheck("token ids", vocab)
        shard = Shard.even("tp", 0, vocab, mesh.size("tp"))
        self.first, end = shard.ranges[mesh.index("tp")]
        here = padding is not None and self.first <= padding < end
        self.padding = padding - self.first if here and padding is not None else None  # its row on this rank
        self.weight = make(
            mesh, (vocab, hidden), shards=(shard,), partial_over=partial_over, key=key.fold("weight"), std=std, **made
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] of this data rank -> the residual stream [T, hidden], or this rank's sequence shard of it.

        A token outside the vocabulary becomes NaN and is counted: an Engine then refuses the step on all ranks.
        """
        wrong = self.wrong.find(tokens)[:, None]
        if self.mesh.size("tp") == 1:
            found = lookup(tokens.masked_fill(wrong[:, 0], 0), self.weight, self.padding)
            with torch.no_grad():  # autograd need not know: it saves a pass, and the loss will be NaN anyway
                return found.masked_fill_(wrong, torch.nan)
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.weight.shape[0])
        found = lookup(torch.where(here, rows, 0), self.weight, self.padding)
        elsewhere = torch.where(wrong, torch.nan, 0.0).to(found.dtype)
        return reduce_output(torch.where(here[:, None], found, elsewhere), self.mesh)


class LearnedPositions(Layer):
    """Adds a learned vector per position to the stream.

    It is added after the sum over the vocabulary. Under sp its gradient is a sum over sequence shards: partial over tp.
    """

    def __init__(
        self,
        positions: int,
        hidden: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.mesh = mesh
        owes = stream_partial_over(mesh)
        self.weight = make(mesh, (positions, hidden), partial_over=owes, key=key.fold("weight"), std=std, **made)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        """x plus the vectors of its tokens' positions."""
        return x + lookup(stream.shard(stream.positions, self.mesh), self.weight)


def lookup(tokens: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """F.embedding(tokens, weight, padding), whose backward adds in fp32."""
    if weight.dtype.itemsize >= 4 or weight.device.type != "cpu":
        return F.embedding(tokens, weight, padding)
    return _Lookup.apply(tokens, weight, padding)  # type: ignore[no-any-return, no-untyped-call]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.padding = weight.shape, padding
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        rows, values = tokens.reshape(-1), gradient.reshape(-1, ctx.shape[1]).float()
        if ctx.padding is not None:
            values = values.masked_fill((rows == ctx.padding)[:, None], 0)
        total = values.new_zeros(ctx.shape).index_add(0, rows, values)
        return None, total.to(gradient.dtype), None
