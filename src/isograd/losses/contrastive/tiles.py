"""The loss of each row over all columns, tile by tile: no rank ever holds [rows, columns].

Both losses are  total(row's logits) - the positive's logit:

    InfoNCE   total = log sum exp      its gradient = softmax
    SigLIP    total = sum softplus     its gradient = sigmoid

The positive is local. Forward passes over the columns once and accumulates the total tile by tile; backward computes
each tile again and adds up the gradients of rows and columns. Memory: O(tile^2), and the columns that columns.py
fetches. The caller has multiplied the rows by the scale and has added the bias as one more feature.

One device: naive.py, with logits = rows @ columns.T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.comm import ops
from isograd.comm.first_order import first_order_only
from isograd.losses.contrastive.columns import Columns

TILE = 1024


@dataclass(frozen=True)
class FalseNegativeMask:
    """Which columns are not negatives of a row: those with its positive's id; those a guide finds too similar."""

    rows: tuple[Tensor, ...]  # for my rows: the positive's id; the guide's vector and its limit of similarity
    columns: tuple[Tensor, ...]  # for my columns: the id; the guide's vector
    ids: bool
    guide: bool

    def tile(self, rows: slice, columns: Sequence[Tensor]) -> Tensor:
        """The mask [rows, columns] of one tile: True where the column is hidden from the row."""
        hidden = torch.zeros((), dtype=torch.bool, device=columns[0].device)
        mine = [t[rows] for t in self.rows]
        if self.ids:
            hidden = mine[0][:, None] == columns[0][None]
        if self.guide:
            near = F.normalize(mine[-2], dim=-1) @ F.normalize(columns[-1], dim=-1).T
            hidden = hidden | (near > mine[-1][:, None])
        return hidden


@ops.uncompiled
def pair_losses(
    rows: Tensor,
    columns: Tensor,
    across: Columns,
    *,
    sigmoid: bool = False,
    hide: FalseNegativeMask | None = None,
    tile: int = TILE,
) -> Tensor:
    """My rows [n, d] and my columns [m, d] -> the losses [n] over all ranks' columns. Row i's positive is column i."""
    return _PairLosses.apply(rows, columns, across, sigmoid, hide, tile)  # type: ignore[no-any-return, no-untyped-call]


class _PairLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        across: Columns,
        sigmoid: bool,
        hide: FalseNegativeMask | None,
        tile: int,
    ) -> Tensor:
        ctx.rest = across, sigmoid, hide, tile
        total = rows.new_full((len(rows),), 0.0 if sigmoid else -torch.inf)

        def work(first: int, block: Sequence[Tensor], _: Tensor) -> None:
            for here, there, logits in _tiles(rows, first, block, across, hide, tile):
                del there
                if sigmoid:
                    total[here] += F.softplus(logits).sum(1)
                else:
                    total[here] = torch.logaddexp(total[here], logits.logsumexp(1))

        brought = across.bring([columns, *(hide.columns if hide else ())])
        with no_autocast(rows):
            across.visit(brought, work)
        ctx.save_for_backward(rows, total, *brought)
        return total - (rows * across.own(brought[0])[: len(rows)]).sum(1)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, total, *brought = ctx.saved_tensors
        across, sigmoid, hide, tile = ctx.rest
        drows = across.own(brought[0])[: len(rows)] * -gradient[:, None]

        def work(first: int, block: Sequence[Tensor], dcolumns: Tensor) -> None:
            for here, there, logits in _tiles(rows, first, block, across, hide, tile):
                slope = logits.sigmoid_() if sigmoid else logits.sub_(total[here, None]).exp_()
                slope *= gradient[here, None]
                drows[here].addmm_(slope, block[0][there])
                dcolumns[there].addmm_(slope.T, rows[here])

        with no_autocast(rows):
            dcolumns = across.collect(brought, work)
        dcolumns[: len(rows)].addcmul_(rows, gradient[:, None], value=-1)
        return drows, dcolumns, None, None, None, None


def no_autocast(x: Tensor) -> torch.autocast:
    """Turns autocast off: losses are computed in the dtype of their vectors."""
    return torch.autocast(x.device.type, enabled=False)


def _tiles(
    rows: Tensor, first: int, block: Sequence[Tensor], across: Columns, hide: FalseNegativeMask | None, tile: int
) -> Any:
    """(rows, columns of the block, logits) of each tile; hidden pairs are -inf."""
    for r in range(0, len(rows), tile):
        here = slice(r, r + tile)
        for c in range(0, len(block[0]), tile):
            there = slice(c, c + tile)
            logits = rows[here] @ block[0][there].T
            if hide is not None:  # but never a row's own column
                column = torch.arange(logits.shape[1], device=logits.device) + first + c
                own = torch.arange(len(logits), device=logits.device) + across.first + r
                hidden = hide.tile(here, [t[there] for t in block[1:]])
                logits.masked_fill_(hidden & (column[None] != own[:, None]), -torch.inf)
            yield here, there, logits
