"""Gradients of vectors that are computed when they are asked for, a block of rows at a time.

GradCache lends the towers' vectors to the loss, as a list of the class `Lent`. On one or two data ranks, InfoNCE and
SigLIP then return their value alone: its graph leads to the scale and the bias, and each direction of the loss keeps
one number per row, the total of the row's logits. Autograd brings the weight of each row's loss. From both,
`Lent.gradient` makes the gradient of any rows of any tower:

    as rows      weight * (slopes of the row's logits @ columns - its own column)
    as columns   (weights * slopes of the column's logits) @ rows - weight * the row whose own column it is

where a slope is a softmax or a sigmoid (tiles.py). So a batch takes the memory of its vectors, without that of their
gradients, or of normalised copies. The price is one product more: logits are computed for totals, for rows and for
columns. tiles.py is the same for any number of ranks, and for callers without a cache.

On two ranks:

1. `gather`: both ranks get all vectors. A rank's own ones become a part of them.
2. Forward: each rank computes the totals and losses of its own rows, over all columns.
3. Backward: the ranks tell each other the totals and weights of their rows.
4. `gradient`: each rank adds up, for rows of its own, what the losses of all ranks' rows say. Nothing is reduced.

One device: naive.py, with logits = rows @ columns.T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group
from isograd.contrastive.tiles import Hide, hide_pairs, no_autocast
from isograd.once import once


class Lent(list[Tensor]):
    """Towers of vectors, and the losses that owe them gradients. What autograd has brought to `.grad` counts, too."""

    def __init__(self, towers: Sequence[Tensor]) -> None:
        super().__init__(towers)
        self.directions: list[Direction] = []
        self.whole: list[Tensor] = []  # the vectors of all data ranks, one rank's behind the other's

    def gather(self, group: Group, counts: Sequence[Sequence[int]]) -> None:
        """Bring the other ranks' vectors, once. From here on mine are a part of them: they are not there twice."""
        if self.whole:
            return
        self.group, self.counts = group, counts
        for tower, mine in enumerate(self):
            self.whole.append(self.of_all(mine.detach(), tower))
            if group.size > 1:
                mine.data = self.whole[tower][_mine(counts[tower], group)]

    def of_all(self, mine: Tensor, tower: int) -> Tensor:
        """What all ranks have for each row of a tower."""
        return raw.all_gather(mine, self.group, self.counts[tower])

    def losses(
        self,
        row: int,
        columns: Sequence[int],
        unit: Callable[[Tensor], Tensor],
        scale: Tensor,
        bias: Tensor | None,
        hide: Hide | None,
        tile: int,
    ) -> Tensor:
        """The losses [n] of my rows of a tower, over the columns that other towers make. `gradient` adds up their
        gradients. `unit` makes of vectors what is multiplied; `hide` has the rows and columns of all ranks."""
        direction = Direction(self.whole, self.counts, self.group, row, tuple(columns), unit, tile, hide)
        self.directions.append(direction)
        return _Losses.apply(self[row], scale, bias, direction)  # type: ignore[no-any-return, no-untyped-call]

    def gradient(self, tower: int, here: slice) -> Tensor:
        """The gradient of these rows of a tower. Cheapest if rows that lie together are asked for one after another."""
        vectors = self[tower]
        found = torch.zeros_like(vectors[here]) if vectors.grad is None else vectors.grad[here].clone()
        with no_autocast(vectors):
            for direction in self.directions:
                direction.add_gradient(tower, here, found)
        return found


