"""The definition of each collective in comm/ops.py, in plain torch, on the list of all members' tensors.

A list holds one tensor per member (types V, P, R); a single tensor is one logical value that all members hold
(type I). Autograd's gradients of these definitions are the adjoints that ops.py must have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_in(x: Tensor, members: int) -> list[Tensor]:
    """I -> R: one value, used by every member."""
    return [x for _ in range(members)]


def all_reduce(xs: Sequence[Tensor]) -> Tensor:
    """P -> I: the sum, added in the order of the members."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def all_gather(xs: Sequence[Tensor], dim: int) -> list[Tensor]:
    """V -> R: all parts joined, on every member."""
    return [torch.cat(list(xs), dim) for _ in xs]


def reduce_scatter(xs: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """P -> V: the sum, cut into the members' parts."""
    return list(all_reduce(xs).split(list(sizes), dim))


def gather_for_identical_use(xs: Sequence[Tensor], dim: int) -> Tensor:
    """V -> I: all parts joined, as one value."""
    return torch.cat(list(xs), dim)


def slice(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """I -> V: one value, cut into the members' parts."""
    return list(x.split(list(sizes), dim))


def all_to_all(xs: Sequence[Tensor], split_dim: int, cat_dim: int, split_sizes: Sequence[int]) -> list[Tensor]:
    """V -> V: each member cuts along `split_dim`; what a member receives is joined along `cat_dim`."""
    pieces = [x.split(list(split_sizes), split_dim) for x in xs]
    return [torch.cat([pieces[source][target] for source in range(len(xs))], cat_dim) for target in range(len(xs))]


def exchange_rows(xs: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """V -> V: counts[i][j] rows of member i go to member j, which joins what it receives in the members' order."""
    pieces = [x.split(list(sent)) for x, sent in zip(xs, counts, strict=True)]
    return [torch.cat([pieces[source][target] for source in range(len(xs))]) for target in range(len(xs))]
