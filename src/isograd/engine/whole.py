"""Whole gradients by name, on every rank: tests and the verifier compare them with those of one device.

Rows come from their owners, parts that are cut over tp or ep from their ranks, and other pipeline stages' from the
first stage that holds the name. One parameter is whole at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.contract import assemble
from isograd.engine.plan import Plan, Slot
from isograd.engine.transport import gather_rows
from isograd.mesh import Mesh


@torch.no_grad()
def gradients(plan: Plan, paid: Mapping[Slot, Tensor], mesh: Mesh, scale: float) -> Iterator[tuple[str, Tensor]]:
    """The gradient of every trainable parameter, times `scale`. `paid`: my settled rows. All ranks iterate together."""
    slots = {slot.name: slot for slot in plan.slots}
    stages = _names_of_stages(plan, mesh)
    for name in dict.fromkeys(name for stage in stages for name in stage):
        source = next(i for i, stage in enumerate(stages) if name in stage)
        if mesh.index("pp") == source:
            slot = slots[name]
            part = torch.zeros_like(slot.parameter, dtype=slot.dtype)
            if slot in paid:
                slot.rows(part).copy_(paid[slot])
            gather_rows([slot], [part], slot.owners).wait()
            whole = assemble(part, slot.contract, mesh).contiguous().mul_(scale)
        else:
            shape, wide = stages[source][name]
            whole = torch.empty(shape, dtype=torch.float64 if wide else torch.float32, device=mesh.device)
        raw.broadcast_(whole, mesh.group("pp"), source)
        yield name, whole


def _names_of_stages(plan: Plan, mesh: Mesh) -> list[dict[str, tuple[list[int], bool]]]:
    """For each stage, {name: (global shape, whether in fp64)}."""
    mine = {slot.name: (list(slot.contract.shape), slot.dtype == torch.float64) for slot in plan.slots}
    pp = mesh.group("pp")
    if pp.size == 1:
        return [mine]
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(mesh.device)
    longest = max(int(n) for n in raw.gather_list(torch.tensor(len(text), device=mesh.device), pp))
    padded = torch.cat((text, text.new_full((longest - len(text),), ord(" "))))
    return [json.loads(bytes(t.tolist())) for t in raw.gather_list(padded, pp)]
