"""Frozen weights under adapters in 4 or 8 bits (QLoRA).

4 bits: NF4, with a scale for 64 elements. 8 bits: int8, with a scale for each row. Both have the numbers of the package
bitsandbytes, in plain torch. A weight is unpacked for each product, forward and backward, and is not kept between them.
A rank holds all packed weights of its layers, also at ZeRO 3. They are buffers, so a checkpoint has them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.contract import declare
from isograd.core.mesh import Mesh
from isograd.errors import ModelError

BLOCK = 64  # elements that share a scale, of 4 bits
SMALLEST = 1e-30  # a block of zeros is divided by it
BYTES = {4: 0.5 + 4 / BLOCK, 8: 1.0}  # of an element
# Quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al., QLoRA, appendix E).
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
PAIRS = torch.stack([NF4.repeat_interleave(16), NF4.repeat(16)], dim=1)  # the two elements of each byte


class QuantizedLinear(nn.Module):
    """A linear layer that is not trained, with its weight in 4 or 8 bits."""

    packed: Tensor
    scales: Tensor
    pairs: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, bits: int, mesh: Mesh) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else declare(bias, mesh, shape=tuple(bias.shape))
        packed, scales = pack(weight, bits)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("pairs", PAIRS.to(scales), persistent=False)

    def unpacked(self) -> Tensor:
        """The weight that the layer computes with."""
        return unpack(self.packed, self.scales, self.shape, self.pairs).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b, with a gradient for x."""
        return _Product.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.unpacked(), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.unpacked(), None


def pack(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(what is kept of a matrix [blocks, bytes], its scales [blocks, 1])."""
    blocks = weight.detach().float()
    if bits == 4:
        blocks = F.pad(blocks.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    share = blocks / scales.clamp(min=SMALLEST)
    if bits == 8:
        return (127 * share).round().to(torch.int8), scales
    codes = torch.bucketize(share, ((NF4[1:] + NF4[:-1]) / 2).to(share)).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def unpack(packed: Tensor, scales: Tensor, shape: torch.Size, pairs: Tensor = PAIRS) -> Tensor:
    """The matrix, in the scales' dtype."""
    if packed.dtype == torch.int8:
        return packed * (scales / 127)
    return (pairs[packed.int()].flatten(1) * scales).flatten()[: shape.numel()].view(shape)


def pack_base(model: nn.Module, name: str, bits: int, mesh: Mesh) -> None:
    """Put a packed layer into the place of the base layer of an adapter whose weight has this name."""
    adapted = model.get_submodule(name.removesuffix(".base_layer.weight"))
    base: Any = adapted.base_layer
    adapted.base_layer = QuantizedLinear(base.weight, base.bias, bits, mesh)


def refuse_bits(bits: int | None, adapter: Any, mesh: Mesh) -> None:
    """Refuse bits without adapters, and layouts that cut the layers."""
    cut = [axis for axis in ("tp", "ep") if mesh.size(axis) > 1]
    dora = getattr(adapter, "use_dora", False)
    if bits is not None and (bits not in (4, 8) or adapter is None or dora or cut):
        seen = f"{str(mesh.layout)!r}, " + ("no adapter" if adapter is None else "DoRA" if dora else "an adapter")
        raise ModelError("IG478", seen=seen, where=mesh.describe_rank(), bits=bits)
