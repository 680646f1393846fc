"""Linear maps cut over tp. Column: output features are cut. Row: input features are cut, outputs are partial sums.

One device: y = x @ weight.T + bias, for both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.contract import Shard
from isograd.mesh import Mesh
from isograd.nn.parameter import Layer, make
from isograd.nn.stream import leave, stream_owes
from isograd.random import Key


class ColumnLinear(Layer):
    """Owes nothing: each rank has its own output features. Expects an entered x. `shard` overrides the even cut."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        bias: bool = False,
        shard: Shard | None = None,
        owes: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shards = (shard or Shard.even("tp", 0, outputs, mesh.size("tp")),)
        self.weight = make(
            mesh,
            (outputs, inputs),
            shards=shards,
            owes=owes,
            key=key.fold("weight"),
            std=std,
            dtype=dtype,
            device=device,
        )
        self.bias = make(mesh, (outputs,), shards=shards, owes=owes, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear(Layer):
    """The weight owes nothing. The bias is added once, after the sum; on sequence shards it therefore owes tp."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        shards = (Shard.even("tp", 1, inputs, mesh.size("tp")),)
        self.weight = make(
            mesh, (outputs, inputs), shards=shards, key=key.fold("weight"), std=std, dtype=dtype, device=device
        )
        self.bias = make(mesh, (outputs,), owes=stream_owes(mesh), dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = leave(F.linear(x, self.weight), self.mesh)
        return y if self.bias is None else y + self.bias
