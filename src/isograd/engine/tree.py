"""Reproducible sums: the gradients of micro-batches meet in one binary tree, like the carry in binary counting.

The sum of 2**k micro-batches is the same bits however they are split into data ranks and accumulation steps (powers of
two): a rank's own micro-batches form a subtree, and engine/transport.py adds the ranks' subtrees in the same tree.
"""

from __future__ import annotations

from torch import Tensor

from isograd.engine.transport import Pieces, tree_sum


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
            gradients = tree_sum([self._sums.pop()[1], gradients])
            height += 1
        self._sums.append((height, gradients))

    def cut(self) -> Pieces:
        """The sum of everything; the tree is empty afterwards."""
        total = self._sums.pop()[1]
        while self._sums:
            total = tree_sum([self._sums.pop()[1], total])
        return total


def total(values: list[Tensor]) -> Tensor:
    """The sum in one binary tree: the same bits for any power-of-two split into ranks and micro-batches."""
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return total(values[:half]) + total(values[half:])
