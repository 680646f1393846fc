"""Gradients of weights as the products that they are, delayed or added to the step's sum at once.

One device: y = F.linear(x, weight, bias), whose backward makes the gradients of x, weight and bias, and the lookup
F.embedding(tokens, weight), whose backward makes a gradient of as many rows as the weight has. Inside `Products` each
of the weight's gradients is handed out as its two factors instead. `Deferred` keeps the factors: `products` hands them
to the step's ledger later, which is what the zero-bubble schedule does while it would wait. The other schedules add
the product to the ledger's sum as soon as it can be made, or (`Behind`) once the gradient for the stage before has
left (`Ledger.of_product`, `Ledger.of_rows`): without memory of its own and without a second pass over the sum. They do
so for models that say `hands_out_products`, whose code is known to make no other use of autograd in its forward.

Every F.linear on a weight is met, in whichever module it stands, and so is the weight of isograd's own loss, which asks
for it (`taker`). Any other use keeps its gradient with autograd, and so does a weight whose input needs no gradient:
nothing else would be left of that backward.

F.linear itself is replaced for as long as a stage runs. A TorchFunctionMode would not do: torch takes it away inside
`backward`, so a recomputed forward would be another one than the first. What takes its place is one function for the
life of the process, which torch.compile reads as the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd import matmul
from isograd.once import once

OfProduct = Callable[[Tensor, Tensor, Tensor], None]  # (weight, a, b): its gradient is a @ b
Factors = Callable[[Tensor, Tensor], None]  # (x, dy) of y = x @ weight.T
OfRows = Callable[[Tensor, Tensor, Tensor], None]  # (weight, rows, values): what is added to these rows of its gradient


class Products:
    """Entered around the forward of a stage and around its backward."""

    _entered: list[Products] = []  # noqa: RUF012 (one list for all: the innermost one counts)
    _plain: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (F.linear, F.embedding)

    def __init__(
        self,
        of_product: OfProduct,
        of_rows: OfRows | None = None,
        takes: Callable[[Tensor], bool] = lambda weight: True,
    ) -> None:
        """`takes`: whether gradients of this weight are handed out; those of others are left to autograd."""
        self._of_product, self._of_rows, self._takes = of_product, of_rows, takes

    def __enter__(self) -> None:
        if not Products._entered:
            Products._plain = F.linear, F.embedding
            F.linear, F.embedding = _linear, _embedding
        Products._entered.append(self)

    def __exit__(self, *_: object) -> None:
        Products._entered.pop()
        if not Products._entered:
            F.linear, F.embedding = Products._plain

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear, but for the gradient of the weight."""
        factors = self.of_weight(input, weight)
        if factors is None:
            return Products._plain[0](input, weight, bias)
        # Detached: autograd would take a gradient of None for one that has arrived, and fire the weight's hooks.
        # As a matrix outside of the Function: what is made inside as a view could not be changed in place.
        y: Tensor = _Linear.apply(anchor(weight), _rows(input), weight.detach(), factors)  # type: ignore[no-untyped-call]
        y = y if input.dim() == 2 else y.view(*input.shape[:-1], -1)
        return y if bias is None else y + bias

    def of_weight(self, input: Tensor, weight: Tensor) -> Factors | None:
        """What is to be called with (x, dy) in the place of making the weight's gradient dy.T @ x; None: autograd's
        own is to be made."""
        if not (input.requires_grad and input.dim() > 1 and _fits(weight, input) and self._takes(weight)):
            return None
        return partial(_hand, self._of_product, weight)

    def lookup(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor | None:
        """F.embedding, but for the gradient of the weight; None: autograd's own is to be taken."""
        if self._of_rows is None or not (_fits(weight, weight) and self._takes(weight)):
            return None
        padding = padding if padding is None or padding >= 0 else len(weight) + padding
        found: Tensor = _Lookup.apply(anchor(weight), tokens, weight.detach(), padding, partial(self._of_rows, weight))  # type: ignore[no-untyped-call]
        return found


class Deferred(Products):
    """The products of linear maps are kept until they are asked for: the W of a micro-batch."""

    def __init__(self, takes: Callable[[Tensor], bool] = lambda weight: True, of_rows: OfRows | None = None) -> None:
        """`of_rows`: of lookups, which are not delayed."""
        self._noted: list[tuple[Tensor, Tensor, Tensor]] = []
        super().__init__(lambda *product: self._noted.append(product), of_rows, takes)

    def forget(self) -> None:
        """What was kept is not wanted."""
        self._noted = []

    def products(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(weight, a, b): its gradient a @ b was delayed. One at a time, the last one first."""
        noted, self._noted = self._noted, []
        while noted:
            yield noted.pop()


class Behind(Deferred):
    """The products are kept until the gradient of the stage's input has left: another rank waits for that one. Where
    the graph does not keep inputs itself, to compute them again or on the host, products do not wait, either."""

    def __init__(self, of_product: OfProduct, of_rows: OfRows | None, takes: Callable[[Tensor], bool]) -> None:
        super().__init__(takes, of_rows)
        self._at_once = of_product

    def of_weight(self, input: Tensor, weight: Tensor) -> Factors | None:
        """As above; where inputs are not kept, with what makes the product at once."""
        factors = super().of_weight(input, weight)
        in_backward = torch._C._current_graph_task_id() != -1
        kept = torch._C._autograd._top_saved_tensors_default_hooks(False) is None and not in_backward
        return factors if factors is None or kept else partial(_hand, self._at_once, weight)


def _hand(of_product: OfProduct, weight: Tensor, x: Tensor, dy: Tensor) -> None:
    of_product(weight, _rows(dy).t(), _rows(x))


def taker(input: Tensor, weight: Tensor) -> Factors | None:
    """As `Products.of_weight`, of what is entered. The caller hands autograd the weight detached then."""
    return Products._entered[-1].of_weight(input, weight) if Products._entered else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What F.linear is while a stage runs."""
    if torch.compiler.is_compiling() or not Products._entered:
        return Products._plain[0](input, weight, bias)
    return Products._entered[-1].linear(input, weight, bias)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """What F.embedding is while a stage runs."""
    if not (torch.compiler.is_compiling() or max_norm is not None or scale_grad_by_freq or sparse):
        found = Products._entered[-1].lookup(input, weight, padding_idx) if Products._entered else None
        if found is not None:
            return found
    return Products._plain[1](input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def anchor(weight: Tensor) -> Tensor:
    """The first input of a Function that hands out a weight's gradient: it takes the weight's place in the graph."""
    return torch.empty((), dtype=weight.dtype, device=weight.device, requires_grad=True)


def _rows(t: Tensor) -> Tensor:
    """As a matrix. A view costs as much as a small operator, as caches are cold behind a product."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def wanted(ctx: Any) -> bool:
    """In backward of such a Function: whether this run of autograd makes gradients of parameters. One that was asked
    for others alone (torch.autograd.grad with inputs) does not."""
    return bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0]))


def _fits(weight: Tensor, other: Tensor) -> bool:
    """A parameter of its own, in the dtype it is multiplied in."""
    plain = {type(weight), type(other)} <= {Tensor, torch.nn.Parameter}  # another class may have its own linear map
    if not plain or torch._C._are_functorch_transforms_active():
        return False
    autocast = torch.is_autocast_enabled(other.device.type)
    return torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and weight.dim() == 2 and not autocast


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, factors: Factors) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors = factors
        return matmul.multiply(x, weight.t())

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if wanted(ctx):
            ctx.factors(x, dy)
        return None, matmul.multiply(dy, weight), None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tokens: Tensor,
        weight: Tensor,
        padding: int | None,
        of_rows: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.padding, ctx.of_rows = padding, of_rows
        return Products._plain[1](tokens, weight)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        rows, values = tokens.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if ctx.padding is not None:
            values = values.masked_fill((rows == ctx.padding)[:, None], 0)
        if wanted(ctx):
            ctx.of_rows(rows, values)
        return None, None, None, None, None
