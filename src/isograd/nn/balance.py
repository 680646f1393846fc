"""Losses that keep the load of experts even, and the counts they are made of. docs/experts.md has the formula.

Two things make the gradient that of one device under every layout. N and T are those of all of B, summed over every
axis that cuts it. And each rank's own tokens give a part of T L_B that is *added* to the other ranks' parts: the term
is the sum of T_B L_B over scopes, divided once by all tokens of the step. So it is a mean over tokens, and its weight
is the number of tokens routed here.

A running mean over micro-batches is not offered: its gradient depends on their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm import ops, raw
from isograd.comm.group import even_sizes
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.nn.routing import ExpertOptions, Route, count
from isograd.nn.stream import Stream
from isograd.sequence import TokenLayout


@dataclass(frozen=True)
class RoutedRows:
    """The tokens that this rank routes: rows of its data rank's stream, cut over tp."""

    mesh: Mesh
    places: TokenLayout
    batch: int
    sizes: tuple[int, ...]  # rows of each tp rank
    sequence: Tensor  # int64 [T]: the sequence of each row
    real: Tensor  # bool [T]: False for padding

    @classmethod
    def of(cls, stream: Stream, mesh: Mesh) -> RoutedRows:
        """What `stream` says about this rank's rows."""
        assert stream.places is not None
        rows, device = stream.batch * stream.length, stream.positions.device
        sizes = even_sizes(rows, mesh.size("tp"))
        place = mesh.index("tp")
        first = sum(sizes[:place])
        row = torch.arange(first, first + sizes[place], device=device)
        position = stream.places.positions(mesh.index("cp"), device)
        real = position[row % stream.length] < stream.places.length
        return cls(mesh, stream.places, stream.batch, sizes, row // stream.length, real)

    @property
    def padded(self) -> bool:
        """Whether any rank has rows that are no tokens."""
        return self.places.local * self.mesh.size("cp") > self.places.length

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.places.length

    def counts(self, indices: Tensor, experts: int) -> Tensor:
        """int64 [sequences, experts]: how often the whole sequences of this data rank chose each expert."""
        places = self.batch * experts
        place = (self.sequence[:, None] * experts + indices).masked_fill(~self.real[:, None], places)
        mine = count(place, places + 1)[:-1]
        return raw.all_reduce(mine, self.mesh.group("cp tp")).view(self.batch, experts)

    def gather(self, per_row: Tensor) -> Tensor:
        """[T, k] of my rows -> [batch, length, k] of whole sequences, in their order."""
        joined = raw.all_gather(per_row, self.mesh.group("tp"), self.sizes).unflatten(
            0, (self.batch, self.places.local)
        )
        parts = raw.gather_list(joined, self.mesh.group("cp"), control=False)
        return self.places.unshard(torch.cat(parts, 1))

    def scatter(self, whole: Tensor) -> Tensor:
        """[batch, length, k] of whole sequences -> [T, k] of my rows; False for padding."""
        part = self.places.shard(whole, self.mesh.index("cp"), False).flatten(0, 1)
        rows: Tensor = part.split(self.sizes)[self.mesh.index("tp")]
        return rows


def sums(
    logits: Tensor, scores: Tensor, route: Route, here: RoutedRows, options: ExpertOptions, counts: Tensor | None
) -> Tensor | None:
    """[2], equal on all tp ranks: T L_B summed over this data rank's scopes, and its tokens' squared log-sum-exps.
    None: the layer has neither loss.

    counts: int64 [experts], of the step before where the balance is "lagged", of this step where it is "batch".
    """
    if options.balance == "none" and not options.z_weight:
        return None
    nothing = scores.new_zeros(())
    z = logits.to(scores.dtype).logsumexp(-1).square().where(here.real, 0.0).sum() if options.z_weight else nothing
    balance = nothing
    if options.balance != "none":
        shares = scores if options.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        balance = (shares * _load(route, here, options, counts).to(shares.dtype)).sum(-1).where(here.real, 0.0).sum()
    return ops.all_reduce(torch.stack((balance, z)), here.mesh.group("tp"))


def _load(route: Route, here: RoutedRows, options: ExpertOptions, counts: Tensor | None) -> Tensor:
    """E N_i / (k T) of each row's scope, [T, experts] or [experts]: 1 for an expert with an even share."""
    if options.balance == "sequence":
        assert route.counts is not None
        return relative(route.counts)[here.sequence]
    if counts is None:
        raise ModelError("IG454", seen="balance 'batch', and a backward by hand", where=here.mesh.describe_rank())
    return torch.where(counts.any(), relative(counts), 1.0) if options.balance == "lagged" else relative(counts)


def relative(counts: Tensor) -> Tensor:
    """int64 [..., experts] -> E N_i / (k T) in fp64, where k T is the sum of the counts."""
    return counts.double() * counts.shape[-1] / counts.sum(-1, keepdim=True).clamp(min=1)
