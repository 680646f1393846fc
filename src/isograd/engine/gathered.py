"""What a step has gathered on this rank. Another one takes its place when the step ends (engine/step.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine.plan import Slot
from isograd.engine.term_weights import TermWeights
from isograd.engine.tree import Tree, tree_sum
from isograd.errors import EngineError, IsogradError, headline


@dataclass(frozen=True)
class GatheredStep:
    """All of it."""

    term_weights: TermWeights  # of the terms of a step that has several
    ended: int = 0  # steps that were taken or dropped before
    before: Callable[[], object] | None = None  # waits for the step before, and raises what was refused in it
    weight: Tensor | float = 0.0
    losses: list[Tensor] = field(default_factory=list)  # weighted, one per backward
    kinds: set[str] = field(default_factory=set)  # "weighed", "plain": of losses with a weight, without
    synced_backwards: int = 0  # whose buckets left, which every owner must run equally often
    used: set[Slot] = field(default_factory=set)  # reached by a backward
    local: dict[Slot, Tensor] = field(default_factory=dict)  # my own gradients, not reduced
    tree: Tree = field(default_factory=Tree)  # the same where the step is reproducible
    final_shards: dict[Slot, Tensor] = field(default_factory=dict)  # my rows, every sum complete
    full: dict[Slot, Tensor] = field(default_factory=dict)  # memory of a whole gradient
    watcher: Callable[[Slot, Tensor], None] | None = None  # sees each gradient as autograd has made it

    def problem_before(self, mesh: Mesh) -> EngineError | None:
        """Of the step before, if it is read only now: the same on all ranks."""
        try:
            if self.before is not None:
                self.before()
        except IsogradError as refusal:
            return EngineError("IG586", seen=headline(refusal), where=mesh.describe_rank())
        return None

    def pending(self) -> bool:
        """Whether this rank holds gradients that have not left."""
        return bool(self.local) or bool(self.tree)

    def loss(self) -> Tensor:
        """The sum of all losses."""
        return tree_sum(self.losses) if self.losses else torch.zeros((), dtype=torch.float64)

    def note(self, weight: Tensor | float | None) -> None:
        """What the caller gave a loss; a zero, which takes it out, goes with losses of both kinds."""
        if weight is None or (isinstance(weight, Tensor) and weight.device.type != "cpu") or weight != 0:
            self.kinds.add("plain" if weight is None else "weighed")

    def kinds_of_losses(self) -> Tensor:
        """For the gather of the step: whether there are losses without a weight, and with one."""
        return torch.tensor(["plain" in self.kinds, "weighed" in self.kinds], dtype=torch.float64)
