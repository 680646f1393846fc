"""The backward of linear maps in two parts: gradients of inputs first, gradients of weights later.

One device: y = F.linear(x, weight, bias), whose backward computes the gradients of x, weight and bias. The zero-bubble
schedule runs the backward of a micro-batch under a `SplitBackward`: it collects the two factors of each weight's
gradient, and `weight_grads` multiplies them when the schedule has time for it.

Which maps take part: isograd's own linear layers and its loss, which ask `weight_grad_hook` for their weight; and each
nn.Linear of the pipeline's model, whose instances get another `forward` while `split_linears` is open. Nothing of torch
is replaced. Any other use of a weight keeps its gradient with autograd, and so does a weight whose input needs no
gradient: its backward would have no other part. torch.compile sees the plain map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.comm.first_order import first_order_only

WeightGradHook = Callable[[Tensor, Tensor], None]  # (x, dy) of y = x @ weight.T

_active: dict[int, SplitBackward] = {}  # by the id of a weight; a weight belongs to one rank, so threads do not mix


class SplitBackward:
    """Entered around the forward and the backward of a micro-batch: collects the factors of its weights' gradients."""

    def __init__(self, weights: Iterable[Tensor], accepts: Callable[[Tensor], bool] = lambda weight: True) -> None:
        """`accepts`: asked at each use whether the gradient of this weight may be delayed."""
        self._weights, self._accepts = {id(weight) for weight in weights}, accepts
        self._factors: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}

    def __enter__(self) -> None:
        _active.update(dict.fromkeys(self._weights, self))

    def __exit__(self, *_: object) -> None:
        for weight in self._weights:
            _active.pop(weight, None)

    def hook(self, input: Tensor, weight: Tensor) -> WeightGradHook | None:
        """What a backward calls instead of computing the weight's gradient; None: it computes the gradient."""
        plain = {type(weight), type(input)} <= {Tensor, nn.Parameter}  # another class may have its own linear map
        if not (plain and input.requires_grad and input.dim() > 1) or torch._C._are_functorch_transforms_active():
            return None
        leaf = weight.requires_grad and weight.is_leaf and weight.dim() == 2
        autocast = torch.is_autocast_enabled(input.device.type)
        if autocast or not (leaf and torch.is_grad_enabled() and self._accepts(weight)):
            return None
        return partial(self._collect, weight)

    def _collect(self, weight: Tensor, x: Tensor, dy: Tensor) -> None:
        self._factors.setdefault(id(weight), (weight, []))[1].append((_matrix(dy).t(), _matrix(x)))

    def discard(self) -> None:
        """Forget the collected factors."""
        self._factors = {}

    @torch.no_grad()
    def weight_grads(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight with its gradient, the weight of the latest backward first. Factors are freed one by one."""
        while self._factors:
            weight, factors = self._factors.popitem()[1]
            total = torch.mm(*factors.pop())
            while factors:
                total.addmm_(*factors.pop())
            yield weight, total


def weight_grad_hook(input: Tensor, weight: Tensor) -> WeightGradHook | None:
    """The hook for the weight of a linear map. A caller that is given one passes autograd the weight detached."""
    split = _active.get(id(weight))
    return None if split is None else split.hook(input, weight)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, whose weight's gradient a SplitBackward may delay."""
    hook = None if torch.compiler.is_compiling() else weight_grad_hook(input, weight)
    if hook is None:
        return F.linear(input, weight, bias)
    # Detached: autograd would take a gradient of None for one that has arrived, and fire the weight's hooks.
    # As a matrix outside of the Function: a view made inside could not be changed in place.
    y: Tensor = _Linear.apply(grad_anchor(weight), _matrix(input), weight.detach(), hook)  # type: ignore[no-untyped-call]
    y = y if input.dim() == 2 else y.view(*input.shape[:-1], -1)
    return y if bias is None else y + bias


@contextmanager
def split_linears(model: nn.Module) -> Iterator[None]:
    """Every nn.Linear of the model asks for the hook. A subclass or an instance with its own forward is left alone."""
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
    changed = [m for m in found if "forward" not in vars(m)]
    for module in changed:
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, module.bias)


def grad_anchor(weight: Tensor) -> Tensor:
    """The first input of a Function that calls a hook: it takes the weight's place in the graph."""
    return torch.empty((), dtype=weight.dtype, device=weight.device, requires_grad=True)


def weight_grad_requested(ctx: Any) -> bool:
    """In the backward of such a Function: whether this run of autograd computes gradients of parameters. A run for
    other tensors alone (torch.autograd.grad with inputs) does not."""
    return bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0]))


def _matrix(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, hook: WeightGradHook) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.hook = hook
        return x @ weight.t()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if weight_grad_requested(ctx):
            ctx.hook(x, dy)
        return None, dy @ weight, None, None
