"""Contrastive losses over the rows of all data ranks: the sum over all rows / their number, wherever the rows are.

A loss is called with each tower's representations of this rank's rows. It returns the mean over *this rank's* rows; its
weight for the engine is their number. Queries come first, then documents (row i's positive is document i), then any
number of towers of hard negatives, each of any length. GradCache calls it, and you can call it yourself:

    loss = ig.contrastive.InfoNCE(mesh, scale=20.0, learn_scale=True)
    engine.backward(loss([q, d, negatives]), weight=len(q))

The gradient of a learned scale or bias is a sum over the data ranks, like every other: each rank's loss covers its own
rows only, so each row contributes exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.raw import Group
from isograd.contract import declare
from isograd.contrastive.columns import Columns
from isograd.contrastive.lent import Lent
from isograd.contrastive.tiles import TILE, Hide, pair_losses
from isograd.errors import ContrastiveError
from isograd.mesh import DATA, Mesh


@dataclass(frozen=True)
class Across:
    """The ranks whose rows are in a loss, and how many rows of each tower each of them has."""

    group: Group
    counts: tuple[tuple[int, ...], ...]  # [tower][member]

    def columns(self, towers: Sequence[int], ring: bool) -> Columns:
        """The columns that these towers make, one tower below the other on each member."""
        return Columns(self.group, tuple(map(sum, zip(*(self.counts[t] for t in towers), strict=True))), ring)


def across(towers: Sequence[Tensor], mesh: Mesh) -> Across:
    """Gather the number of rows of each data rank. Under cp, too, each row belongs to one rank of the loss."""
    mine = torch.tensor([len(t) for t in towers], device=mesh.device)
    table = torch.stack(raw.gather_list(mine, mesh.group(DATA)))
    return Across(mesh.group(DATA), tuple(tuple(column) for column in table.T.tolist()))


class PairLoss(nn.Module):
    """The common part of InfoNCE and SigLIP: a scale (stored as its logarithm, to stay positive), masks, tiles."""

    def __init__(self, mesh: Mesh, scale: float, learn: bool, normalize: bool, ring: bool, tile: int) -> None:
        super().__init__()
        self.mesh, self.normalize, self.ring, self.tile = mesh, normalize, ring, tile
        self.log_scale = self._number(math.log(scale), learn)

    def _number(self, value: float, learn: bool) -> nn.Parameter:
        parameter = nn.Parameter(torch.tensor(value, device=self.mesh.device), requires_grad=learn)
        return declare(parameter, self.mesh, shape=())

    def _vectors(self, towers: Sequence[Tensor], counted: Across) -> Sequence[Tensor]:
        """What `_losses` takes: the vectors that are multiplied, or those of a cache that asks for gradients later."""
        check_pairs(towers)
        if isinstance(towers, Lent) and self._may_borrow(counted):
            towers.gather(counted.group, counted.counts)
            return towers
        return [self._unit(t) for t in towers]

    def _may_borrow(self, counted: Across) -> bool:
        """Whether gradients may be computed later. All ranks' vectors are here until then: for two ranks that is less
        than what gradients take now; for more it may be more. Under cp, ranks take other rows into the loss."""
        return counted.group.size == 1 or (counted.group.size == 2 and not self.ring and self.mesh.size("cp") == 1)

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    def _losses(
        self,
        vectors: Sequence[Tensor],
        row: int,
        from_towers: Sequence[int],
        counted: Across,
        hide: Hide | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """One loss for each row of a tower, over the columns that other towers make."""
        scale = self.log_scale.exp()
        if isinstance(vectors, Lent):
            return vectors.losses(row, from_towers, self._unit, scale, bias, hide, self.tile)
        rows, columns = vectors[row] * scale, _joined(vectors, from_towers)
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
        counted: Across | None = None,
        ids: Sequence[Tensor] | None = None,
        guides: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The mean loss of this rank's rows.

        counted: how many rows each rank has; left out, the counts are gathered.
        ids: int64, for each tower's rows: a column with the same id as a row's document is not a negative of that row.
        guides: a guide model's vectors for each tower's rows.
        """
        counted = counted or across(towers, self.mesh)
        vectors = self._vectors(towers, counted)
        beside = {} if ids is None else {t: _of_whom(vectors, x, t) for t, x in enumerate(ids) if t or self.both}
        guided = {} if guides is None else {t: _of_whom(vectors, x, t) for t, x in enumerate(guides)}
        losses = self._one_way(vectors, 0, range(1, len(vectors)), counted, beside, guided)
        if self.both:
            losses = (losses + self._one_way(vectors, 1, [0], counted, beside, guided)) / 2
        return losses.sum() / max(1, len(losses))

    def _one_way(
        self,
        vectors: Sequence[Tensor],
        row: int,
        columns: Sequence[int],
        counted: Across,
        ids: Mapping[int, Tensor],
        guides: Mapping[int, Tensor],
    ) -> Tensor:
        per_row: list[Tensor] = []
        per_column: list[Tensor] = []
        if ids:
            per_row.append(ids[columns[0]])  # the positive's
            per_column.append(_joined(ids, columns))
        if guides:
            mine, own = (F.normalize(guides[t], dim=-1) for t in (row, columns[0]))
            near = (mine * own).sum(1)
            limit = near * (1 - self.margin) if self.relative_margin else near - self.margin
            per_row += [guides[row], limit]
            per_column.append(_joined(guides, columns))
        hide = Hide(tuple(per_row), tuple(per_column), bool(ids), bool(guides)) if per_column else None
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
        counted: Across | None = None,
        ids: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The mean loss of this rank's rows; the arguments are those of InfoNCE."""
        counted, columns = counted or across(towers, self.mesh), range(1, len(towers))
        vectors = self._vectors(towers, counted)
        hide = None
        if ids is not None:
            beside = {t: _of_whom(vectors, ids[t], t) for t in columns}
            hide = Hide((beside[1],), (_joined(beside, columns),), ids=True, guide=False)
        losses = self._losses(vectors, 0, columns, counted, hide, self.bias)
        return losses.sum() / max(1, len(losses))


