"""Whole gradients by name, on every rank: tests and the verifier compare them with those of one device.

Rows come from their owners, parts that are cut over tp or ep from their ranks, and other pipeline stages' from the
first stage that holds the name. One parameter is whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.core.contract import assemble
from isograd.core.mesh import Mesh
from isograd.engine.packing import gather_rows, packing_of
from isograd.engine.plan import Plan, Slot


@torch.no_grad()
def gradients(
    plan: Plan, final_shards: Mapping[Slot, Tensor], mesh: Mesh, scale: float
) -> Iterator[tuple[str, Tensor]]:
    """The gradient of every trainable parameter, times `scale`. `final_shards`: mine. All ranks iterate together."""
    slots = {slot.name: slot for slot in plan.slots}
    mine = {slot.name: (list(slot.contract.shape), slot.dtype == torch.float64) for slot in plan.slots}
    stages = all_gather_object(mine, mesh, "pp")
    for name in dict.fromkeys(name for stage in stages for name in stage):
        source = next(i for i, stage in enumerate(stages) if name in stage)
        if mesh.index("pp") == source:
            slot = slots[name]
            part = torch.zeros_like(slot.parameter, dtype=slot.dtype)
            if slot in final_shards:
                slot.rows(part).copy_(final_shards[slot])
            gather_rows(packing_of([slot]), [slot.rows(part)], [part], slot.owners).wait()
            whole = assemble(part, slot.contract, mesh).contiguous().mul_(scale)
        else:
            shape, wide = stages[source][name]
            whole = torch.empty(shape, dtype=torch.float64 if wide else torch.float32, device=mesh.device)
        raw.broadcast_(whole, mesh.group("pp"), source)
        yield name, whole
