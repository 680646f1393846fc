"""A function of each token by itself, whose gradient is 0 where nothing is asked of it.

autograd multiplies what comes from above with the derivative, also where a mask left a token out and 0 comes from
above. 0 times NaN or infinity is NaN, and one padded place with an advantage of NaN would make every gradient NaN. Here
a place that gets 0 from above hands on 0. A place that counts keeps its NaN, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isograd.comm.first_order import first_order_only
from isograd.comm.ops import uncompiled


@uncompiled
def pointwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x). f: of each number of x by itself; what else it has takes no gradient."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Pointwise.apply(f, x)  # type: ignore[no-any-return, no-untyped-call]
    return f(x)


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            found = f(inner)
            (slopes,) = torch.autograd.grad(found.sum(), inner)
        ctx.save_for_backward(slopes)
        return found.detach()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, above: Tensor) -> tuple[None, Tensor]:
        (slopes,) = ctx.saved_tensors
        return None, torch.where(above == 0, torch.zeros_like(slopes), above * slopes)
