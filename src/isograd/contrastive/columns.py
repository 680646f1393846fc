"""How every data rank's columns come by, a block at a time: all at once, or one rank's after the other around a ring.

    whole   one all-gather, one block of all columns; gradients of columns go home by one reduce-scatter
    ring    W blocks, W - 1 shifts; the next block travels while this one is worked on. Gradients travel with their
            columns and are home after W shifts. Memory: two blocks of one rank's columns instead of all.

Either way the number of messages depends on the ranks only, never on tiles or chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group, Handle

# (number of the block's first column among all ranks', what the columns bring, where their gradients are added)
Work = Callable[[int, Sequence[Tensor], Tensor], None]


@dataclass(frozen=True)
class Columns:
    group: Group
    counts: tuple[int, ...]  # of each member
    ring: bool

    @property
    def first(self) -> int:
        """The number of my first column among all."""
        return self._firsts[self.group.index]

    @property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(self.counts)]

    def bring(self, mine: Sequence[Tensor]) -> list[Tensor]:
        """What to visit: vectors, ids, ... of all columns, or of mine, which then go around."""
        mine = [t.contiguous() for t in mine]
        return mine if self.ring else [raw.all_gather(t, self.group, self.counts) for t in mine]

    def mine(self, vectors: Tensor) -> Tensor:
        """My own columns among those that were brought."""
        return vectors if self.ring else vectors[self.first : self.first + self.counts[self.group.index]]

    def visit(self, brought: Sequence[Tensor], work: Work) -> None:
        """Call `work` on blocks until it has seen all columns."""
        self._go(brought, work, gradients=False)

    def collect(self, brought: Sequence[Tensor], work: Work) -> Tensor:
        """The same, and return what all ranks added for my columns' vectors."""
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
        """Send a block of `owner`'s to the next member; what the member before me holds comes in."""
        size, me = self.group.size, self.group.index
        rows = self.counts[(owner - 1) % size]
        coming = [t.new_empty((rows, *t.shape[1:])) for t in block]
        out: list[list[Tensor]] = [[] for _ in range(size)]
        into: list[list[Tensor]] = [[] for _ in range(size)]
        out[(me + 1) % size], into[(me - 1) % size] = list(block), coming
        return coming, raw.exchange(out, into, self.group)
