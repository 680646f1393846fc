"""Which part of the reference's tensor does a rank hold? By its declared box, else by the parameter's own values.

Before the first step both runs hold the same weights, so each local row (or column) is found among the reference's
rows; this needs no knowledge of the framework and covers cuts that are not contiguous (fused qkv). Tensors that are
constant (biases of zeros) follow the weight of the same module, then their shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.record.events import Parameter
from isograd_verify.record.projection import Projected, project

Value = Tensor | Projected


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

    @overload
    def of(self, whole: Tensor) -> Tensor: ...
    @overload
    def of(self, whole: Value) -> Value: ...

    def of(self, whole: Value) -> Value:
        """This part of a whole tensor."""
        if isinstance(whole, Projected):
            if self.row is not None or len(self.cuts) > 1:
                return Projected(whole.shape, {})  # its sums tell of all of it, or of one cut
            return whole.select(*self.cuts[0]) if self.cuts else whole
        if self.row is not None:
            return whole.reshape(-1)[slice(*self.row)]
        for dim, indices in self.cuts:
            whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
        return whole


def projected(value: Value) -> Projected:
    """A tensor as a recording by sketches would tell it."""
    return value if isinstance(value, Projected) else project(value)


def place(local: Value, whole: Value, info: Parameter, index: int, holders: int) -> Place | None:
    """None when it cannot be told. `index` of `holders`: the rank's place among those that hold the name."""
    if info.box is not None and info.whole == tuple(whole.shape):
        if info.in_a_row:
            return Place(row=info.box[0])
        cuts = [(d, tuple(range(a, b))) for d, (a, b) in enumerate(info.box) if (a, b) != (0, whole.shape[d])]
        return Place(tuple(cuts))
    if tuple(local.shape) == tuple(whole.shape):
        return Place()
    if len(local.shape) != len(whole.shape):
        return None
    differing = [d for d in range(len(local.shape)) if local.shape[d] != whole.shape[d]]
    if len(differing) != 1:
        return None
    dim = differing[0]
    even = _even(local.shape[dim], whole.shape[dim], dim, index, holders)
    if isinstance(local, Projected) or isinstance(whole, Projected):
        local, whole = projected(local), projected(whole)
    if local.numel() and not (info.constant if isinstance(local, Projected) else _constant(local)):
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


def _constant(t: Tensor) -> bool:
    return not bool((t != t.reshape(-1)[0]).any())


def _rows(t: Value, dim: int) -> Tensor:
    if isinstance(t, Projected):
        return t.along[dim].T
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
