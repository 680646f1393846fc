"""Settles what gradients owe. Nothing else in isograd reduces a gradient.

A gradient is a sum, pending until someone adds it up (GRADIENTS: type P). It moves through three places:

1. `local`: my own full gradient, accumulated in fp32 over the backwards that did not sync.
2. `due`: my rows of it, summed over the data axes. A bucket is sent to the owners of its rows when the last gradient
   of a syncing backward has arrived, while backward goes on; buckets leave in one fixed order on every rank.
3. `paid`: `due` summed over the remaining debts of its contract (tp, blocks of tp), coalesced, at the step.

Each move empties its source and *adds* to its target, so backwards that sync and backwards that do not may be mixed in
any order, and a gradient that comes late (a rank that skipped a layer) is simply settled with the next flush.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.engine.blame import largest
from isograd.engine.plan import Bucket, Plan, Slot
from isograd.engine.transport import Flight, Pieces, reduce_rows, tree_sum
from isograd.mesh import DATA, Mesh

IN_FLIGHT = 2  # buckets on the wire at a time: bounds the memory that received pieces take


class Reducer:
    def __init__(self, plan: Plan, mesh: Mesh, *, keep_full: bool, reproducible: bool) -> None:
        self.plan, self.mesh, self.keep_full, self.reproducible = plan, mesh, keep_full, reproducible
        self.group = mesh.group(DATA)
        self._flights: deque[tuple[Bucket, Flight]] = deque()
        self.left: list[Tensor] = []  # of each bucket that left in this step: its largest value, for engine/blame.py
        self._unsent: list[Bucket] = []  # of this backward, in the order in which they leave
        self._tree: list[tuple[int, Pieces]] = []  # reproducible: (height, full gradients of 2**height micro-batches)

    # -- during backward

    def arm(self) -> None:
        """Before a backward that syncs."""
        self._unsent = list(self.plan.buckets)
        for bucket in self.plan.buckets:
            bucket.waiting = {id(slot.parameter) for slot in bucket.slots}

    def arrived(self, slot: Slot, bucket: Bucket, syncing: bool) -> None:
        """Autograd has finished this parameter's gradient of the running backward."""
        slot.used = True
        self.collect(slot)
        if syncing and not self.reproducible:
            bucket.waiting.discard(id(slot.parameter))
            while self._unsent and not self._unsent[0].waiting:
                self._launch(self._unsent[0])

    def passed(self, parameters: Container[int]) -> None:
        """Backward has left these parameters (ids) behind, on every data rank at the same point: all their buckets
        leave, whether this rank has used them or not. So ZeRO 3 keeps one order of gathers and reductions."""
        for bucket in list(self._unsent):
            bucket.waiting = {key for key in bucket.waiting if key not in parameters}
            if not bucket.waiting:
                self._launch(bucket)

    def collect(self, slot: Slot) -> None:
        """Half-precision gradients accumulate in fp32; others stay where autograd accumulates them."""
        gradient = slot.parameter.grad
        if gradient is not None and gradient.dtype != slot.dtype:
            slot.local = gradient.to(slot.dtype) if slot.local is None else slot.local.add_(gradient)
            slot.parameter.grad = None

    def put_aside(self) -> None:
        """Before a backward whose gradients are thrown away: what was accumulated waits elsewhere, and may leave."""
        for slot in self.plan.slots:
            if slot.local is None:
                slot.local, slot.parameter.grad = slot.parameter.grad, None

    def take_back(self) -> None:
        for slot in self.plan.slots:
            if slot.local is not None and slot.local.dtype == slot.parameter.dtype:
                slot.local, slot.parameter.grad = None, slot.local

    def after_backward(self, syncing: bool) -> None:
        if self.reproducible:
            self._grow_tree([self._take(slot) for slot in self.plan.slots])
        elif syncing:
            self.flush()

    def flush(self) -> None:
        """Send every bucket that this backward has not sent."""
        while self._unsent:
            self._launch(self._unsent[0])

    def _launch(self, bucket: Bucket) -> None:
        self._unsent.remove(bucket)
        gradients = [self._take(slot) for slot in bucket.slots]
        self.left.append(largest(gradients))
        self._flights.append((bucket, reduce_rows(bucket.slots, gradients, self.group, tree=self.reproducible)))
        if self.keep_full:
            for slot, gradient in zip(bucket.slots, gradients, strict=True):
                slot.full = gradient
        while len(self._flights) > IN_FLIGHT:
            self._land()

    def _take(self, slot: Slot) -> Tensor:
        gradient = slot.parameter.grad if slot.local is None else slot.local
        slot.parameter.grad = slot.local = None
        if gradient is None:
            return torch.zeros_like(slot.parameter, dtype=slot.dtype)
        return gradient.contiguous()

    def _land(self) -> None:
        bucket, flight = self._flights.popleft()
        rows = flight.wait()
        for slot, piece in zip(bucket.slots, rows, strict=True):
            slot.due = piece if slot.due is None else slot.due.add_(piece)

    # -- reproducible: micro-batches meet in one binary tree, like a carry in binary counting

    def _grow_tree(self, gradients: Pieces) -> None:
        height = 0
        while self._tree and self._tree[-1][0] == height:
            gradients = tree_sum([self._tree.pop()[1], gradients])
            height += 1
        self._tree.append((height, gradients))

    def _cut_tree(self) -> None:
        while len(self._tree) > 1:
            (height, later), (_, earlier) = self._tree.pop(), self._tree.pop()
            self._tree.append((height, tree_sum([earlier, later])))
        if self._tree:
            for slot, gradient in zip(self.plan.slots, self._tree.pop()[1], strict=True):
                slot.parameter.grad = gradient if gradient.dtype == slot.parameter.dtype else None
                slot.local = None if gradient.dtype == slot.parameter.dtype else gradient

    # -- at the step

    def pending(self) -> bool:
        """Whether this rank holds gradients that no flush has sent."""
        return bool(self._tree) or any(s.parameter.grad is not None or s.local is not None for s in self.plan.slots)

    def settle(self, flush: bool) -> None:
        """Pay every debt. `flush` is the same on all ranks: some rank holds gradients that were not sent."""
        if flush:
            self._cut_tree()
            self._unsent = list(self.plan.buckets)
            self.flush()
        while self._flights:
            self._land()
        # Sorted, because the two stages of a tie hold it at different places among their parameters.
        for axes in sorted({axes for slot in self.plan.slots for axes in slot.contract.owes}, reverse=True):
            owing = [s for s in self.plan.slots if axes in s.contract.owes and s.due is not None]
            self._pay(axes, sorted(owing, key=lambda slot: slot.name))
        for slot in self.plan.slots:
            if slot.due is not None:
                slot.paid = slot.due if slot.paid is None else slot.paid.add_(slot.due)
                slot.due = None

    def _pay(self, axes: str, slots: Iterable[Slot]) -> None:
        """Sum the rows of these slots over `axes`, as few messages as there are dtypes."""
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.dtype, []).append(slot)
        for owing in by_dtype.values():
            rows = [slot.due for slot in owing if slot.due is not None]
            total = raw.all_reduce(torch.cat([r.reshape(-1) for r in rows]), self.mesh.group(axes))
            for slot, row, part in zip(owing, rows, total.split([r.numel() for r in rows]), strict=True):
                slot.due = part.view(row.shape)

    def clear(self) -> None:
        self.left.clear()
        for slot in self.plan.slots:
            slot.due = slot.paid = slot.full = None
            slot.used = False
