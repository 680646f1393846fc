"""How a rank gets the columns of all data ranks: all at once, or one rank's block after another around a ring.

    whole   one all-gather makes one block of all columns; one reduce-scatter returns the columns' gradients
    ring    W blocks, W - 1 shifts; the next block travels while this one is used. Gradients travel with their columns
            and are back at their owner after W shifts. Memory: two blocks of one rank's columns instead of all.

Either way the number of messages depends on the number of ranks only, not on tiles or chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.comm.handle import Handle

# (number of the block's first column among all ranks', what the columns bring, where their gradients are added)
Work = Callable[[int, Sequence[Tensor], Tensor], None]


@dataclass(frozen=True)
class Columns:
    """Which columns each member of a group has, and how they reach the others."""

    group: Group
    counts: tuple[int, ...]  # number of columns of each member
    ring: bool

    @property
    def first(self) -> int:
        """The index of my first column among the columns of all members."""
        return self._firsts[self.group.index]

    @property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(self.counts)]

    def bring(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that `visit` and `collect` start from: those of all columns or, for a ring, of mine."""
        mine = [t.contiguous() for t in mine]
        return mine if self.ring else [raw.all_gather(t, self.group, self.counts) for t in mine]

    def own(self, vectors: Tensor) -> Tensor:
        """My own columns among those that `bring` returned."""
        return vectors if self.ring else vectors[self.first : self.first + self.counts[self.group.index]]

    def visit(self, brought: Sequence[Tensor], work: Work) -> None:
        """Call `work` on one block after another, until it has seen all columns."""
        self._go(brought, work, gradients=False)

    def collect(self, brought: Sequence[Tensor], work: Work) -> Tensor:
        """Do what `visit` does, and return the sum of the gradients that all ranks added for my columns."""
        return self._go(brought, work, gradients=True)

    def _go(self, brought: Sequence[Tensor], work: Work, gradients: bool) -> Tensor:
        if self.ring:
            return self._around(brought, work, gradients)
        sums = torch.zeros_like(brought[0]) if gradients else brought[0]
        work(0, brought, sums)
        return raw.reduce_scatter(sums, self.group, self.counts) if gradients else sums

    def _around(self, brought: Sequence[Tensor], work: Work, gradients: bool) -> Tensor:
        size, firsts = self.group.size, self._firsts
        block, sums = list(brought), torch.zeros_like(brought[0])
        for step in range(size):
            owner = (self.group.index - step) % size
            coming, handle = self._pass_on(block, owner) if step < size - 1 else (block, Handle())
            work(firsts[owner], block, sums)
            handle.wait()
            block = coming
            if gradients and size > 1:
                (sums,), handle = self._pass_on([sums], owner)
                handle.wait()
        return sums

    def _pass_on(self, block: Sequence[Tensor], owner: int) -> tuple[list[Tensor], Handle]:
        """Send the block of `owner` to the next member, and receive the block that the previous member holds."""
        size, me = self.group.size, self.group.index
        rows = self.counts[(owner - 1) % size]
        coming = [t.new_empty((rows, *t.shape[1:])) for t in block]
        out: list[list[Tensor]] = [[] for _ in range(size)]
        into: list[list[Tensor]] = [[] for _ in range(size)]
        out[(me + 1) % size], into[(me - 1) % size] = list(block), coming
        return coming, raw.exchange(out, into, self.group)
