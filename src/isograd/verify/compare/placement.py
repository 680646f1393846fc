"""Which part of the reference's tensor does a rank hold? By its declared box, else by the parameter's own values.

Before the first step both runs hold the same weights, so each local row (or column) is found among the reference's
rows; this needs no knowledge of the framework and covers cuts that are not contiguous (fused qkv). Tensors that are
constant (biases of zeros) follow the weight of the same module, then their shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.verify import tolerances
from isograd.verify.record.events import Parameter


@dataclass(frozen=True)
class Place:
    """Indices into the whole tensor along the dimensions in which it is cut, or the [start, stop] of its elements in a
    row; neither means all of it."""

    cuts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    row: tuple[int, int] | None = None

    @property
    def partial(self) -> bool:
        """Whether it is a part of the whole."""
        return bool(self.cuts) or self.row is not None

    def of(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor."""
        if self.row is not None:
            return whole.reshape(-1)[slice(*self.row)]
        for dim, indices in self.cuts:
            whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
        return whole


def place(local: Tensor, whole: Tensor, info: Parameter, index: int, holders: int) -> Place | None:
    """None when it cannot be told. `index` of `holders`: the rank's place among those that hold the name."""
    if info.box is not None and info.whole == tuple(whole.shape):
        if info.in_a_row:
            return Place(row=info.box[0])
        cuts = [(d, tuple(range(a, b))) for d, (a, b) in enumerate(info.box) if (a, b) != (0, whole.shape[d])]
        return Place(tuple(cuts))
    if local.shape == whole.shape:
        return Place()
    if local.dim() != whole.dim():
        return None
    differing = [d for d in range(local.dim()) if local.shape[d] != whole.shape[d]]
    if len(differing) != 1:
        return None
    dim = differing[0]
    even = _even(local.shape[dim], whole.shape[dim], dim, index, holders)
    if local.numel() and bool((local != local.reshape(-1)[0]).any()):
        if even is not None and bool(_close(_rows(local, dim), _rows(even.of(whole), dim)).all()):
            return even  # equal rows elsewhere do not matter
        found = _match(_rows(local, dim), _rows(whole, dim))
        if found is not None:
            return None if -1 in found else Place(((dim, found),))
    return even


def _even(size: int, of: int, dim: int, index: int, holders: int) -> Place | None:
    """By shape alone; neighbours hold copies when there are more ranks than parts."""
    if not size or of % size:
        return None
    part = index * (of // size) // holders
    return Place(((dim, tuple(range(part * size, (part + 1) * size))),))


def _rows(t: Tensor, dim: int) -> Tensor:
    return t.movedim(dim, 0).reshape(t.shape[dim], -1).double()


def _close(rows: Tensor, others: Tensor) -> Tensor:
    close: Tensor = (rows - others).norm(dim=-1) <= tolerances.STORED * rows.norm(dim=-1).clamp_min(1e-30)
    return close


def _match(rows: Tensor, among: Tensor) -> tuple[int, ...] | None:
    """For each row, which of `among` it is: of several equal ones the one beside its neighbour's, else -1."""
    if rows.shape[1] != among.shape[1] or rows.shape[0] > among.shape[0]:
        return None
    found = []
    for chunk in rows.split(64):
        near = torch.cdist(chunk, among) <= tolerances.STORED * chunk.norm(dim=1, keepdim=True).clamp_min(1e-30)
        if not bool(near.any(1).all()):
            return None
        found += torch.where(near.sum(1) == 1, near.int().argmax(1), -1).tolist()
    for turn, order in ((1, range(1, len(found))), (-1, range(len(found) - 2, -1, -1))):
        for i in order:
            beside = found[i - turn] + turn
            known = found[i] == -1 and found[i - turn] != -1 and 0 <= beside < len(among)
            if known and bool(_close(rows[i], among[beside])):
                found[i] = beside
    return tuple(found)
