"""Makes a layer's parameter: this rank's part of it, its contract, and its initial values, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from isograd.contract import Contract, Shard, declare, remember_start
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
    """With a key: truncated normal values at their global indices; without: all `fill`. On the meta device: later."""
    box = Contract(shape, tuple(s for s in shards if mesh.size(s.axis) > 1)).local(mesh)
    values = partial(_values, shape, key, std, fill, dtype or torch.get_default_dtype())
    place = torch.device(device or mesh.device)
    parameter = nn.Parameter(values(box, place))
    if parameter.is_meta:
        remember_start(parameter, values)
    return declare(parameter, mesh, shape=shape, shards=shards, owes=owes)


def _values(
    shape: tuple[int, ...],
    key: Key | None,
    std: float,
    fill: float,
    dtype: torch.dtype,
    box: Sequence[tuple[int, int]],
    device: torch.device,
) -> torch.Tensor:
    tensor = torch.full([stop - start for start, stop in box], fill, dtype=dtype, device=device)
    if key is not None and tensor.numel() and not tensor.is_meta:
        init_(tensor, key, std, shape, box)
    return tensor
