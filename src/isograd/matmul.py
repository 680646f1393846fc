"""Products of fp32 matrices on AMD's processors by oneDNN: torch hands them to MKL, which is slower there.

One device: a @ b, and F.linear(x, weight, bias).

docs/log.md (2026-11-24) has the measurements: a product of 256 to 2,048 rows takes 0.81 to 0.96 of MKL's time. oneDNN
makes a program for each new shape, which costs about a millisecond, once; it is part of torch's CPU builds. A product
that adds to a sum stays MKL's, as oneDNN does not add in place. Whatever looks at operators (a dispatch mode), takes
other types than fp32, or compiles gets torch's own operators.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_torchs = F.linear  # isograd.products and others may put theirs in its place

LEAST = 1 << 23  # multiplications of a product, below which the call costs what oneDNN saves


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] @ b [k, m], where nobody asks for its gradient."""
    transposed = b.t()
    if not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)) and _pays(a, transposed):
        return _times_transposed(a, transposed, None)
    return a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    if F.linear is not _torchs or not (x.dim() > 1 and _pays(x, weight) and (bias is None or _plain(bias))):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the one to make x @ weight.t(). The cheapest questions come first."""
    if torch.compiler.is_compiling() or not (weight.dim() == 2 and x.numel() * len(weight) >= LEAST and _faster()):
        return False
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    return dense and _plain(x) and _plain(weight) and not _watched()


def _plain(t: Tensor) -> bool:
    return type(t) in {Tensor, torch.nn.Parameter} and t.dtype == torch.float32 and t.device.type == "cpu"


def _watched() -> bool:
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled("cpu")
    )


@cache
def _faster() -> bool:
    """On AMD's processors with AVX-512, which is what was measured."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in file)
    except OSError:
        return False


def _times_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _times_transposed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        shape = x.shape
        if len(shape) > 2:
            x, dy = x.reshape(-1, shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = multiply(dy, weight) if need_x else None
        dweight = dy.t() @ x if need_weight else None
        dx = dx if dx is None or len(shape) == 2 else dx.view(shape)
        return dx, dweight, dy.sum(0) if need_bias else None
