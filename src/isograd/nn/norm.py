"""RMSNorm and LayerNorm. Statistics in fp32 (fp64 in fp64 models).

One device: weight * x / rms(x), and weight * (x - mean) / std + bias.

Under sequence parallelism the parameters of a norm on the residual stream owe tp (Megatron-LM issue 1446 is about
forgetting it). A norm of query or key heads is shared by heads on different tp ranks and always is partial over tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.nn.parameter import FactoryKwargs, Layer, make
from isograd.nn.stream import stream_partial_over


class _Norm(Layer):
    usual_eps: float
    biased = False

    def __init__(
        self,
        size: int,
        mesh: Mesh,
        *,
        eps: float | None = None,
        partial_over: tuple[str, ...] | None = None,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.eps = self.usual_eps if eps is None else eps
        debts = stream_partial_over(mesh) if partial_over is None else partial_over
        self.weight = make(mesh, (size,), partial_over=debts, fill=1.0, **made)
        self.bias = make(mesh, (size,), partial_over=debts, **made) if self.biased else None


class RMSNorm(_Norm):
    """weight * x / rms(x), over the last dimension."""

    usual_eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], normalised."""
        if x.dtype.itemsize >= 4:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Half precision: normalise in fp32, round, then scale, as Hugging Face's models do.
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class LayerNorm(_Norm):
    """weight * (x - mean) / std + bias, over the last dimension."""

    usual_eps, biased = 1e-5, True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], normalised."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """F.layer_norm. On CPUs its backward adds half-precision gradients of weight and bias in half precision; here they
    are added in fp32."""
    if x.dtype.itemsize >= 4 or x.device.type != "cpu":
        return F.layer_norm(x, shape, weight, bias, eps)
    wide_weight, wide_bias = (None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x.float(), shape, wide_weight, wide_bias, eps).to(x.dtype)
