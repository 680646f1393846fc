"""The weights of routed experts, and how slots of tokens are made and added up. (nn/moe.py exchanges them over ranks.)

A *slot* is one (token, expert) pair. Slots of a rank are sorted by expert, computed segment by segment, and added up
with the tokens' weights, for each token in the order of its slots. Nothing here is added by atomics, so bits do not
depend on timing. One device: naive.experts, every expert on every token, masked.

An expert's gradient is a sum over the ranks that hold a copy of it (edp). An expert without tokens has a gradient of
zeros: momentum and weight decay go on as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.comm.first_order import first_order_only
from isograd.core.contract import Shard
from isograd.core.mesh import EXPERT_DATA, Mesh
from isograd.core.rng import Key
from isograd.nn.parameter import FactoryKwargs, Layer, make
from isograd.nn.routing import Ends, ExpertOptions
from isograd.sequence.block import accumulation_dtype, on_ampere


class Experts(Layer):
    """The routed experts that this rank holds: gated or plain feed-forward layers of one size."""

    def __init__(
        self,
        hidden: int,
        options: ExpertOptions,
        mesh: Mesh,
        *,
        key: Key,
        activation: Callable[[Tensor], Tensor],
        gated: bool,
        std: float,
        out_std: float,
        **made: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self.activation = activation
        wide, narrow = (options.number, options.width, hidden), (options.number, hidden, options.width)
        shards = (Shard.even("ep", 0, options.number, mesh.size("ep")),)
        cut: dict[str, Any] = {"shards": shards, "data": EXPERT_DATA, **made}
        self.up = make(mesh, wide, key=key.fold("up"), std=std, **cut)
        self.gate = make(mesh, wide, key=key.fold("gate"), std=std, **cut) if gated else None
        self.down = make(mesh, narrow, key=key.fold("down"), std=out_std, **cut)

    def forward(self, x: Tensor, ends: Ends) -> Tensor:
        """Slots [n, hidden], sorted by expert -> their experts' outputs; zeros for slots behind the last end."""
        inside = torch.arange(len(x), device=x.device)[:, None] < ends.there[-1] if ends.rest else None
        x = x if inside is None else x.where(inside, 0.0)  # behind the last end, gradients have any bits
        up = grouped_linear(x, self.up, ends)
        inner = self.activation(up) if self.gate is None else self.activation(grouped_linear(x, self.gate, ends)) * up
        y = grouped_linear(inner, self.down, ends)
        return y if inside is None else y.where(inside, 0.0)


def grouped_linear(x: Tensor, weight: Tensor, ends: Ends) -> Tensor:
    """x [n, inputs] -> [n, outputs]: rows ends[e - 1] to ends[e] through weight[e] [outputs, inputs]."""
    if torch.is_autocast_enabled(x.device.type):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(narrow), weight.to(narrow)
    # One kernel of torch takes the products and reads the ends on the card: bf16, rows of whole 16 bytes.
    even = all(size % 8 == 0 for size in weight.shape[1:])
    if hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and even and on_ampere(x):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends.there.to(torch.int32))
    return _Grouped.apply(x, weight, ends.here)  # type: ignore[no-any-return, no-untyped-call]


def _segments(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each expert, and its slots, which may be none."""
    start = 0
    for expert, end in enumerate(ends):
        yield expert, slice(start, end)
        start = end


class _Grouped(torch.autograd.Function):
    """A loop over sorted segments. Results are written where they belong: nothing is stacked or joined. The product of
    no slots, which is an idle expert's gradient, is zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        y = x.new_empty(len(x), weight.shape[1])
        for expert, rows in _segments(ends):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        dy = dy.contiguous()
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.empty_like(weight) if need_weight else None
        for expert, rows in _segments(ctx.ends):
            if dx is not None:
                torch.mm(dy[rows], weight[expert], out=dx[rows])
            if dweight is not None:
                torch.mm(dy[rows].t(), x[rows], out=dweight[expert])
        return dx, dweight, None


def to_slots(x: Tensor, order: Tensor, k: int) -> Tensor:
    """x [T, h] -> [n, h]: the token of each slot in `order`. Its adjoint adds up each token's slots, in their order."""
    return _ToSlots.apply(x, order, k)  # type: ignore[no-any-return, no-untyped-call]


def from_slots(slots: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """[n, h] -> y [T, h]: each token's sum of weights [T, k] times slots, in the order of its slots.

    Slots that are not in `order` add nothing, and their weights get a gradient of zero.
    """
    return _FromSlots.apply(slots, weights, order)  # type: ignore[no-any-return, no-untyped-call]


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """The rows of x in another order, a permutation; its adjoint puts them back."""
    return _Reorder.apply(x, order)  # type: ignore[no-any-return, no-untyped-call]


def _placed(rows: Tensor, order: Tensor, size: int) -> Tensor:
    """rows[i] at place order[i] of `size` places; zeros elsewhere."""
    whole = rows.new_zeros(size, *rows.shape[1:]) if len(order) < size else rows.new_empty(size, *rows.shape[1:])
    return whole.index_copy_(0, order, rows)


class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (len(x), k)
        return x.index_select(0, order // k)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        tokens, k = ctx.shape
        slots = _placed(gradient, ctx.saved_tensors[0], tokens * k).unflatten(0, (tokens, k))
        total = slots[:, 0].to(accumulation_dtype(gradient.dtype), copy=True)
        for place in range(1, k):
            total += slots[:, place]
        return total.to(gradient.dtype), None, None


class _FromSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(slots, weights, order)
        tokens, k = weights.shape
        whole = _placed(slots, order, tokens * k).unflatten(0, (tokens, k))
        total = weights[:, :1] * whole[:, 0]
        for place in range(1, k):
            total += weights[:, place : place + 1] * whole[:, place]
        y: Tensor = total.to(slots.dtype)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        slots, weights, order = ctx.saved_tensors
        tokens, k = weights.shape
        dy = dy.index_select(0, order // k)
        dslots = (dy * weights.view(-1, 1).index_select(0, order)).to(slots.dtype)
        dweights = (slots.to(weights.dtype) * dy).sum(-1)
        return dslots, _placed(dweights, order, tokens * k).view(tokens, k), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _placed(gradient, ctx.saved_tensors[0], len(gradient)), None
