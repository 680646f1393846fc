"""Which part of the reference's tensor does a rank hold? By its declared box, else by the parameter's own values.

Before the first step both runs hold the same weights, so each local row (or column) is found among the reference's
rows; this needs no knowledge of the framework and covers cuts that are not contiguous (fused qkv). Tensors that are
constant (biases of zeros) follow the weight of the same module, then their shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.verify.recording import Event

CLOSE = 1e-6  # relative: the same weight, stored in another precision


@dataclass(frozen=True)
class Place:
    """Indices into the whole tensor along the dimensions in which it is cut; {} means all of it."""

    cuts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        for dim, indices in self.cuts:
            whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
        return whole


def place(local: Tensor, whole: Tensor, info: Event, index: int, holders: int) -> Place | None:
    """None when it cannot be told. `index` of `holders`: the rank's place among those that hold the name."""
    if info["box"] is not None and tuple(info["global"]) == tuple(whole.shape):
        cuts = [(d, tuple(range(a, b))) for d, (a, b) in enumerate(info["box"]) if (a, b) != (0, whole.shape[d])]
        return Place(tuple(cuts))
    if local.shape == whole.shape:
        return Place()
    if local.dim() != whole.dim():
        return None
    differing = [d for d in range(local.dim()) if local.shape[d] != whole.shape[d]]
    if len(differing) != 1:
        return None
    dim = differing[0]
    if local.numel() and bool((local != local.reshape(-1)[0]).any()):
        found = _match(_rows(local, dim), _rows(whole, dim))
        if found is not None:
            return Place(((dim, found),))
    size = local.shape[dim]
    parts = -(-whole.shape[dim] // size) if size else 0
    if parts and whole.shape[dim] % size == 0:
        part = index * parts // holders  # neighbours hold copies when there are more ranks than parts
        return Place(((dim, tuple(range(part * size, (part + 1) * size))),))
    return None


def _rows(t: Tensor, dim: int) -> Tensor:
    return t.movedim(dim, 0).reshape(t.shape[dim], -1)


def _match(rows: Tensor, among: Tensor) -> tuple[int, ...] | None:
    """For each row, which of `among` it is."""
    if rows.shape[1] != among.shape[1] or rows.shape[0] > among.shape[0]:
        return None
    rows, among = rows.double(), among.double()
    found = []
    for chunk in rows.split(64):
        distance = torch.cdist(chunk, among)
        nearest = distance.min(1)
        if bool((nearest.values > CLOSE * chunk.norm(dim=1).clamp_min(1e-30)).any()):
            return None
        found += nearest.indices.tolist()
    return tuple(found)
