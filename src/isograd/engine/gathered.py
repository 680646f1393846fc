"""What a step has gathered on this rank. Another one takes its place when the step ends (engine/step.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine import validation
from isograd.engine.plan import Bucket, Slot
from isograd.engine.precision import LossScale
from isograd.engine.reducer import ReduceWhen
from isograd.engine.sdc.reductions import ReductionSums
from isograd.engine.term_weights import TermWeights
from isograd.engine.tree import Tree, tree_sum
from isograd.errors import EngineError, IsogradError, headline


class State(Enum):
    """Where a step stands. Each method of StepState (engine/step.py) asserts the states that it may be called in."""

    OPEN = "open"  # between backwards
    BACKWARD = "in a backward"
    REDUCED = "reduced"  # every sum is complete; a further backward opens it again
    FAILED = "failed"  # takes nothing more; all ranks refuse the step


@dataclass(frozen=True)
class AutogradRun:
    """One run of autograd."""

    reduces: bool  # no later run of this backward reaches the same parameters: their buckets may leave
    discard: bool  # for the other ranks only, which gather parameters with this one
    factor: Tensor | None = None  # that a half-precision loss could not be seeded with
    no_loss: Tensor | None = None  # on a GPU: whether the loss is a mean over nothing


@dataclass(frozen=True)
class Phase:
    """The state of a step, and what there is in that state alone."""

    state: State = State.OPEN
    failure: str | None = None  # why it is FAILED
    when: ReduceWhen = ReduceWhen.STEP  # the buckets of the running backward leave
    unsent: list[Bucket] = field(default_factory=list)  # by it, in the order in which they leave
    missing: dict[Bucket, set[Slot]] = field(default_factory=dict)  # gradients that it has not finished
    run: AutogradRun | None = None  # under way


@dataclass(frozen=True)
class Inconsistent:
    """Copies of parameters may differ between ranks: no step is right until a checkpoint is loaded."""

    why: str
    versions: dict[int, int]  # of parameters (ids), as an optimizer has left them


@dataclass(frozen=True)
class GatheredStep:
    """All of it, and what the next step has of this one."""

    term_weights: TermWeights  # of the terms of a step that has several
    loss_scale: LossScale | None = None  # None: it needs none
    inconsistent: Inconsistent | None = None
    syncs: bool = True  # backwards may reduce
    writes: int = 0  # how often the optimizer has begun to write
    ended: int = 0  # steps that were taken or dropped before
    before: Callable[[], object] | None = None  # waits for the step before, and raises what was refused in it
    phase: Phase = field(default_factory=Phase)
    weight: Tensor | float = 0.0
    losses: list[Tensor] = field(default_factory=list)  # weighted, one per backward
    kinds: set[str] = field(default_factory=set)  # "weighed", "plain": of losses with a weight, without ("rows")
    synced_backwards: int = 0  # whose buckets left, which every owner must run equally often
    used: set[Slot] = field(default_factory=set)  # reached by a backward
    local: dict[Slot, Tensor] = field(default_factory=dict)  # my own gradients, not reduced
    tree: Tree = field(default_factory=Tree)  # the same where the step is reproducible
    final_shards: dict[Slot, Tensor] = field(default_factory=dict)  # my rows, every sum complete
    full: dict[Slot, Tensor] = field(default_factory=dict)  # memory of a whole gradient
    sums: ReductionSums | None = None  # of its reductions, where they are checked
    # Of gradients as autograd makes them, where they are asked for: of the first backward, and of discarded ones.
    prints: dict[Slot, Tensor] | None = None

    def next_step(self, unread: Callable[[], object] | None) -> GatheredStep:
        """Of which nothing is there."""
        kept = self.loss_scale, self.inconsistent, self.syncs, self.writes
        return GatheredStep(self.term_weights.next_step(), *kept, self.ended + 1, unread)

    def problem_before(self, mesh: Mesh) -> EngineError | None:
        """Of the step before, if it is read only now: the same on all ranks."""
        try:
            if self.before is not None:
                self.before()
        except IsogradError as refusal:
            return EngineError("IG586", seen=headline(refusal), where=mesh.describe_rank())
        return None

    @property
    def scale(self) -> float:
        """What losses are multiplied with."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def pending(self) -> bool:
        """Whether this rank holds gradients that have not left."""
        return bool(self.local) or bool(self.tree)

    def loss(self) -> Tensor:
        """The sum of all losses."""
        return tree_sum(self.losses) if self.losses else torch.zeros((), dtype=torch.float64)

    def note(self, weight: Tensor | float | None) -> None:
        """What the caller gave a loss; a zero, which takes it out, goes with losses of both kinds."""
        if weight is None or not validation.is_known_zero(weight):
            self.kinds.add("plain" if weight is None or "rows" in self.kinds else "weighed")

    def note_rows(self) -> None:
        """The caller of a loop gives the next losses no weight: the loop weighs their rows."""
        self.kinds.add("rows")

    def kinds_of_losses(self) -> Tensor:
        """For the gather of the step: whether there are losses without a weight, and with one."""
        return torch.tensor(["plain" in self.kinds, "weighed" in self.kinds], dtype=torch.float64)
