"""Weight gradients of linear maps, put off: what the zero-bubble schedule does while it would wait.

One device: y = F.linear(x, weight, bias), whose backward makes the gradients of x, weight and bias at once. Here the
gradient of the weight is only noted (x and dy are kept), and `products` hands out the two factors, which the step's
ledger multiplies. Every F.linear on a weight is met, in whichever module it stands. Any other use
keeps its gradient with I, and so does a weight whose input needs no gradient: nothing else would be left of that I.

F.linear itself is replaced for as long as a stage runs. A TorchFunctionMode would not do: torch takes it away inside
`backward`, so a recomputed forward would be another one than the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Deferred:
    """Entered around the forward of a stage and around its I; afterwards `products` are its W."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, x, dy
        self._plain: Callable[..., Tensor] = F.linear

    def __enter__(self) -> None:
        self._plain = F.linear
        F.linear = self._linear

    def __exit__(self, *_: object) -> None:
        F.linear = self._plain

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _fits(input, weight):
            return self._plain(input, weight, bias)
        # Detached: autograd would take a gradient of None for one that has arrived, and fire the weight's hooks.
        y: Tensor = _Linear.apply(input, weight.detach(), partial(self._note, weight))  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias

    def _note(self, weight: Tensor, x: Tensor, dy: Tensor) -> None:
        self._noted.append((weight, x, dy))

    def products(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(weight, a, b): its gradient a @ b was delayed. One at a time, the last one first."""
        noted, self._noted = self._noted, []
        while noted:
            weight, x, dy = noted.pop()
            yield weight, dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])


def _fits(input: Tensor, weight: Tensor) -> bool:
    """A parameter of its own, in the dtype it is multiplied in."""
    autocast = torch.is_autocast_enabled(input.device.type)
    needed = torch.is_grad_enabled() and input.requires_grad and weight.requires_grad
    return needed and weight.is_leaf and weight.dim() == 2 and input.dim() > 1 and not autocast


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, note: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.note = note
        return x @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.note(x, dy)
        return dy @ weight, None, None
