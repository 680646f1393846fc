"""The residual stream between layers, and how it enters and leaves a tensor-parallel region.

Without sequence parallelism every tp rank holds all tokens of the data rank (type I). With it, each holds an equal
block of rows of the flattened stream (type V). Layers call `gather_tokens` and `reduce_output` either way, and the
layout decides.

                     without sp                       with sp
    gather_tokens    copy_in     I -> R               all_gather      V -> R
    reduce_output    all_reduce  P -> I               reduce_scatter  P -> V
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.nn.routing import Remembered
from isograd.sequence import TokenLayout


def gather_tokens(x: Tensor, mesh: Mesh) -> Tensor:
    """The residual stream at the start of a tensor-parallel region: all tokens, on every tp rank."""
    group = mesh.group("tp")
    return ops.all_gather(x, group) if mesh.layout.sp else ops.copy_in(x, group)


def reduce_output(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum over tp of partial outputs at the end of a region: all tokens, or this rank's sequence shard."""
    group = mesh.group("tp")
    return ops.reduce_scatter(x, group) if mesh.layout.sp else ops.all_reduce(x, group)


def stream_partial_over(mesh: Mesh) -> tuple[str, ...]:
    """The axes owed by a replicated parameter on the stream: under sp its gradient is a sum over sequence shards."""
    return ("tp",) if mesh.layout.sp else ()


Cache = dict[object, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Stream:
    """What layers must know about the tokens in the stream: their shape, positions, documents and ids for dropout."""

    batch: int
    length: int
    positions: Tensor  # [batch * length], of all this data rank's tokens; anew in each document
    ids: Tensor | None = None  # [batch * length] global token ids
    key: rng.Key | None = None  # None: no dropout
    places: TokenLayout | None = None  # where the sequences' other tokens are; None: all are here
    starts: Tensor | None = None  # [batch, whole length] where each token's document begins; None: one document
    bounds: Tensor | None = None  # of documents, for kernels on cards (sequence/whole.py)
    cache: Cache | None = None  # keys and values of tokens before these, by attention
    remembered: Remembered | None = None  # of one block: what its forward does again when it is run again

    def whole_ids(self) -> Tensor | None:
        """Global ids [batch * whole length] of all tokens of this rank's sequences, also those on other cp ranks."""
        if self.ids is None or self.places is None or self.places.cp == 1:
            return self.ids
        return token_ids(self.ids.view(self.batch, -1)[:, 0] >> 32, self.places.padded)

    def shard(self, per_token: Tensor, mesh: Mesh) -> Tensor:
        """This rank's rows of a per-token tensor: all of them, or its sequence shard."""
        if not mesh.layout.sp:
            return per_token
        part = len(per_token) // mesh.size("tp")
        return per_token[mesh.index("tp") * part : (mesh.index("tp") + 1) * part]

    def dropout(self, x: Tensor, p: float, mesh: Mesh, site: str) -> Tensor:
        """Apply dropout to the residual stream; `site` names the place in the block, which draws its own mask."""
        if p == 0.0 or self.key is None:
            return x
        if self.ids is None:
            raise ModelError("IG401", seen="samples=None")
        return rng.dropout(x, p, self.key.fold(site), self.shard(self.ids, mesh))


def token_ids(samples: Tensor, length: int) -> Tensor:
    """Global ids of all tokens of these sequences, flattened: each is made of its sequence's id and its position."""
    return (samples[:, None] * (1 << 32) + torch.arange(length, device=samples.device)).reshape(-1)
