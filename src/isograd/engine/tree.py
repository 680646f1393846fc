"""Reproducible sums: the gradients of micro-batches meet in one binary tree, like the carry in binary counting.

The sum of 2**k micro-batches is the same bits however they are split into data ranks and accumulation steps (powers of
two): a rank's own micro-batches form a subtree, and engine/packing.py adds the ranks' subtrees in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pieces = list[Tensor]


class Tree:
    """Gradients of micro-batches, added in one binary tree."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, Pieces]] = []  # (height, the sum of 2**height micro-batches), highest first

    def __bool__(self) -> bool:
        return bool(self._sums)

    def grow(self, gradients: Pieces) -> None:
        """Add the gradients of one more micro-batch."""
        height = 0
        while self._sums and self._sums[-1][0] == height:
            gradients = _added(self._sums.pop()[1], gradients)
            height += 1
        self._sums.append((height, gradients))

    def cut(self) -> Pieces:
        """The sum of everything; the tree is empty afterwards."""
        total = self._sums.pop()[1]
        while self._sums:
            total = _added(self._sums.pop()[1], total)
        return total


def _added(a: Pieces, b: Pieces) -> Pieces:
    return [tree_sum(pair) for pair in zip(a, b, strict=True)]


def tree_sum(values: Sequence[Tensor] | Tensor) -> Tensor:
    """((0 + 1) + (2 + 3)) + ...: the same bits for any power-of-two split into ranks and micro-batches.
    The rows of one tensor are added a level at a time: at most two launches, however many rows."""
    if isinstance(values, Tensor):
        while len(values) > 1:
            even = len(values) // 2 * 2
            sums = values[:even:2] + values[1:even:2]
            values = torch.cat((sums, values[even:])) if even < len(values) else sums
        return values[0]
    level = list(values)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]
