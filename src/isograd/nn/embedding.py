"""The token embedding, cut over the vocabulary, and learned positions.

One device: weight[tokens], and weight[positions].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.contract import Shard
from isograd.errors import ModelError
from isograd.inputs import WrongInputs
from isograd.mesh import Mesh
from isograd.nn.parameter import Layer, make
from isograd.nn.stream import Stream, leave, stream_owes
from isograd.random import Key


class VocabEmbedding(Layer):
    """Looks up tokens. Each tp rank gives its rows, and zeros for other tokens; the sum over tp is the lookup.

    The weight owes no axis beyond the data axes.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        owes: tuple[str, ...] = (),
        padding: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`owes`: the axes of a tie, when the head on another pipeline stage uses the same weight. `padding`: a token
        whose lookup gives its row no gradient, as torch's padding_idx."""
        super().__init__()
        if vocab < mesh.size("tp"):
            raise ModelError(
                "IG402",
                f"a vocabulary of {vocab} cannot be cut over tp{mesh.size('tp')}",
                seen=vocab,
                expected=f"at least {mesh.size('tp')} tokens",
                where=mesh.where(),
            )
        self.mesh = mesh
        self.wrong = WrongInputs("token ids", vocab)
        shard = Shard.even("tp", 0, vocab, mesh.size("tp"))
        self.first, end = shard.ranges[mesh.index("tp")]
        here = padding is not None and self.first <= padding < end
        self.padding = padding - self.first if here and padding is not None else None  # its row on this rank
        self.weight = make(
            mesh,
            (vocab, hidden),
            shards=(shard,),
            owes=owes,
            key=key.fold("weight"),
            std=std,
            dtype=dtype,
            device=device,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [T] of this data rank -> the residual stream [T, hidden], or this rank's sequence shard of it.

        A token outside the vocabulary becomes NaN and is counted: an Engine then refuses the step on all ranks.
        """
        wrong = self.wrong.find(tokens)[:, None]
        if self.mesh.size("tp") == 1:
            found = F.embedding(tokens.masked_fill(wrong[:, 0], 0), self.weight, self.padding)
            with torch.no_grad():  # autograd need not know: it saves a pass, and the loss will be NaN anyway
                return found.masked_fill_(wrong, torch.nan)
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.weight.shape[0])
        found = F.embedding(torch.where(here, rows, 0), self.weight, self.padding)
        elsewhere = torch.where(wrong, torch.nan, 0.0).to(found.dtype)
        return leave(torch.where(here[:, None], found, elsewhere), self.mesh)


class LearnedPositions(Layer):
    """Adds a learned vector per position to the stream.

    It is added after the sum over the vocabulary. Under sp its gradient is a sum over sequence shards, so it owes tp.
    """

    def __init__(
        self,
        positions: int,
        hidden: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = make(
            mesh,
            (positions, hidden),
            owes=stream_owes(mesh),
            key=key.fold("weight"),
            std=std,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        """x plus the vectors of its tokens' positions."""
        return x + F.embedding(stream.mine(stream.positions, self.mesh), self.weight)