class OfAll(nn.Module):
    """Any differentiable function of all rows' representations, as on one device: OfAll(mesh, lambda q, d: ...).

    Each data rank computes the function of all rows. The ranks' weights add up to the number of rows, so its gradient
    counts once, for the representations and for the function's own parameters: both are summed over the ranks.
    """

    def __init__(self, mesh: Mesh, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.mesh = mesh
        self.function = function  # an nn.Module, when it has parameters

    def forward(self, towers: Sequence[Tensor], counted: Across | None = None) -> Tensor:
        """The function's value, the same on every rank."""
        counted = counted or across(towers, self.mesh)
        every = [ops.all_gather(t, counted.group, 0, n) for t, n in zip(towers, counted.counts, strict=True)]
        return self.function(*every)


def _of_whom(vectors: Sequence[Tensor], mine: Tensor, tower: int) -> Tensor:
    """What `_losses` takes for each row of a tower beside its vectors: that of all ranks, or of mine."""
    return vectors.of_all(mine, tower) if isinstance(vectors, Lent) else mine


def _joined(per_tower: Sequence[Tensor] | Mapping[int, Tensor], towers: Sequence[int]) -> Tensor:
    """The rows of these towers, one tower below the other."""
    return per_tower[towers[0]] if len(towers) == 1 else torch.cat([per_tower[t] for t in towers])


def check_pairs(towers: Sequence[Tensor]) -> None:
    """Refuse towers whose queries and documents do not pair up (IG960)."""
    shapes = [tuple(t.shape) for t in towers]
    if len(towers) < 2 or len(towers[0]) != len(towers[1]) or any(t.dim() != 2 for t in towers):
        raise do_not_pair(f"{len(towers)} tower(s) of shapes {shapes}")


def do_not_pair(seen: str, where: str | None = None) -> ContrastiveError:
    """IG960, to be raised."""
    return ContrastiveError(
        "IG960",
        "representations that do not pair up",
        seen=seen,
        expected="queries [n, d], documents [n, d] whose row i belongs to query i, then hard negatives [any, d]",
        where=where,
    )


def same_rows(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Ids [n] for rows of integers [n, ...]: equal rows get equal ids on all ranks. Use them to mask duplicates.

    mask: 0 at padding, so that rows that differ only in the amount of padding at their end get equal ids.
    """
    flat = tokens.reshape(len(tokens), -1).long() + 1
    if mask is not None:
        flat = flat * mask.reshape(flat.shape)
    place = torch.arange(1, flat.shape[1] + 1, device=flat.device)
    return (flat * (place * 0x9E3779B97F4A7C1 ^ (place << 7))).sum(1)
