"""Weight gradients of linear maps, put off: what the zero-bubble schedule does while it would wait.

One device: y = F.linear(x, weight, bias), whose backward makes the gradients of x, weight and bias at once. Here the
gradient of the weight is only noted (x and dy are kept) and made by `run`, through autograd like any other, so that
hooks fire. Every F.linear on a weight is met, in whosever module it stands; what is not one keeps its gradient with I.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Deferred(TorchFunctionMode):
    """Entered around the forward of a stage and around its I; afterwards `run` is its W."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, x, dy

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and _fits(*args, **(kwargs or {})):
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = _Linear.apply(input, weight, self._noted)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias

    def run(self) -> None:
        noted, self._noted = self._noted, []
        while noted:
            weight, x, dy = noted.pop()
            gradient = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            torch.autograd.backward([weight], [gradient])


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """A parameter of its own, in the dtype it is multiplied in."""
    autocast = torch.is_autocast_enabled(input.device.type)
    return torch.is_grad_enabled() and weight.is_leaf and weight.requires_grad and input.dim() > 1 and not autocast


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, noted: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.noted = noted
        return F.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.noted.append((weight, x, dy))
        return (dy @ weight if ctx.needs_input_grad[0] else None), None, None