@dataclass
class Direction:
    """One loss for each row of a tower, over the columns that other towers make. Row i's own column is column i.
    Rows are numbered over all ranks."""

    towers: Sequence[Tensor]
    counts: Sequence[Sequence[int]]  # [tower][rank]
    group: Group
    row: int  # which of the towers has the rows
    columns: tuple[int, ...]  # which have the columns, in this order
    unit: Callable[[Tensor], Tensor]
    tile: int
    hide: Hide | None
    scale: Tensor = field(default_factory=lambda: torch.ones(()))
    bias: Tensor | None = None  # given: the loss is a sigmoid's, else a softmax's
    total: Tensor = field(default_factory=lambda: torch.empty(0))  # of each row
    weight: Tensor | None = None  # of each row's loss; None: the loss counts for nothing
    made: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (tower, first row of a tile): its gradient

    @torch.no_grad()
    def forward(self, learns: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of my rows. `learns`: also the slope-weighted mean of each row's logits without the bias, less
        that of its own column; and its sum of slopes, less 1."""
        rows, mine = self.towers[self.row], _mine(self.counts[self.row], self.group)
        self.total = rows.new_full((len(rows),), -torch.inf if self.bias is None else 0.0)
        own, mean, slopes = (torch.zeros_like(self.total) for _ in range(3))
        for here in self._tiles_between(mine):
            r = self._row_units(here)
            own[here] = (r * self._own_columns(here)).sum(1)
            for tower, there in self._column_tiles():
                z = self._logits(r, here, self.unit(self.towers[tower][there]), tower, there)
                lowest = torch.finfo(z.dtype).min  # in the place of -inf, which times a slope of 0 is no number
                if self.bias is not None:
                    self.total[here] += F.softplus(z).sum(1)
                    slope = z.sigmoid() if learns else z
                else:
                    before = self.total[here].clone()
                    self.total[here] = torch.logaddexp(before, z.logsumexp(1))
                    now = self.total[here].clamp(min=lowest)
                    mean[here] *= (before - now).exp_()
                    slope = (z - now[:, None]).exp_() if learns else z
                if learns:
                    slopes[here] += slope.sum(1)
                    mean[here] += slope.mul_(z.clamp_(min=lowest)).sum(1)
        losses = self.total - own
        if self.bias is not None:
            losses, mean = losses - self.bias, mean - slopes * self.bias
        return losses[mine], (mean - own)[mine], (slopes - 1)[mine]

    def weigh(self, weight: Tensor) -> None:
        """Note the weights of my rows' losses. Ranks tell each other the weights and totals of theirs."""
        mine = torch.stack((self.total[_mine(self.counts[self.row], self.group)], weight), 1)
        self.total, self.weight = raw.all_gather(mine, self.group, self.counts[self.row]).unbind(1)

    def add_gradient(self, tower: int, here: slice, found: Tensor) -> None:
        """Add the gradient of these rows of mine. It is made by the tiles of the forward: whether a guide hides a pair
        may depend on a rounding, and so on the shape of the product."""
        if self.weight is None or tower not in (self.row, *self.columns) or here.start >= here.stop:
            return
        firsts = range(here.start // self.tile * self.tile, here.stop, self.tile)
        self.made = {
            (tower, first): self.made[tower, first] if (tower, first) in self.made else self._made(tower, first)
            for first in firsts
        }
        for first in firsts:
            start, stop = max(first, here.start), min(first + self.tile, here.stop)
            found[start - here.start : stop - here.start] += self.made[tower, first][start - first : stop - first]

    def _made(self, tower: int, first: int) -> Tensor:
        """The gradient of a tile of my rows, as rows and as columns."""
        mine = _mine(self.counts[tower], self.group)
        here = slice(mine.start + first, min(mine.start + first + self.tile, mine.stop))
        with torch.enable_grad():
            vectors = self.towers[tower][here].detach().requires_grad_()
            units = self.unit(vectors)
        of_units = torch.zeros_like(units)
        if tower == self.row:
            self._add_as_rows(here, of_units)
        if tower in self.columns:
            self._add_as_columns(tower, here, units.detach(), of_units)
        return torch.autograd.grad(units, vectors, of_units)[0]

    @torch.no_grad()
    def _add_as_rows(self, here: slice, of_units: Tensor) -> None:
        assert self.weight is not None
        r, weight = self._row_units(here), self.weight[here, None]
        mine = self._own_columns(here) * -weight
        for tower, there in self._column_tiles():
            c = self.unit(self.towers[tower][there])
            mine.addmm_(self._slopes(r, here, c, tower, there), c)
        of_units += mine.mul_(self.scale)

    @torch.no_grad()
    def _add_as_columns(self, tower: int, there: slice, c: Tensor, of_units: Tensor) -> None:
        assert self.weight is not None
        for here in self._tiles(self.row):
            r = self._row_units(here)
            of_units.addmm_(self._slopes(r, here, c, tower, there).T, r)
        if tower == self.columns[0]:
            of_units.addcmul_(self._row_units(there), self.weight[there, None], value=-1)

    def _slopes(self, r: Tensor, here: slice, c: Tensor, tower: int, there: slice) -> Tensor:
        """Weight times slope of each pair of a tile."""
        assert self.weight is not None
        z = self._logits(r, here, c, tower, there)
        slope = z.sub_(self.total[here, None]).exp_() if self.bias is None else z.sigmoid_()
        return slope.mul_(self.weight[here, None])

    def _logits(self, r: Tensor, here: slice, c: Tensor, tower: int, there: slice) -> Tensor:
        z = r @ c.T
        if self.bias is not None:
            z += self.bias
        if self.hide is not None:
            before = sum(len(self.towers[t]) for t in self.columns[: self.columns.index(tower)])
            among_all = slice(before + there.start, before + there.start + len(c))
            hide_pairs(z, self.hide, here, [t[among_all] for t in self.hide.columns], here.start, among_all.start)
        return z

    def _row_units(self, here: slice) -> Tensor:
        return self.unit(self.towers[self.row][here]) * self.scale

    def _own_columns(self, here: slice) -> Tensor:
        return self.unit(self.towers[self.columns[0]][here])

    def _tiles(self, tower: int) -> Iterator[slice]:
        """Those of each rank's rows by themselves, as that rank cuts them."""
        return chain.from_iterable(map(self._tiles_between, _parts(self.counts[tower])))

    def _tiles_between(self, part: slice) -> Iterator[slice]:
        firsts = range(part.start, part.stop, self.tile)
        return (slice(first, min(first + self.tile, part.stop)) for first in firsts)

    def _column_tiles(self) -> Iterator[tuple[int, slice]]:
        return ((tower, there) for tower in self.columns for there in self._tiles(tower))


def _parts(counts: Sequence[int]) -> list[slice]:
    """Where each rank's rows are."""
    ends = [0, *accumulate(counts)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _mine(counts: Sequence[int], group: Group) -> slice:
    return _parts(counts)[group.index]


class _Losses(torch.autograd.Function):
    """The losses of a direction. Backward notes the rows' weights; the vectors' gradients are computed later."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Tensor, bias: Tensor | None, direction: Direction) -> Tensor:
        # Copies: at ZeRO 3 a parameter loses its memory behind the forward.
        direction.scale = scale.detach().clone()
        direction.bias = None if bias is None else bias.detach().clone().to(rows.dtype)
        losses, by_log_scale, by_bias = direction.forward(any(ctx.needs_input_grad[1:3]))
        ctx.save_for_backward(by_log_scale, by_bias, scale)
        ctx.direction, ctx.learns = direction, ctx.needs_input_grad[1:3]
        return losses

    @staticmethod
    @once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_log_scale, by_bias, scale = ctx.saved_tensors
        ctx.direction.weigh(gradient)
        of_scale, of_bias = None, None
        if ctx.learns[0]:
            of_scale = (gradient * by_log_scale).sum() / scale
        if ctx.learns[1]:
            of_bias = (gradient * by_bias).sum()
        return None, of_scale, of_bias, None
