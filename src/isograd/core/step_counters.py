"""What layers count while a step runs: whole numbers, summed over ranks, and used once, when the step is committed.

A StepCounter counts in forwards that belong to a step: in training mode, and when their backward runs. A forward whose
loss is only looked at, or that an exception ended, counts nothing, nor does one that is recomputed. The engine calls
`end` on all ranks when the optimizer has stepped, and when a step is skipped, refused or discarded. Counts are int64:
their sum over ranks and micro-batches has the same bits under every layout.

One that `needs_prepass` must know the counts of the whole step before its first backward: `counting` surrounds a pass
over the step's micro-batches without gradients, and `step_total` are the counts of that pass on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.core.attributes import set_attributes
from isograd.core.mesh import Mesh

CUT = "dp cp tp"  # the axes over which tokens may be cut


class StepCounter:
    """What one layer counts over a step."""

    def __init__(self, size: int, *, needs_prepass: bool = False, use: Callable[[Tensor], None] | None = None) -> None:
        """`use` is given the counts of all ranks when a step is committed."""
        self.size, self.needs_prepass, self.use = size, needs_prepass, use
        self.counting = False  # whether the forwards under way count for `step_total`
        self.ignoring = False  # whether they count for nothing
        self.local: Tensor | None = None  # of this rank, in the running step
        self.step_total: Tensor | None = None  # of all ranks, of the running step, counted before it
        self.last: Tensor | None = None  # of all ranks, of the step committed last

    def add(self, counts: Tensor, training: bool, result: Tensor) -> None:
        """Add what a forward on this rank counted, int64 [size], if it belongs to a step: when the gradient of its
        `result` is made."""
        if self.ignoring:
            return
        if self.counting:
            self._add(counts)
        elif training and result.requires_grad:
            waiting = [counts]
            result.register_hook(lambda _: self._add(waiting.pop()) if waiting else None)

    def _add(self, counts: Tensor) -> None:
        self.local = counts if self.local is None else self.local + counts


class StepCounters:
    """All counters of a model."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self.members = [t for module in model.modules() for t in vars(module).values() if isinstance(t, StepCounter)]

    def needs_prepass(self) -> bool:
        """Whether a step begins with a pass that counts: all stages of a pipeline run it if one of them has a layer
        that must. All ranks together."""
        local = any(counter.needs_prepass for counter in self.members)
        return any(all_gather_object(local, self.mesh, "pp"))

    def _summed(self) -> list[Tensor]:
        """Of each counter, the counts of all ranks. One exchange, among ranks with the same counters."""
        if not self.members:
            return []
        local = [
            torch.zeros(t.size, dtype=torch.int64, device=self.mesh.device) if t.local is None else t.local
            for t in self.members
        ]
        total = raw.all_reduce(torch.cat(local), self.mesh.group(CUT))
        return [part.clone() for part in total.split([t.size for t in self.members])]

    @torch.no_grad()
    def end(self, *, committed: bool) -> None:
        """All ranks together, at the end of a step: use its counts if the optimizer has stepped, and forget them."""
        if committed:
            for counter, counts in zip(self.members, self._summed(), strict=True):
                counter.last = counts
                if counter.use is not None:
                    counter.use(counts)
        for counter in self.members:
            counter.local = counter.step_total = None

    def ignoring(self) -> AbstractContextManager[None]:
        """The forwards in here count for nothing: their rows stand in for rows that are not there."""
        return set_attributes(*self.members, ignoring=True)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The forwards in here count for `step_total`, and for nothing else. All ranks together."""
        with set_attributes(*self.members, local=None, counting=True), torch.no_grad():
            yield
            for counter, counts in zip(self.members, self._summed(), strict=True):
                counter.step_total = counts
