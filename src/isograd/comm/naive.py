"""What each collective of comm/ops.py means, on the list of all members' tensors, in plain torch.

A list holds one tensor per member (types V, P, R); a single tensor is one logical value that all members hold
(type I). Gradients of these definitions, taken by autograd, are the adjoints that ops.py must have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_in(x: Tensor, members: int) -> list[Tensor]:
    return [x for _ in range(members)]


def all_reduce(xs: Sequence[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def all_gather(xs: Sequence[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(list(xs), dim) for _ in xs]


def reduce_scatter(xs: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    return list(all_reduce(xs).split(list(sizes), dim))


def gather_for_identical_use(xs: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(xs), dim)


def slice(x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    return list(x.split(list(sizes), dim))


def all_to_all(xs: Sequence[Tensor], split_dim: int, cat_dim: int, split_sizes: Sequence[int]) -> list[Tensor]:
    pieces = [x.split(list(split_sizes), split_dim) for x in xs]
    return [torch.cat([pieces[source][target] for source in range(len(xs))], cat_dim) for target in range(len(xs))]


def shift(xs: Sequence[Tensor], by: int) -> list[Tensor]:
    return [xs[(member - by) % len(xs)] for member in range(len(xs))]
