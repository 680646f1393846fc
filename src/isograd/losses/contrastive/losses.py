"""Contrastive losses over the rows of all data ranks: the sum over all rows / their number, wherever the rows are.

A loss is called with each tower's representations of this rank's rows. It returns the mean over *this rank's* rows; its
weight for the engine is their number. Queries come first, then documents (row i's positive is document i), then any
number of towers of hard negatives, each of any length. GradientCache calls it, and you can call it yourself:

    loss = ig.contrastive.InfoNCE(mesh, scale=20.0, learn_scale=True)
    engine.backward(loss([q, d, negatives]), weight=len(q))

The gradient of a learned scale or bias is a sum over the data ranks, like every other: each rank's loss covers its own
rows only, so each row contributes exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.group import Group
from isograd.core.contract import declare
from isograd.core.mesh import DATA, Mesh
from isograd.errors import ContrastiveError
from isograd.losses.contrastive.columns import Columns
from isograd.losses.contrastive.tiles import TILE, FalseNegativeMask, pair_losses


@dataclass(frozen=True)
class NegativesScope:
    """The ranks whose rows are in a loss, and how many rows of each tower each of them has."""

    group: Group
    counts: tuple[tuple[int, ...], ...]  # [tower][member]

    def columns(self, towers: Sequence[int], ring: bool) -> Columns:
        """The columns that these towers make, one tower below the other on each member."""
        return Columns(self.group, tuple(map(sum, zip(*(self.counts[t] for t in towers), strict=True))), ring)


def negatives_scope(towers: Sequence[Tensor], mesh: Mesh) -> NegativesScope:
    """Gather the number of rows of each data rank. Under cp, too, each row belongs to one rank of the loss."""
    mine = torch.tensor([len(t) for t in towers], device=mesh.device)
    table = raw.gather(mine, mesh.group(DATA))
    return NegativesScope(mesh.group(DATA), tuple(tuple(column) for column in table.T.tolist()))


class PairLoss(nn.Module):
    """The common part of InfoNCE and SigLIP: a scale (stored as its logarithm, to stay positive), masks, tiles."""

    def __init__(self, mesh: Mesh, scale: float, learn: bool, normalize: bool, ring: bool, tile: int) -> None:
        super().__init__()
        self.mesh, self.normalize, self.ring, self.tile = mesh, normalize, ring, tile
        self.log_scale = self._number(math.log(scale), learn)

    def _number(self, value: float, learn: bool) -> nn.Parameter:
        parameter = nn.Parameter(torch.tensor(value, device=self.mesh.device), requires_grad=learn)
        return declare(parameter, self.mesh, shape=())

    def _vectors(self, towers: Sequence[Tensor]) -> list[Tensor]:
        """The vectors that are multiplied."""
        if len(towers) < 2 or len(towers[0]) != len(towers[1]) or any(t.dim() != 2 for t in towers):
            raise ContrastiveError("IG960", seen=f"{len(towers)} tower(s) of shapes {[tuple(t.shape) for t in towers]}")
        return [F.normalize(t, dim=-1) if self.normalize else t for t in towers]

    def _losses(
        self,
        vectors: Sequence[Tensor],
        row: int,
        from_towers: Sequence[int],
        counted: NegativesScope,
        hide: FalseNegativeMask | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """One loss for each row of a tower, over the columns that other towers make."""
        rows, columns = vectors[row] * self.log_scale.exp(), _joined(vectors, from_towers)
        where = counted.columns(from_towers, self.ring)
        if bias is not None:
            rows = torch.cat((rows, bias.to(rows.dtype).expand(len(rows), 1)), 1)
            columns = torch.cat((columns, columns.new_ones(len(columns), 1)), 1)
        return pair_losses(rows, columns, where, sigmoid=bias is not None, hide=hide, tile=self.tile)


class InfoNCE(PairLoss):
    """Cross-entropy of each query's own document among the documents and hard negatives of all ranks."""

    def __init__(
        self,
        mesh: Mesh,
        scale: float = 20.0,
        *,
        learn_scale: bool = False,
        both: bool = False,
        margin: float = 0.0,
        relative_margin: bool = False,
        normalize: bool = True,
        ring: bool = False,
        tile: int = TILE,
    ) -> None:
        """scale: 1 / temperature. learn_scale: train the scale.
        both: average with the loss of the other direction, each document's own query among all queries.
        margin: with `guides` in a call, a column is not a negative when the guide's similarity to it exceeds its
            similarity to the positive - margin (relative_margin: similarity * (1 - margin)).
        normalize: scale each vector to length 1.
        ring: columns travel around a ring instead of being gathered. tile: the edge of a tile of logits.
        """
        super().__init__(mesh, scale, learn_scale, normalize, ring, tile)
        self.both, self.margin, self.relative_margin = both, margin, relative_margin

    def forward(
        self,
        towers: Sequence[Tensor],
        counted: NegativesScope | None = None,
        ids: Sequence[Tensor] | None = None,
        guides: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The mean loss of this rank's rows.

        counted: how many rows each rank has; left out, the counts are gathered.
        ids: int64, for each tower's rows: a column with the same id as a row's document is not a negative of that row.
        guides: a guide model's vectors for each tower's rows.
        """
        counted = counted or negatives_scope(towers, self.mesh)
        vectors = self._vectors(towers)
        losses = self._one_way(vectors, 0, range(1, len(vectors)), counted, ids, guides)
        if self.both:
            losses = (losses + self._one_way(vectors, 1, [0], counted, ids, guides)) / 2
        return losses.sum() / max(1, len(losses))

    def _one_way(
        self,
        vectors: Sequence[Tensor],
        row: int,
        columns: Sequence[int],
        counted: NegativesScope,
        ids: Sequence[Tensor] | None,
        guides: Sequence[Tensor] | None,
    ) -> Tensor:
        per_row: list[Tensor] = []
        per_column: list[Tensor] = []
        if ids is not None:
            per_row.append(ids[columns[0]])  # the positive's
            per_column.append(_joined(ids, columns))
        if guides is not None:
            mine, own = (F.normalize(guides[t], dim=-1) for t in (row, columns[0]))
            near = (mine * own).sum(1)
            limit = near * (1 - self.margin) if self.relative_margin else near - self.margin
            per_row += [guides[row], limit]
            per_column.append(_joined(guides, columns))
        hide = None
        if per_column:
            hide = FalseNegativeMask(tuple(per_row), tuple(per_column), ids is not None, guides is not None)
        return self._losses(vectors, row, columns, counted, hide)


class SigLIP(PairLoss):
    """Binary cross-entropy of every pair of rows: does it belong together? Columns share no sum: a ring fits."""

    def __init__(
        self,
        mesh: Mesh,
        scale: float = 10.0,
        bias: float = -10.0,
        *,
        learn: bool = True,
        normalize: bool = True,
        ring: bool = True,
        tile: int = TILE,
    ) -> None:
        """scale, bias: of the logits; `learn` trains both. The other options are those of InfoNCE."""
        super().__init__(mesh, scale, learn, normalize, ring, tile)
        self.bias = self._number(bias, learn)

    def forward(
        self,
        towers: Sequence[Tensor],
        counted: NegativesScope | None = None,
        ids: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The mean loss of this rank's rows; the arguments are those of InfoNCE."""
        counted, columns = counted or negatives_scope(towers, self.mesh), range(1, len(towers))
        hide = None
        if ids is not None:
            hide = FalseNegativeMask((ids[1],), (_joined(ids, columns),), ids=True, guide=False)
        losses = self._losses(self._vectors(towers), 0, columns, counted, hide, self.bias)
        return losses.sum() / max(1, len(losses))


class FullBatchLoss(nn.Module):
    """Any differentiable function of all rows' vectors, as on one device: FullBatchLoss(mesh, lambda q, d: ...).

    Each data rank computes the function of all rows. The ranks' weights add up to the number of rows, so its gradient
    counts once, for the representations and for the function's own parameters: both are summed over the ranks.
    """

    def __init__(self, mesh: Mesh, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mesh = mesh
        self.function = function  # an nn.Module, when it has parameters

    def forward(self, towers: Sequence[Tensor], counted: NegativesScope | None = None) -> Tensor:
        """The function's value, the same on every rank."""
        counted = counted or negatives_scope(towers, self.mesh)
        every = [ops.all_gather(t, counted.group, 0, n) for t, n in zip(towers, counted.counts, strict=True)]
        return self.function(*every)


def _joined(per_tower: Sequence[Tensor], towers: Sequence[int]) -> Tensor:
    """The rows of these towers, one tower below the other."""
    return per_tower[towers[0]] if len(towers) == 1 else torch.cat([per_tower[t] for t in towers])


def row_ids(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Ids [n] for rows of integers [n, ...]: equal rows get equal ids on all ranks. Use them to mask duplicates.

    mask: 0 at padding, so that rows that differ only in the amount of padding at their end get equal ids.
    """
    flat = tokens.reshape(len(tokens), -1).long() + 1
    if mask is not None:
        flat = flat * mask.reshape(flat.shape)
    place = torch.arange(1, flat.shape[1] + 1, device=flat.device)
    return (flat * (place * 0x9E3779B97F4A7C1 ^ (place << 7))).sum(1)
