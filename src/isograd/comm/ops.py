"""Differentiable collectives: each is a pair (forward, adjoint), and this file is the list of them.

Types along the group's axis (docs/theory.md): R replicated with many uses, I one logical value held by all,
V different on each member, P summands of a pending sum. comm/naive.py has the naive definition of each, on the list of
all members' tensors: the oracle of tests/comm/test_ops.py.

    copy_in                    I -> R    adjoint all_reduce        enter a column-parallel region
    all_reduce                 P -> I    adjoint identity          leave a row-parallel region
    all_gather                 V -> R    adjoint reduce_scatter    enter it from sequence shards
    reduce_scatter             P -> V    adjoint all_gather        leave it into sequence shards
    gather_for_identical_use   V -> I    adjoint slice             every member continues with the same computation
    slice                      I -> V    adjoint gather            take my part of a value all members hold
    all_to_all                 V -> V    adjoint all_to_all back   move a cut from one dimension to another
    exchange_rows              V -> V    adjoint exchange back     send each row to the member that computes with it

A group of one makes each of them the identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.first_order import first_order_only
from isograd.comm.group import Group
from isograd.errors import CommError

Move = Callable[[Tensor], Tensor]
F = TypeVar("F", bound=Callable[..., Any])


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, adjoint: Move) -> Tensor:
        ctx.adjoint = adjoint
        y = forward(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def uncompiled(function: F) -> F:
    """Keep `function` out of regions that torch.compile compiles: a collective ends one region and begins another.

    torch.compiler.disable loads the whole compiler, which takes seconds; so it is used only if a program has loaded the
    compiler already.
    """
    disabled: list[Any] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(F, call)


def _pair(x: Tensor, group: Group, forward: Move, adjoint: Move) -> Tensor:
    """Nothing is moved in a group of one."""
    return x if group.size == 1 else _moved(x, forward, adjoint)


@uncompiled
def _moved(x: Tensor, forward: Move, adjoint: Move) -> Tensor:
    return _Pair.apply(x, forward, adjoint)  # type: ignore[no-any-return, no-untyped-call]


def _identity(x: Tensor) -> Tensor:
    return x


def copy_in(x: Tensor, group: Group) -> Tensor:
    """I -> R: x itself. Its adjoint sums the members' gradients."""
    return _pair(x, group, _identity, lambda g: raw.all_reduce(g, group))


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """P -> I: the sum of the members' tensors. Its adjoint is the identity."""
    return _pair(x, group, lambda t: raw.all_reduce(t, group), _identity)


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """V -> R: the members' parts, joined along `dim`. Its adjoint sums, and cuts.

    `sizes`: the length of each member's part along `dim`; left out, all are as long as mine.
    """
    parts = _gathered_sizes(x, group, dim, sizes)
    return _pair(x, group, lambda t: _gather(t, group, dim, parts), lambda g: _scatter_sum(g, group, dim, parts))


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """P -> V: my part of the sum of the members' tensors. Its adjoint is all_gather.

    `sizes`: the length of each member's part; left out, `dim` is cut evenly, and the group's size must divide it.
    """
    parts = _cut_sizes(x, group, dim, sizes)
    return _pair(x, group, lambda t: _scatter_sum(t, group, dim, parts), lambda g: _gather(g, group, dim, parts))


