"""The residual stream between layers, and the two doors of a tensor-parallel region.

Without sequence parallelism every tp rank holds all its tokens (type I). With it, each holds an equal block of rows of
the flattened stream (type V). Layers do not know which: they `enter` and `leave`, and the layout decides.

             without sp                       with sp
    enter    copy_in     I -> R               all_gather      V -> R
    leave    all_reduce  P -> I               reduce_scatter  P -> V
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd import random
from isograd.comm import ops
from isograd.errors import ModelError
from isograd.mesh import Mesh
from isograd.sequence import Places


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    group = mesh.group("tp")
    return ops.all_gather(x, group) if mesh.layout.sp else ops.copy_in(x, group)


def leave(x: Tensor, mesh: Mesh) -> Tensor:
    group = mesh.group("tp")
    return ops.reduce_scatter(x, group) if mesh.layout.sp else ops.all_reduce(x, group)


def stream_owes(mesh: Mesh) -> tuple[str, ...]:
    """What a replicated parameter applied to the residual stream owes: its gradient sums over sequence shards."""
    return ("tp",) if mesh.layout.sp else ()


@dataclass(frozen=True)
class Stream:
    """What layers must know about the tokens that flow: shape, positions, and ids for dropout."""

    batch: int
    length: int
    positions: Tensor  # [batch * length], of all this data rank's tokens; anew in each document
    ids: Tensor | None = None  # [batch * length] global token ids
    key: random.Key | None = None  # None: no dropout
    places: Places | None = None  # where the sequences' other tokens are; None: all are here
    starts: Tensor | None = None  # [batch, whole length] where each token's document begins; None: one document

    def whole_ids(self) -> Tensor | None:
        """Global ids [batch * whole length] of all tokens of my sequences, those on other cp ranks too."""
        if self.ids is None or self.places is None or self.places.cp == 1:
            return self.ids
        return token_ids(self.ids.view(self.batch, -1)[:, 0] >> 32, self.places.padded)

    def mine(self, per_token: Tensor, mesh: Mesh) -> Tensor:
        """My rows of a per-token tensor: all of them, or my sequence shard."""
        if not mesh.layout.sp:
            return per_token
        part = len(per_token) // mesh.size("tp")
        return per_token[mesh.index("tp") * part : (mesh.index("tp") + 1) * part]

    def dropout(self, x: Tensor, p: float, mesh: Mesh, site: str) -> Tensor:
        """Dropout on the residual stream at a named site."""
        if p == 0.0 or self.key is None:
            return x
        if self.ids is None:
            raise ModelError(
                "IG401",
                "dropout needs the global ids of its tokens",
                seen="samples=None",
                expected="model(tokens, labels, key=..., samples=ids of the sequences)",
            )
        return random.dropout(x, p, self.key.fold(site), self.mine(self.ids, mesh))


def token_ids(samples: Tensor, length: int) -> Tensor:
    """Global ids of the tokens of these sequences, flattened: sequence id and position."""
    return (samples[:, None] * (1 << 32) + torch.arange(length, device=samples.device)).reshape(-1)
