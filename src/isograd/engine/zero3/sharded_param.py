"""One parameter of ZeRO 3: this rank's rows always, the full parameter while a block computes with it.

A parameter that is not full keeps its shape and reads as NaN. Memory that autograd has saved is freed, too: the
storage is emptied, and its version moves on, so that a backward that reads the parameter at the wrong time raises
("modified by an inplace operation") instead of reading memory that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine.plan import Slot
from isograd.engine.zero3.deferred_init import FirstValues, become, place
from isograd.errors import EngineError


@dataclass(frozen=True)
class ParamMemory:
    """What holds a parameter's numbers."""

    mine: Tensor  # my rows, in the parameter's dtype; or in fp32, of which half-precision ones are made when asked for
    full: Tensor  # its storage is empty while nobody needs it
    is_filling: bool = False  # rows of it are on their way


@dataclass(eq=False)
class ShardedParam:
    """A parameter and its memory: `expect`, `alloc_full`, `filled` when all rows have arrived, then `free_full`."""

    slot: Slot
    now: ParamMemory
    absent: Tensor  # what the parameter is then: one NaN of the full shape
    users: set[int] = field(default_factory=set)  # the groups (numbers) that need it now
    unwritten: bytes = b""  # what stands in `absent`, in host memory

    def __post_init__(self) -> None:
        if self.absent.is_cpu and self.absent.numel():
            self.unwritten = string_at(self.absent.data_ptr(), self.absent.itemsize)

    @property
    def rows(self) -> Tensor:
        """Mine, in the parameter's dtype, to read and to write until the next step."""
        self.now = replace(self.now, mine=self.now.mine.to(self.slot.parameter.dtype))
        return self.now.mine

    def free_rows(self, master: Tensor) -> None:
        """The master has the values of my rows: their memory is freed."""
        self.now = replace(self.now, mine=master.detach())

    def expect(self) -> None:
        """Rows of others are on their way."""
        at = self.absent.data_ptr()  # 0 where it has no elements
        written = at and self.absent.is_cpu and string_at(at, self.absent.itemsize) != self.unwritten
        if self.slot.parameter.data_ptr() != at or written:  # values that would be lost
            raise EngineError("IG517", names=[self.slot.name])
        self.now = replace(self.now, is_filling=True)

    def alloc_full(self) -> None:
        """Give the full parameter memory, into which all rows come, mine as well."""
        full = self.now.full
        full.untyped_storage().resize_(full.numel() * full.itemsize)
        place(self.slot.parameter, full)

    def filled(self) -> None:
        """All rows have arrived: a backward may read what it saved."""
        self.now = replace(self.now, is_filling=False)
        self._move_version(-1)

    def free_full(self, lent: bool = False) -> None:
        """Free the full parameter. `lent`: others may still read or write this memory; they keep it."""
        place(self.slot.parameter, self.absent)
        if not self.now.is_filling:
            self._move_version(1)
        full = self.now.full
        if lent or not full.untyped_storage().resizable():
            with torch.inference_mode(False):
                full = torch.empty_like(full)
        full.untyped_storage().resize_(0)
        self.now = ParamMemory(self.now.mine, full)

    def _move_version(self, by: int) -> None:
        """A full parameter has the version that it had when it was full before; otherwise it has another one."""
        parameter = self.slot.parameter
        torch._C._autograd._unsafe_set_version_counter((parameter,), (parameter._version + by,))


def shard(slots: Sequence[Slot], first: FirstValues, mesh: Mesh, home: torch.device) -> dict[int, ShardedParam]:
    """Of each parameter (by id), my rows at `home`; the parameters lose their memory."""
    _refuse_shared_memory(slots, mesh)
    found = {}
    for slot in slots:
        parameter = slot.parameter
        rows = first.rows(slot, slot.cuts[slot.owner : slot.owner + 2])
        value = torch.nan if parameter.is_floating_point() else 0
        device = mesh.device if parameter.is_meta else parameter.device
        absent = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
        if parameter.is_meta:
            become(parameter, absent)
        elif rows is None:
            rows = slot.rows(parameter.data).clone()
        assert rows is not None, "FirstValues refuses parameters on the meta device without values"
        # Memory of its own: the parameter's may belong to others, too, such as another parameter or a buffer.
        full = torch.empty_like(absent, memory_format=torch.contiguous_format)
        memory = ParamMemory(on_host(rows) if home.type == "cpu" else rows, full)
        found[id(parameter)] = param = ShardedParam(slot, memory, absent)
        param.free_full()
    return found


def _refuse_shared_memory(slots: Sequence[Slot], mesh: Mesh) -> None:
    """Two parameters that overlap would be two copies from the first gather on."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.itemsize, slot.name)
        for slot in slots
        if not (p := slot.parameter).is_meta and p.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise EngineError("IG573", seen=f"{name!r} and {other!r}", where=mesh.describe_rank())


def on_host(rows: Tensor) -> Tensor:
    """In the host's memory; pinned where a GPU will fetch it."""
    return rows.cpu().pin_memory() if rows.is_cuda else rows