def gather_for_identical_use(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """V -> I: all_gather for a result that every member uses in the same way. Its adjoint takes my part."""
    parts = _gathered_sizes(x, group, dim, sizes)
    return _pair(x, group, lambda t: _gather(t, group, dim, parts), lambda g: _take(g, group, dim, parts))


def slice(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """I -> V: my part of a value that all members hold. Its adjoint gathers the parts."""
    parts = _cut_sizes(x, group, dim, sizes)
    return _pair(x, group, lambda t: _take(t, group, dim, parts), lambda g: _gather(g, group, dim, parts))


def all_to_all(
    x: Tensor,
    group: Group,
    split_dim: int,
    cat_dim: int,
    split_sizes: Sequence[int] | None = None,
    cat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """V -> V: cut `split_dim` into the members' parts, send each member its part, join what arrives along `cat_dim`.

    x is complete along `split_dim` and has my part of `cat_dim`; for the result it is the other way round.
    `split_sizes` and `cat_sizes` are the lengths of all members' parts of the two dimensions; left out, all are equal.
    """
    if split_dim % x.dim() == cat_dim % x.dim():
        raise CommError("IG204", seen=f"dim {split_dim} twice")
    splits = split_dim, _cut_sizes(x, group, split_dim, split_sizes)
    cats = cat_dim, _gathered_sizes(x, group, cat_dim, cat_sizes)

    def move(t: Tensor, cut: tuple[int, tuple[int, ...]], joined: tuple[int, tuple[int, ...]]) -> Tensor:
        (split, split_parts), (cat, cat_parts), shapes = cut, joined, []
        for length in cat_parts:
            shape = list(t.shape)
            shape[split], shape[cat] = split_parts[group.index], length
            shapes.append(shape)
        return torch.cat(raw.all_to_all(t.split(list(split_parts), split), shapes, group), cat)

    return _pair(x, group, lambda t: move(t, splits, cats), lambda g: move(g, cats, splits))


def exchange_rows(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """V -> V: send[0] rows of x go to member 0, the next send[1] to member 1, ...; what arrives is joined in the order
    of the members, receive[i] rows of member i. Its adjoint is the exchange back, with the counts exchanged.

    Counts differ between members and may be 0. receive[i] is what member i has in send at my index: members tell each
    other before (raw.all_to_all of the counts). A member without any row calls this as the others do.
    """
    send, receive = tuple(send), tuple(receive)
    _cut_sizes(x, group, 0, send)

    def move(t: Tensor, out: tuple[int, ...], into: tuple[int, ...]) -> Tensor:
        arrived = t.new_empty((sum(into), *t.shape[1:]))
        pieces, places = t.contiguous().split(list(out)), arrived.split(list(into))
        handle = raw.exchange([[p] for p in pieces], [[p] for p in places], group)
        places[group.index].copy_(pieces[group.index])
        handle.wait()
        return arrived

    return _pair(x, group, lambda t: move(t, send, receive), lambda g: move(g, receive, send))


def _gather(x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
    if dim % x.dim() == 0:
        return raw.all_gather(x, group, sizes)
    return raw.all_gather(x.movedim(dim, 0), group, sizes).movedim(0, dim)


def _scatter_sum(x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
    if dim % x.dim() == 0:
        return raw.reduce_scatter(x, group, sizes)
    return raw.reduce_scatter(x.movedim(dim, 0), group, sizes).movedim(0, dim)


def _take(x: Tensor, group: Group, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.narrow(dim, sum(sizes[: group.index]), sizes[group.index]).contiguous()


def _gathered_sizes(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    mine = x.shape[dim]
    if sizes is None:
        return (mine,) * group.size
    if len(sizes) != group.size or sizes[group.index] != mine:
        seen = f"sizes {tuple(sizes)}, my index {group.index}, my tensor {tuple(x.shape)}"
        expected = f"{group.size} sizes of which number {group.index} is {mine}"
        raise CommError("IG202", seen=seen, expected=expected, dim=dim, axes=group.axes)
    return tuple(sizes)


def _cut_sizes(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    total = x.shape[dim]
    if sizes is None:
        if total % group.size:
            raise CommError("IG203", dim=dim, total=total, axes=group.axes, shape=tuple(x.shape), size=group.size)
        return (total // group.size,) * group.size
    if len(sizes) != group.size or sum(sizes) != total:
        seen = f"sizes {tuple(sizes)} (sum {sum(sizes)}), tensor {tuple(x.shape)}"
        expected = f"{group.size} sizes that sum to {total}"
        raise CommError("IG202", seen=seen, expected=expected, dim=dim, axes=group.axes)
    return tuple(sizes)
