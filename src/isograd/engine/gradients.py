"""Whole gradients by name, on every rank: tests and the verifier compare them with those of one device.

Rows come from their owners, parts that are cut over tp or ep from their ranks, and other pipeline stages' from the
first stage that holds the name. One parameter is whole at a time; of small ones, as many as ranks meet for at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from itertools import accumulate, groupby

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

AT_ONCE = 2**22  # elements that `items()` gathers behind one meeting, which costs more than many a gather


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
        self._sources: dict[str, tuple[int, list[int], bool]] = {}  # the first stage that holds it, shape, is it fp64
        for stage, names in enumerate(all_gather_object(mine, mesh, "pp")):
            self._sources |= {name: (stage, *about) for name, about in names.items() if name not in self._sources}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Tensor:
        return self._look([name], name)[0]

    def items(self) -> ItemsView[str, Tensor]:
        """Of all. Nothing of the caller's runs between a meeting and the gathers that it is for."""
        return _Items(self)

    @torch.no_grad()
    def _look(self, names: Sequence[str], said: str) -> list[Tensor]:
        sources = [self._sources[name] for name in names]
        if self._step_state.now.ended != self._step:
            raise EngineError("IG584", seen=f"a look at {said!r}", where=self._mesh.describe_rank())
        self._meet(said)
        return [self._gather(name, *source) for name, source in zip(names, sources, strict=True)]

    def _gather(self, name: str, source: int, shape: list[int], wide: bool) -> Tensor:
        if self._mesh.index("pp") == source:
            slot = self._slots[name]
            part = torch.zeros_like(slot.parameter, dtype=slot.dtype)
            if (mine := self._step_state.now.final_shards.get(slot)) is not None:
                slot.rows(part).copy_(mine)
            gather_rows(packing_of([slot]), [slot.rows(part)], [part], slot.owners).wait()
            whole = assemble(part, slot.contract, self._mesh).contiguous().mul_(self._scale)
        else:
            whole = torch.empty(shape, dtype=torch.float64 if wide else torch.float32, device=self._mesh.device)
        raw.broadcast_(whole, self._mesh.group("pp"), source)
        return whole


class _Items(ItemsView[str, Tensor]):
    _mapping: Gradients

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        ends = accumulate(math.prod(shape) for _, shape, _ in self._mapping._sources.values())
        for _, batch in groupby(zip(self._mapping, ends, strict=True), lambda item: item[1] // AT_ONCE):
            names = [name for name, _ in batch]
            yield from zip(names, self._mapping._look(names, f"{names[0]} and those behind it"), strict=True)
