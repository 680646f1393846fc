"""RMSNorm, rotary positions and the gate of SwiGLU in few passes over memory.

One device: F.rms_norm(x, weight.shape, weight, eps); x * cos + (-second half of x, first half) * sin; and
F.silu(gate) * up. Outside of a GPU's fused kernels and of torch.compile, torch computes each as a chain of elementwise
operators, each with memory of its own, and keeps what is between them for backward. Here each is one function of
autograd, which keeps its inputs alone. A backward that is itself differentiated (create_graph) takes the definition's.

The definitions are used where something else fuses them or sees through them: inside torch.compile, under functorch's
transforms, and in half precision, whose roundings are part of what published models compute.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x), over the last dimension."""
    if _leave_to_torch(x) or x.dtype != weight.dtype or x.device.type != "cpu":  # GPUs have a kernel for it
        plain: Tensor = F.rms_norm(x, weight.shape, weight, eps)
        return plain
    y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [..., d] by angles whose cos and sin are [..., d], both halves alike."""
    if _leave_to_torch(x):
        return _turned(x, cos, sin)
    y: Tensor = _Turn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. The same bits as torch's, forward and backward."""
    if _leave_to_torch(gate) or gate.dtype != up.dtype or gate.device.type != "cpu":
        return F.silu(gate) * up
    y: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


def _leave_to_torch(x: Tensor) -> bool:
    return x.dtype.itemsize < 4 or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph
            wanted = [t for t, need in ((x, need_x), (weight, need_weight)) if need]
            found = iter(torch.autograd.grad(F.rms_norm(x, weight.shape, weight, ctx.eps), wanted, dy, True, True))
            return next(found) if need_x else None, next(found) if need_weight else None, None
        product = dy * x
        dweight = dx = None
        rows = product.reshape(-1, product.shape[-1])
        if need_weight:
            dweight = torch.mv(rows.t(), scale.reshape(-1))
        if need_x:
            along = torch.mv(rows, weight).view(scale.shape) * scale.pow(3).div_(-x.shape[-1])
            dx = torch.mul(dy, weight, out=product).mul_(scale).addcmul_(x, along)
        return dx, dweight, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        cos, sin = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            return _turned(dy, cos, -sin), None, None
        return _rotated(dy, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """sign -1: by the opposite angle, which is the adjoint."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        need_gate, need_up = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph
            dgate = torch.autograd.grad(F.silu(gate), gate, dy * up, create_graph=True)[0] if need_gate else None
            return dgate, dy * F.silu(gate) if need_up else None
        dgate = dup = None
        if need_gate:
            dgate = dy * up
            torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        if need_up:
            dup = F.silu(gate).mul_(dy)
        return dgate, dup
