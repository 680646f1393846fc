"""Linear maps cut over tp. Column cuts output features. Row cuts input features, and its outputs are partial sums.

One device: y = x @ weight.T + bias, for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor

from isograd.core.contract import Shard
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.nn.parameter import FactoryKwargs, Layer, make
from isograd.nn.split_backward import linear
from isograd.nn.stream import reduce_output, stream_partial_over


class ColumnLinear(Layer):
    """A linear map whose output features are cut over tp. Its gradients owe no axis beyond the data axes.

    It expects an x that has passed `gather_tokens`. `shard` replaces the even cut. `product` computes x W^T + b.
    """

    product: Callable[..., Tensor] = staticmethod(linear)

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
        partial_over: tuple[str, ...] = (),
        **made: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        shards = (shard or Shard.even("tp", 0, outputs, mesh.size("tp")),)
        cut: dict[str, Any] = {"shards": shards, "partial_over": partial_over, **made}
        self.weight = make(mesh, (outputs, inputs), key=key.fold("weight"), std=std, **cut)
        self.bias = make(mesh, (outputs,), **cut) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> this rank's output features [T, outputs / tp]."""
        return self.product(x, self.weight, self.bias)


class RowLinear(Layer):
    """A linear map whose input features are cut over tp; `reduce_output` sums the partial outputs.

    The weight is partial over no axis beyond the data axes. The bias is added once, after the sum; under sp, where each
    rank adds it to its own tokens, it is partial over tp.
    """

    product: Callable[..., Tensor] = staticmethod(linear)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        *,
        key: Key,
        std: float = 0.02,
        bias: bool = False,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.mesh = mesh
        shards = (Shard.even("tp", 1, inputs, mesh.size("tp")),)
        self.weight = make(mesh, (outputs, inputs), shards=shards, key=key.fold("weight"), std=std, **made)
        self.bias = make(mesh, (outputs,), partial_over=stream_partial_over(mesh), **made) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's input features [T, inputs / tp] -> the residual stream [T, outputs], or a shard of it."""
        y = reduce_output(self.product(x, self.weight), self.mesh)
        return y if self.bias is None else y + self.bias
