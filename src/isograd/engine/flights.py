"""Buckets on their way to the owners of their rows: what has left, what is in the air, what has landed.

A bucket is launched inside an autograd hook, so `launch` and `has_room` never wait. Waiting there could block other
ranks: under cp they need this rank's next exchange of attention, which comes after the hook. Messages of gradients have
connections of their own, so they never meet those of a layer.

Rows of different buckets never meet, so ranks may launch buckets in different orders; each owner of a bucket must
launch it equally often. `sent` is the record of it, which `even_out` uses after a failure: a rank that stopped half
way sends zeros for what it has not sent, so that everybody's flights can land.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from isograd.comm import halves, raw
from isograd.comm.notes import gather_notes
from isograd.comm.raw import Group
from isograd.engine.norm import Norms
from isograd.engine.plan import Bucket, Plan, Slot
from isograd.engine.sums import Sums, refuse
from isograd.engine.transport import Flight, Pieces, reduce_rows
from isograd.errors import EngineError
from isograd.mesh import Mesh

PATIENCE = 1.0  # seconds after which a rank that waits at a step says so, and one that waits for a bucket asks
AT_ONCE = 2  # buckets in the air during a backward: bounds the memory that arriving rows take


class Flights:
    """The buckets of a step that have left this rank."""

    def __init__(self, plan: Plan, mesh: Mesh, *, tree: bool, in_place: bool = False) -> None:
        """`tree`: add in one binary tree. `in_place`: gradients are kept once they have left, and their owners' sums go
        into them."""
        self.plan, self.tree, self._rank, self._where = plan, tree, mesh.rank, mesh.where()
        self._in_place = in_place
        device = plan.slots[0].parameter.device
        # The owners of rows, on connections that carry nothing else.
        self._groups = {group.ranks: mesh.group(group.axes, "gradients") for group in plan.owners}
        # Of these a gradient may leave in the parameter's own half precision: the owner's sum is the same.
        fit = {
            ranks: group.size > 1 and not tree and device.type == "cpu" and raw.in_host_memory(group)
            for ranks, group in self._groups.items()
        }
        self.halves = {s for s in plan.slots if fit[s.owners.ranks] and s.parameter.dtype in halves.HALVES}
        self._serials, self._step = {ranks: raw.serial(group) for ranks, group in self._groups.items()}, 0
        self.sent: list[Bucket] = []  # the buckets that left since the step began
        # Whose gradients in this step were not finite, as far as this rank knows. It looks at the rows that land here,
        # unless that would make a GPU wait; then at its own gradients as they leave, and keeps their sum on the device.
        self.spoilers: set[int] = set()
        self.looks_at_rows = device.type == "cpu" and not tree
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self.sums: dict[tuple[int, ...], Sums] = {}  # of a step whose reductions are checked, by owners
        self.due: dict[Slot, Tensor] = {}  # landed: my rows, summed over the data axes
        self.norms = Norms()  # of rows that were looked at
        self._air: deque[tuple[Bucket, Flight]] = deque()
        self._in_pass = 0  # launched in the running pass, or in the last one
        self._with_block = 0  # launched since the last call of `next_block`

    def begin_pass(self) -> None:
        """Before a backward that launches: what left earlier than in the last such backward must have landed."""
        while len(self._air) > self._in_pass:
            self._wait_or_hear()
            self._land()
        self._in_pass = 0

    @property
    def flags(self) -> list[str]:
        """Raised by a rank that has waited at the gather of this step: it launches nothing more."""
        return [self._flag(group) for group in self.plan.owners]

    def _flag(self, owners: Group) -> str:
        return f"step/{'-'.join(map(str, owners.ranks))}/{self._serials[owners.ranks]}/{self._step}"

    def _wait_or_hear(self) -> None:
        """Wait for the oldest flight, unless a rank that it waits for has gone to the step instead."""
        waited = 0.0
        bucket, flight = self._air[0]
        while not flight.ready():
            if waited > PATIENCE and raw.flag_raised(self._flag(bucket.owners)):
                raise EngineError(
                    "IG554",
                    "a data rank is at its step while this one is in a further backward",
                    seen=f"buckets of an earlier backward that one of ranks {list(bucket.owners.ranks)} has not sent",
                    expected="as many backwards that reduce gradients on every data rank",
                    fix="engine.discard() on all ranks, if a backward failed on one; else no_sync(), or overlap=False",
                    where=self._where,
                )
            time.sleep(0.002 if waited < 0.1 else 0.05)
            waited += 0.002 if waited < 0.1 else 0.05

    def has_room(self) -> bool:
        """Whether one more bucket may be in the air. What has arrived lands; nothing is waited for."""
        while self.is_full() and self._air[0][1].ready():
            self._land()
        return not self.is_full()

    def is_full(self) -> bool:
        """Whether no further bucket may be in the air."""
        return len(self._air) >= AT_ONCE

    def make_room(self) -> None:
        """Wait until one more bucket may be in the air: where all data ranks are known to launch the same ones."""
        while self.is_full():
            self._land()

    def next_block(self) -> None:
        """ZeRO 3: backward has left a block. What left earlier than with the block before has landed, or is waited for.

        That cannot block: this rank has read the others' note of a gather that they posted when they had left two
        blocks before, or were leaving it, which ends with a launch (engine/lockstep.py).
        """
        while len(self._air) > self._with_block:
            self._land()
        self._with_block = 0

    @raw.undivided()
    def launch(self, bucket: Bucket, gradients: Pieces) -> None:
        """Send a bucket's gradients to the owners of their rows."""
        self.sent.append(bucket)
        self._in_pass += 1
        self._with_block += 1
        packed = bucket.bundle.pack(gradients)
        slots = bucket.bundle.slots
        if not self.looks_at_rows:
            for gradient in packed:
                self._sum.add_(gradient.sum())
        owners = self._groups[bucket.owners.ranks]
        sums, first = self.sums.get(owners.ranks), bucket.slots[0]  # a bucket is of one dtype
        half = first.parameter.dtype if first in self.halves else None
        how: dict[str, Any] = {"tree": self.tree, "in_place": self._in_place, "half": half}
        flight = reduce_rows(slots, packed, owners, number=bucket.number, sums=sums, **how)
        self._air.append((bucket, flight))

    def zeros_of(self, slot: Slot) -> Tensor:
        """What leaves for a parameter that this rank did not use."""
        return zeros_of(slot, slot.parameter.dtype if slot in self.halves else None)

    def land_all(self) -> None:
        """Wait for every bucket in the air, and add its rows to what is due."""
        while self._air:
            self._land()

    @raw.undivided()
    def _land(self) -> None:
        bucket, flight = self._air[0]
        landed = flight.wait()
        self._air.popleft()
        rows = bucket.bundle.rows(landed)
        if self.looks_at_rows and not torch.stack(self.norms.take(rows)).isfinite().all():
            self.spoilers.update(bucket.owners.ranks[member] for member in flight.not_finite(landed))
        for slot, piece in zip(bucket.slots, rows, strict=True):
            before = self.due.get(slot)
            self.due[slot] = piece if before is None else before.add_(piece)

    def not_finite(self) -> set[int]:
        """Ranks whose own gradients of this step were not finite, as far as this rank knows. The host waits."""
        return self.spoilers | ({self._rank} if not math.isfinite(self._sum) else set())

    def begin_sums(self) -> None:
        """Check the reductions of the step that begins."""
        self.sums = {group.ranks: Sums() for group in self.plan.owners}

    def check_sums(self, mesh: Mesh) -> None:
        """All ranks together, when all has landed: refuse the step if what was sent is not what was added up."""
        if not self.sums:
            return
        sums, self.sums, wrong = self.sums, {}, list[str]()
        for group in self.plan.owners:
            theirs = {bucket for bucket in self.sent if bucket.owners.ranks == group.ranks}
            names = {bucket.number: bucket.bundle.names([slot.name for slot in bucket.slots]) for bucket in theirs}
            wrong += sums[group.ranks].compare(self._groups[group.ranks], names)
        refuse(wrong, mesh)

    def even_out(self, mesh: Mesh) -> None:
        """After a failure, on all ranks: launch zeros until every owner of a bucket has launched it equally often."""
        for group in self.plan.owners:
            theirs = [bucket for bucket in self.plan.buckets if bucket.owners.ranks == group.ranks]
            sent = [self.sent.count(bucket) for bucket in theirs]
            # Not on the buckets' connections: a note would fill a buffer that waits there for a bucket.
            told: list[list[int]] = gather_notes(sent, group, mesh.device)
            for bucket, here, counts in zip(theirs, sent, zip(*told, strict=True), strict=True):
                for _ in range(max(counts) - here):
                    self.launch(bucket, [self.zeros_of(slot) for slot in bucket.slots])

    def clear(self) -> None:
        """A new step begins. Nothing may be in the air."""
        assert not self._air, "flights of the step before have not landed"
        self.sent, self.due, self._in_pass, self._with_block = [], {}, 0, 0
        self.spoilers = set()
        self.norms.clear()
        self._sum.zero_()
        self._step += 1


def zeros_of(slot: Slot, dtype: torch.dtype | None = None) -> Tensor:
    """A gradient of zeros, wide if no dtype is given."""
    return torch.zeros_like(slot.parameter, dtype=dtype or slot.dtype, memory_format=torch.contiguous_format)
