"""The feed-forward layer, plain or gated, cut over its inner features.

One device: down(act(up(x))), or down(act(gate(x)) * up(x)).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.errors import ModelError, did_you_mean
from isograd.nn.linear import ColumnLinear, RowLinear
from isograd.nn.parameter import FactoryKwargs
from isograd.nn.stream import gather_tokens

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """The feed-forward layer of a block. `gated`: SwiGLU and its relatives."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        mesh: Mesh,
        *,
        key: Key,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        std: float = 0.02,
        out_std: float | None = None,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ModelError(
                "IG403",
                f"unknown activation {activation!r}{did_you_mean(activation, ACTIVATIONS)}",
                seen=activation,
                expected=", ".join(ACTIVATIONS),
            )
        if inner < mesh.size("tp"):
            raise ModelError("IG404", seen=inner, where=mesh.describe_rank(), inner=inner, tp=mesh.size("tp"))
        self.mesh, self.activation = mesh, ACTIVATIONS[activation]
        self.up = ColumnLinear(hidden, inner, mesh, key=key.fold("up"), std=std, bias=bias, **made)
        self.gate = (
            ColumnLinear(hidden, inner, mesh, key=key.fold("gate"), std=std, bias=bias, **made) if gated else None
        )
        self.down = RowLinear(inner, hidden, mesh, key=key.fold("down"), std=out_std or std, bias=bias, **made)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream in and out: [T, hidden], or this rank's sequence shard."""
        x = gather_tokens(x, self.mesh)
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
