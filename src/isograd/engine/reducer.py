"""Buckets of gradients on their way to the owners of their rows: launch and wait, and no policy.

A bucket is packed (engine/packing.py) and leaves as one reduce-scatter; its owner gets the sum over the data ranks of
its rows, in fp32 (fp64 in fp64 models), added in rank order, or in one binary tree where the step is reproducible. On
NCCL the sum is made by NCCL. Buckets travel on connections that carry nothing else.

`launch` is called inside an autograd hook, so it waits for nothing: under cp, tp or ep another rank may need this
rank's next message of a layer first, which comes after the hook. It adds up what has arrived. `sent` is the order in
which buckets have left; it is the same on all owners. After a failure `send_missing` launches zeros for what a rank has
not sent, so that everybody's reductions can end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from isograd.comm.consensus import all_gather_object
from isograd.comm.world import abort_group_on_interrupt, reserve_tags
from isograd.core.mesh import Mesh
from isograd.engine.packing import Buffers, Reduction, packing_of, reduce_rows
from isograd.engine.plan import Bucket, Plan, Slot
from isograd.engine.sdc.reductions import ReductionSums

PATIENCE = 1.0  # seconds that a backward waits for a bucket of the one before
AT_ONCE = 2  # buckets that stay under way before `launch` asks whether they have arrived


class ReduceWhen(Enum):
    """When the buckets of a backward leave for their owners. The same on all data ranks."""

    GRAD_READY = "with their last gradient, in the order of the plan"
    BLOCK_DONE = "when backward has left their block, and at its end"
    STEP = "at the step, or with the next backward that lets them"


class _UnderWay(NamedTuple):
    bucket: Bucket
    reduction: Reduction
    packed: Tensor | None  # the memory that it has been packed into; None where that is a gradient's own
    sums: ReductionSums | None  # of a step whose reductions are checked


class Reducer:
    """The buckets of a step that have left this rank."""

    def __init__(self, plan: Plan, mesh: Mesh, *, tree: bool) -> None:
        """`tree`: add in one binary tree."""
        self.plan, self.tree, self._rank = plan, tree, mesh.rank
        self.serial = reserve_tags(mesh.group("world"))  # of its engine: ranks make theirs in one order
        self.groups = {group.ranks: mesh.group(group.axes, "gradients") for group in plan.owners}
        self._on_nccl = any(group.is_nccl for group in self.groups.values())  # waits are the card's
        self.packings = {bucket: packing_of(bucket.slots) for bucket in plan.buckets}  # planned once, for gathers too
        self.buffers = Buffers()  # for gathers too
        self.sent: list[Bucket] = []  # the buckets that left since the step began, in order
        self.reduced: dict[Slot, Tensor] = {}  # my rows, summed over the data axes
        # Under way: launched before the last call of `begin_pass` or `next_block`, and since then.
        self._older: deque[_UnderWay] = deque()
        self._latest: deque[_UnderWay] = deque()
        # The sum of each bucket that has left: not finite if any gradient is not. Read when a step is skipped.
        self._bucket_sums: list[Tensor] = []

    @abort_group_on_interrupt()
    def launch(self, bucket: Bucket, gradients: list[Tensor], sums: ReductionSums | None = None) -> None:
        """Send a bucket's gradients to the owners of their rows. The list is emptied, so that packed ones are freed."""
        while len(found := self.under_way()) >= AT_ONCE and found[0].reduction.arrived_within(0.0):
            self._finish()
        self.sent.append(bucket)
        group, packing = self.groups[bucket.owners.ranks], self.packings[bucket]
        if group.size == 1:
            own = zip(bucket.slots, gradients, strict=True)
            self._add(bucket, [(g.view(1) if g.dim() == 0 else g).to(slot.dtype) for slot, g in own])
            return
        flat = packing.pack(gradients, self.buffers)
        gradients.clear()
        self._bucket_sums.append(flat.sum())
        if sums is not None:
            sums.sending(bucket, packing, flat)
        reduction = reduce_rows(packing, flat, group, tree=self.tree, number=bucket.number)
        self._latest.append(_UnderWay(bucket, reduction, None if len(bucket.slots) == 1 else flat, sums))

    def under_way(self) -> list[_UnderWay]:
        """What has left and is not added up yet, in order."""
        return [*self._older, *self._latest]

    def begin_pass(self) -> None:
        """Before a backward that launches: finish what has left, so that one backward's packed gradients are there at
        a time. A rank that it comes from may have gone to the step instead, where all refuse it: this one goes on to
        meet it there."""
        self.finish_all(PATIENCE)

    def next_block(self) -> None:
        """ZeRO 3: backward has left a block. Finish what left earlier than with the block before. On NCCL, where only
        the card waits, with it, too: the packed gradients of one block are there at a time.

        On gloo that cannot block: this rank has read the others' note of a gather that they posted when they had left
        two blocks before, or were leaving it, which ends with a launch (engine/zero3/gather_check.py).
        """
        if self._on_nccl:
            self._age()
        self._finish_older()
        self._age()

    def _age(self) -> None:
        self._older.extend(self._latest)
        self._latest.clear()

    def _finish_older(self, patience: float = 0.0) -> None:
        """Or what of it arrives within a while on gloo."""
        while self._older:
            if patience and not self._on_nccl and not self._older[0].reduction.arrived_within(patience):
                break
            self._finish()

    def finish_all(self, patience: float = 0.0) -> None:
        """Wait for every reduction under way, and add its rows to `reduced`."""
        self._age()
        self._finish_older(patience)

    @abort_group_on_interrupt()
    def _finish(self) -> None:
        queue = self._older or self._latest
        bucket, reduction, packed, sums = queue[0]
        rows = reduction.wait() if sums is None else sums.wait(bucket, reduction)
        queue.popleft()
        if packed is not None:
            self.buffers.give_back(packed)
        self._add(bucket, rows)

    def _add(self, bucket: Bucket, rows: Sequence[Tensor]) -> None:
        for slot, piece in zip(bucket.slots, rows, strict=True):
            if (before := self.reduced.setdefault(slot, piece)) is not piece:
                before.add_(piece)

    def not_finite(self, reduced: Mapping[Slot, Tensor]) -> set[int]:
        """This rank, if its own gradients of this step were not finite. `reduced`: my rows; where this rank has no
        other owner beside it, they are its own gradients. The host waits."""
        alone = [rows.sum() for slot, rows in reduced.items() if slot.owners.size == 1]
        return set() if all(map(math.isfinite, [*self._bucket_sums, *alone])) else {self._rank}

    def send_missing(self, mesh: Mesh) -> None:
        """After a failure, on all ranks: launch zeros until every owner of a bucket has launched it equally often."""
        for group in self.plan.owners:
            theirs = [bucket for bucket in self.plan.buckets if bucket.owners.ranks == group.ranks]
            sent = [theirs.index(bucket) for bucket in self.sent if bucket in theirs]
            longest = max(all_gather_object(sent, mesh, group.axes), key=len)
            for place in longest[len(sent) :]:
                self.launch(theirs[place], [zeros_of(slot) for slot in theirs[place].slots])

    def clear(self) -> None:
        """A new step begins. Nothing may be under way."""
        assert not self.under_way(), "reductions of the step before have not ended"
        self.reduced.clear()
        self.sent.clear()
        self._bucket_sums.clear()


def zeros_of(slot: Slot) -> Tensor:
    """A gradient of zeros."""
    return torch.zeros_like(slot.parameter, dtype=slot.dtype, memory_format=torch.contiguous_format)
