"""Linear maps cut over tp. Column cuts output features. Row cuts input features, and its outputs are partial sums.

One device: y = x @ weight.T + bias, for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd import matmul
from isograd.contract import Shard
from isograd.mesh import Mesh
from isograd.nn.parameter import Layer, make
from isograd.nn.stream import leave, stream_owes
from isograd.random import Key


class ColumnLinear(Layer):
    """A linear map whose output features are cut over tp. Its gradients owe no axis beyond the data axes.

    It expects an x that has passed `enter`. `shard` replaces the even cut.
    """

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
        """x [T, inputs] -> this rank's output features [T, outputs / tp]."""
        return matmul.linear(x, self.weight, self.bias)


class RowLinear(Layer):
    """A linear map whose input features are cut over tp; `leave` sums the partial outputs.

    The weight owes no axis beyond the data axes. The bias is added once, after the sum; under sp, where each rank adds
    it to its own tokens, it owes tp.
    """

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
        """This rank's input features [T, inputs / tp] -> the residual stream [T, outputs], or a shard of it."""
        y = leave(matmul.linear(x, self.weight), self.mesh)
        return y if self.bias is None else y + self.bias
