"""RMSNorm and LayerNorm. Statistics in fp32 (fp64 in fp64 models).

One device: weight * x / rms(x), and weight * (x - mean) / std + bias. Gemma's norms multiply with 1 + weight.

A norm over the width of all heads (WidthNorm) sums squares over tp; its weight is cut as the heads are.

Under sequence parallelism the parameters of a norm on the residual stream owe tp (Megatron-LM issue 1446 is about
forgetting it). A norm of query or key heads is shared by heads on different tp ranks and always owes tp: owes=("tp",).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.comm import ops
from isograd.contract import Shard
from isograd.mesh import Mesh
from isograd.nn import passes
from isograd.nn.parameter import Layer, make
from isograd.nn.stream import stream_owes


class RMSNorm(Layer):
    """weight * x / rms(x), over the last dimension."""

    def __init__(
        self,
        size: int,
        mesh: Mesh,
        *,
        eps: float = 1e-6,
        owes: tuple[str, ...] | None = None,
        plus_one: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """plus_one: x / rms(x) is multiplied with 1 + weight, which begins as 0."""
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        debts = stream_owes(mesh) if owes is None else owes
        self.weight = make(mesh, (size,), owes=debts, fill=0.0 if plus_one else 1.0, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], normalised."""
        if self.plus_one:  # in half precision scaled before it is rounded, as in Gemma
            wide = x if x.dtype.itemsize >= 4 else x.float()
            return passes.rms_norm(wide, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)
        if x.dtype.itemsize >= 4:
            return passes.rms_norm(x, self.weight, self.eps)
        # Half precision: normalise in fp32, round, then scale, as Hugging Face's models do.
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class WidthNorm(Layer):
    """RMSNorm over all query heads, or all key heads, of which each tp rank has its own: weight * x / rms(x)."""

    def __init__(
        self,
        size: int,
        mesh: Mesh,
        shard: Shard,
        *,
        over: str,
        owes: tuple[str, ...] = (),
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """`shard`, `owes`: as of the heads' weight. `over`: ranks that together hold each head once."""
        super().__init__()
        self.mesh, self.size, self.over, self.eps = mesh, size, over, eps
        self.weight = make(mesh, (size,), shards=(shard,), owes=owes, fill=1.0, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, this rank's features], normalised over the features of all ranks."""
        wide = x if x.dtype.itemsize >= 4 else x.float()
        group = self.mesh.group(self.over)
        squares = ops.all_reduce(wide.square().sum(-1, keepdim=True), group)
        squares = ops.copy_in(squares, group)  # each rank uses the sum for features of its own
        normed = wide * torch.rsqrt(squares / self.size + self.eps)
        return self.weight * normed.to(x.dtype)


class LayerNorm(Layer):
    """weight * (x - mean) / std + bias, over the last dimension."""

    def __init__(
        self,
        size: int,
        mesh: Mesh,
        *,
        eps: float = 1e-5,
        owes: tuple[str, ...] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        debts = stream_owes(mesh) if owes is None else owes
        self.weight = make(mesh, (size,), owes=debts, fill=1.0, dtype=dtype, device=device)
        self.bias = make(mesh, (size,), owes=debts, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], normalised."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
