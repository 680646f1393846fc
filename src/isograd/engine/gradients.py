"""Whole gradients by name, on every rank: tests and the verifier compare them with those of one device.

Rows come from their owners, parts that are cut over tp or ep from their ranks, and other pipeline stages' from the
first stage that holds the name. One parameter is whole at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.core.contract import assemble
from isograd.core.mesh import Mesh
from isograd.engine.packing import gather_rows, packing_of
from isograd.engine.plan import Plan
from isograd.engine.step import StepState
from isograd.errors import EngineError


class Gradients(Mapping[str, Tensor]):
    """The gradient of the mean loss by the name of each trainable parameter, whole on every rank, before clipping.

    Looking one up is a collective, and nothing is kept: all ranks look up the same names in the same order, or iterate
    `items()`, one at a time. Good until the step ends."""

    def __init__(
        self, plan: Plan, step_state: StepState, mesh: Mesh, scale: float, meet: Callable[[str], object]
    ) -> None:
        """meet: all ranks together, raises where one of them has left the step, or looks at something else."""
        self._step_state, self._mesh, self._scale, self._meet = step_state, mesh, scale, meet
        self._step = step_state.now.ended
        self._slots = {slot.name: slot for slot in plan.slots}
        mine = {slot.name: (list(slot.contract.shape), slot.dtype == torch.float64) for slot in plan.slots}
        self._stages = all_gather_object(mine, mesh, "pp")
        # The first stage that holds a name.
        self._sources = {name: stage for stage, names in reversed([*enumerate(self._stages)]) for name in names}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for names in self._stages for name in names))

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        source, mesh = self._sources[name], self._mesh
        if self._step_state.now.ended != self._step:
            raise EngineError("IG584", seen=f"a look at {name!r}", where=mesh.describe_rank())
        self._meet(name)
        if mesh.index("pp") == source:
            slot = self._slots[name]
            part = torch.zeros_like(slot.parameter, dtype=slot.dtype)
            if (mine := self._step_state.now.final_shards.get(slot)) is not None:
                slot.rows(part).copy_(mine)
            gather_rows(packing_of([slot]), [slot.rows(part)], [part], slot.owners).wait()
            whole = assemble(part, slot.contract, mesh).contiguous().mul_(self._scale)
        else:
            shape, wide = self._stages[source][name]
            whole = torch.empty(shape, dtype=torch.float64 if wide else torch.float32, device=mesh.device)
        raw.broadcast_(whole, mesh.group("pp"), source)
        return whole
