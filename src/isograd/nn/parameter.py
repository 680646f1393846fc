"""Makes a layer's parameter: this rank's part of it, its contract, and its initial values, in one call."""

from __future__ import annotations

import torch
from torch import nn

from isograd.contract import Contract, Shard, declare
from isograd.mesh import Mesh
from isograd.random import Key, init_


def make(
    mesh: Mesh,
    shape: tuple[int, ...],
    *,
    shards: tuple[Shard, ...] = (),
    owes: tuple[str, ...] = (),
    key: Key | None = None,
    std: float = 0.0,
    fill: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """With a key: truncated normal values at their global indices; without: all `fill`."""
    box = Contract(shape, tuple(s for s in shards if mesh.size(s.axis) > 1)).local(mesh)
    local = tuple(stop - start for start, stop in box)
    parameter = nn.Parameter(torch.full(local, fill, dtype=dtype, device=device or mesh.device))
    if key is not None and parameter.device.type != "meta":
        init_(parameter, key, std, shape, box)
    return declare(parameter, mesh, shape=shape, shards=shards, owes=owes)
