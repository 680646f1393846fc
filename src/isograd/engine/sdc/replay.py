"""The first micro-batch of a step is computed again by a neighbour: the same bits, or one of the two computed wrongly.

    replay = ReplayCheck(engine)
    replay.begin()                       # before the step: fingerprints of the gradients of its first backward
    engine.accumulate(batch, micro)
    replay.compare(first_micro_batch)    # before engine.step()

Data rank i sends its first micro-batch and the fingerprints of its gradients to data rank i + 1, which runs the same
forward and backward on its own parameters and compares. All do so at once, so every rank is checked, and ranks of a tp
or cp group compute together, as in the step. What was changed in parameters, activations, or in gradients as autograd
made them shows as other bits; what happens to a gradient later is for engine/sdc/reductions.py.

On a hit every rank computes its own micro-batch again. A rank whose second result is not its first was wrong once; else
the rank that appears in most of the pairs that disagree is named, and both ranks of a pair where nothing decides.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.core import rng
from isograd.core.loss_terms import Terms
from isograd.core.step_counters import StepCounters
from isograd.engine.batches import call
from isograd.engine.engine import Engine
from isograd.engine.plan import Slot
from isograd.engine.reducer import ReduceWhen
from isograd.errors import EngineError

SHOWN = 4


class ReplayCheck:
    """Compares data ranks of one engine; see the top of this file."""

    def __init__(self, engine: Engine) -> None:
        """Refuses layouts and models whose micro-batches another rank cannot compute again by itself."""
        self.engine, self.mesh = engine, engine.mesh
        self._group = self.mesh.group("dp")
        self._slots = engine.plan.slots
        why = ""
        if engine.pipeline is not None:
            why = "a pipeline runs all micro-batches of a step together"
        elif self.mesh.layout.zero == 3:
            why = "at ZeRO 3 ranks gather parameters in lockstep, and hold no copies"
        elif self.mesh.size("ep") > 1 or StepCounters(engine.model, self.mesh).members:
            why = "experts count and exchange the tokens of a whole step"
        if why:
            raise _impossible(f"{why} ({self.mesh.layout})")

    def begin(self) -> None:
        """Before the first backward of a step: remember its gradients."""
        self.engine.step_state.change(prints={})

    def compare(self, micro: Any) -> None:
        """After the backwards of the step, on all ranks: refuse it when a neighbour's result has other bits."""
        found = self.engine.step_state.now.prints or {}
        self.engine.step_state.change(prints=None)
        if self._group.size == 1:
            return
        first = self._prints(found)
        prints = raw.gather_list(first, self._group)
        behind = (self._group.index - 1) % self._group.size
        again = self._run(self._from_neighbour(micro))
        differ = [slot.name for slot, a, b in zip(self._slots, prints[behind], again, strict=True) if a != b]
        said = all_gather_object([self._group.ranks[behind], differ[:SHOWN]] if differ else None, self.mesh)
        if not any(said):
            return
        own = all_gather_object(not torch.equal(self._run(micro), first), self.mesh)
        raise self._error({(note[0], rank): note[1] for rank, note in enumerate(said) if note}, own)

    def _error(self, pairs: dict[tuple[int, int], list[str]], changed: list[bool]) -> EngineError:
        counts = Counter(rank for pair in pairs for rank in pair)
        suspects: set[int] = set()
        for pair in pairs:
            unsteady = [rank for rank in pair if changed[rank]]
            most = max(counts[rank] for rank in pair)
            suspects |= set(unsteady or [rank for rank in pair if counts[rank] == most])
        spelled = " or ".join(f"rank {rank}" for rank in sorted(suspects))
        names = sorted({name for names in pairs.values() for name in names})
        shown = [f"rank {b} on what rank {a} had computed" for a, b in pairs]
        once = "; computed twice by itself it differs, too" if any(changed) else ""
        seen = f"{', '.join(names[:SHOWN])} differ for {', '.join(shown[:SHOWN])}{once}"
        return EngineError("IG581", seen=seen, where=self.mesh.describe_rank(), spelled=spelled)

    def _prints(self, found: dict[Slot, Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        return torch.stack([found.get(slot, zero) for slot in self._slots])

    def _run(self, micro: Any) -> Tensor:
        """The fingerprints of a micro-batch's gradients, which the step does not gather."""
        engine = self.engine
        before = rng.random_state(self.mesh.device)
        with engine.untracked_forward():
            result = call(engine.model, micro)
            if (terms := isinstance(result, Terms)) or rng.has_drawn(before, self.mesh.device):
                rng.set_random_state(before, self.mesh.device)
                raise _impossible("a loss of several terms" if terms else "the model draws random numbers from torch")
            state = engine.step_state
            found = dict[Slot, Tensor]()
            state.change(prints=found)
            with state.backward(ReduceWhen.STEP):
                state.backward_discarded(*result)
            state.change(prints=None)
        return self._prints(found)

    def _from_neighbour(self, micro: Any) -> Any:
        """The micro-batch of the data rank behind this one; mine goes to the one ahead."""
        leaves, spec = tree.tree_flatten(micro)
        sent = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = all_gather_object([list(leaf.shape) for leaf in sent], self.mesh, self._group.axes)
        size, index = self._group.size, self._group.index
        behind = (index - 1) % size
        if len(shapes[behind]) != len(sent):
            raise _impossible("micro-batches of data ranks have different tensors")
        got = [leaf.new_empty(shape) for leaf, shape in zip(sent, shapes[behind], strict=True)]
        out = [sent if i == (index + 1) % size else [] for i in range(size)]
        into = [got if i == behind else [] for i in range(size)]
        raw.exchange(out, into, self._group).wait()
        arrived = iter(got)
        return tree.tree_unflatten([next(arrived) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _impossible(why: str) -> EngineError:
    return EngineError("IG582", seen=why)
