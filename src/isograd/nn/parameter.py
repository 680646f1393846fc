"""Makes a layer's parameter: this rank's part, its contract and its initial values. Copies of a layer keep them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn

from isograd.core.contract import Contract, Shard, declare, metadata_of, set_init_fn, set_metadata
from isograd.core.mesh import DATA, Mesh
from isograd.core.rng import Key, init_


class FactoryKwargs(TypedDict, total=False):
    """Of a layer's parameters, as torch's layers take them."""

    dtype: torch.dtype | None
    device: torch.device | str | None


class Layer(nn.Module):
    """A module whose copies (`copy.deepcopy`, for a moving average of weights) keep the contracts of its parameters.

    torch drops them: a copied head would not know which tokens it holds, and a copied norm would owe nothing. Derive
    your own layers from this class if they declare parameters.
    """

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_marks": [(name, metadata_of(p)) for name, p in self.named_parameters(recurse=False)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("_marks")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, found in marks:
            set_metadata(self.get_parameter(name), found)


def make(
    mesh: Mesh,
    shape: tuple[int, ...],
    *,
    shards: tuple[Shard, ...] = (),
    partial_over: tuple[str, ...] = (),
    data: str = DATA,
    key: Key | None = None,
    std: float = 0.0,
    fill: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Make this rank's part of a parameter: truncated normal values with a key, all `fill` without one.

    On the meta device the values are made later, by the Engine.
    """
    box = Contract(shape, tuple(s for s in shards if mesh.size(s.axis) > 1)).local(mesh)
    values = partial(_values, shape, key, std, fill, dtype or torch.get_default_dtype())
    place = torch.device(device or mesh.device)
    parameter = nn.Parameter(values(box, place))
    if parameter.is_meta:
        set_init_fn(parameter, values)
    return declare(parameter, mesh, shape=shape, shards=shards, partial_over=partial_over, data=data)


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
