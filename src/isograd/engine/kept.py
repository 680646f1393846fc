"""One parameter as a ZeRO 3 rank keeps it: its own rows always, the whole parameter while somebody computes with it.

A parameter that is not whole keeps its shape and reads as NaN. Memory that autograd has saved is given back, too: the
storage is emptied, and its version moves on, so that a backward that reads the parameter at the wrong time raises
("modified by an inplace operation") instead of reading memory that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from isograd.engine import heap
from isograd.engine.first import FirstValues, become
from isograd.engine.plan import Slot
from isograd.errors import EngineError
from isograd.mesh import Mesh


@dataclass(eq=False)
class Kept:
    """One parameter as a stage-3 rank keeps it: its rows always, the whole for a while."""

    slot: Slot
    rows: Tensor  # mine, in the parameter's dtype
    whole: Tensor  # its storage is empty while nobody needs it
    absent: Tensor  # what the parameter is then: one NaN that looks like the whole
    users: set[int] = field(default_factory=set)  # who needs it now: ids of units, READER
    flying: bool = False  # rows of it are on the wire

    def grow(self) -> None:
        """Give the whole parameter memory, with my rows in their place. Those of the others are on their way."""
        size = self.whole.numel() * self.whole.itemsize
        self.whole.untyped_storage().resize_(size + (heap.slack(size) if self.whole.device.type == "cpu" else 0))
        self.slot.rows(self.whole).copy_(self.rows, non_blocking=True)
        self.slot.parameter.data = self.whole
        self.flying = True

    def land(self) -> None:
        """All rows have arrived: from now on a backward may read what it saved."""
        self.flying = False
        self._count(-1)

    def shrink(self, lent: bool = False) -> None:
        """Free the whole parameter. `lent`: somebody else may still read or write its memory, which is left to them."""
        self.slot.parameter.data = self.absent
        if not self.flying:
            self._count(1)
        self.flying = False
        if lent or not self.whole.untyped_storage().resizable():
            with torch.inference_mode(False):
                self.whole = torch.empty_like(self.whole)
        self.whole.untyped_storage().resize_(0)

    def _count(self, by: int) -> None:
        """A whole parameter has the version that it had when it was whole before; an absent one, and one whose rows are
        on their way, has another."""
        parameter = self.slot.parameter
        torch._C._autograd._unsafe_set_version_counter((parameter,), (parameter._version + by,))


def keep(slots: Sequence[Slot], first: FirstValues, mesh: Mesh, home: torch.device) -> dict[int, Kept]:
    """Of each parameter (by id), my rows at `home`; the parameters lose their memory."""
    _refuse_shared_memory(slots, mesh)
    return {id(slot.parameter): _keep(slot, first, mesh.device, home) for slot in slots}


def _keep(slot: Slot, first: FirstValues, device: torch.device, home: torch.device) -> Kept:
    parameter = slot.parameter
    rows = first.rows(slot, slot.cuts[slot.owner : slot.owner + 2])
    absent = unreadable(parameter, device if parameter.is_meta else parameter.device)
    if parameter.is_meta:
        become(parameter, absent)
    elif rows is None:
        rows = slot.rows(parameter.data).clone()
    assert rows is not None, "FirstValues refuses parameters on the meta device without values"
    # Memory of its own: what the parameter had may belong to others, too, such as another parameter or a buffer.
    kept = Kept(slot, on_host(rows) if home.type == "cpu" else rows, _without_memory(absent), absent)
    kept.shrink()
    return kept


def _without_memory(like: Tensor) -> Tensor:
    whole = torch.empty_like(like, memory_format=torch.contiguous_format)
    whole.untyped_storage().resize_(0)
    return whole


def _refuse_shared_memory(slots: Sequence[Slot], mesh: Mesh) -> None:
    """Two parameters that overlap would be two copies from the first gather on."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.itemsize, slot.name)
        for slot in slots
        if not (p := slot.parameter).is_meta and p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise EngineError(
                "IG573",
                "two parameters share memory, which ZeRO 3 cannot shard",
                seen=f"{name!r} and {other!r}",
                expected="one nn.Parameter under two names (a tie), or memory of their own",
                fix="assign the same nn.Parameter to both modules, or clone one of the two; or use zero2",
                where=mesh.where(),
            )


def alike(kept: Sequence[Kept]) -> list[list[Kept]]:
    """What one gather can bring: of the same owners and dtype."""
    found: dict[tuple[tuple[int, ...], torch.dtype], list[Kept]] = {}
    for each in kept:
        found.setdefault((each.slot.owners.ranks, each.slot.parameter.dtype), []).append(each)
    return list(found.values())


def unreadable(like: Tensor, device: torch.device) -> Tensor:
    """One NaN that looks like the whole."""
    value = torch.nan if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def on_host(rows: Tensor) -> Tensor:
    """In the host's memory; pinned where a GPU will fetch it."""
    return rows.cpu().pin_memory() if rows.is_cuda else rows
