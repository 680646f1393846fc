"""What `.grad` means to `ig.DataParallel` between two reductions, and what users have done to it meanwhile.

The backwards between two reductions are a window. Within it `.grad` shows this rank's own sum, weighted and not reduced
(StepState.local); what `.grad` was when the window began waits in `before`. A window that fails drops both: all that
was gathered since gradients were last cleared, as Engine.discard does. Users clear `.grad` by `zero_grad`, to None
or to zero in place, and different optimizers may clear different parameters; so what was cleared is found out per
parameter, when the next backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine.grad_placeholder import OWN_SUM
from isograd.engine.plan import Slot
from isograd.engine.step import StepState
from isograd.errors import EngineError


@dataclass
class _Gathered:
    """Of this rank's backwards since the last reduction."""

    before: dict[Slot, Tensor] = field(default_factory=dict)  # reduced gradients that they add to
    backwards: int = 0
    unknown: bool = False  # nothing says what a loss is the mean of
    torn: bool = False  # a part of their sum was cleared


class Window:
    """The backwards between two reductions, and `.grad` before them."""

    def __init__(self, step_state: StepState) -> None:
        self.step_state, self.slots = step_state, step_state.plan.slots
        self.now = _Gathered()
        self.totals = dict.fromkeys(self.slots, 0.0)  # all ranks' weight in what `.grad` is the weighted mean of
        self.drops = 0  # windows that were dropped
        self.steps = 0  # of optimizers, where they are counted
        self.stepping = 0  # steps that were begun, and are not over
        self.weighed = self.plain = False  # which kinds of backwards there were since gradients were last cleared
        self._left: dict[Slot, tuple[Tensor, int]] = {}  # what we left in `.grad`, and its version
        self._own = False  # whether that is this rank's own sum

    def open(self) -> None:
        """Before the first gradient of a backward arrives. `.grad` becomes None: autograd puts the new one there."""
        cleared = [slot for slot in self._left if self._is_cleared(slot)]
        everything = len(cleared) == len(self._left)
        if everything:
            self.weighed = self.plain = False
            self.totals = dict.fromkeys(self.slots, 0.0)
        if self._own:
            self._open_own(cleared, everything)
        else:
            for slot in self.slots:
                if slot in cleared:
                    self.totals[slot] = 0.0
                elif slot.parameter.grad is not None:
                    self.now.before[slot] = slot.parameter.grad
        for slot in self.slots:
            slot.parameter.grad = None
        self._left = {}

    def _open_own(self, cleared: list[Slot], everything: bool) -> None:
        step_state = self.step_state
        if everything and cleared:
            step_state.forget_own()
            self.now = _Gathered()
        elif cleared:
            self.now.torn = True
        for slot in step_state.local:  # it may have been edited; of half precision it is a copy
            shown = slot.parameter.grad
            if shown is not None and shown is not step_state.local[slot] and shown._version != self._left[slot][1]:
                step_state.replace_own(slot, shown)

    def _is_cleared(self, slot: Slot) -> bool:
        """(Gradients may be zero by themselves.)"""
        gradient, (left, version) = slot.parameter.grad, self._left[slot]
        if gradient is None:
            return True
        return (gradient is not left or gradient._version != version) and not bool(gradient.any())

    def add(self, weight: float | None, rows: float, known: bool) -> None:
        """A backward of this window has ended. `weight`: what `weigh` was given. `known`: `rows` are a batch's."""
        if weight is None:
            self.plain, self.now.unknown = True, self.now.unknown or not known
        else:
            self.weighed = True
        self.now.backwards += 1
        self.step_state.loss_sums.add_weight(rows if weight is None else weight)

    def columns(self) -> dict[str, Tensor]:
        """What the other ranks must know, for the gather of a reduction."""
        known = {"weighed": self.weighed, "plain": self.plain, "backwards": self.now.backwards}
        known["steps"] = self.steps
        return {name: torch.tensor([number], dtype=torch.float64) for name, number in known.items()}

    def problem(self, mesh: Mesh) -> EngineError | None:
        """What this rank alone can see is wrong."""
        if self.now.unknown and (mesh.size("world") > 1 or self.now.backwards > 1):
            return EngineError("IG549", where=mesh.describe_rank())
        return EngineError("IG537", where=mesh.describe_rank()) if self.now.torn else None

    def scales(self, weight: float, *, by_rows: bool, backwards: float) -> dict[Slot, tuple[float, float]]:
        """Per parameter: what the sum of this window counts in `.grad`, and what `before` counts.

        by_rows: every backward is a mean over rows, and they add up, as under DDP. Else `.grad` is one weighted mean.
        """
        if by_rows:
            return dict.fromkeys(self.slots, (backwards / weight if weight else 0.0, 1.0))
        found = {}
        for slot in self.slots:
            total = self.totals[slot] + weight
            share = 1.0 / total if total else 0.0  # a mean over nothing is nothing
            found[slot] = share, self.totals[slot] * share
        return found

    def finish(self, used: Sequence[bool], weight: float, scales: dict[Slot, tuple[float, float]]) -> None:
        """`step_state.full` holds what this window counts, reduced. `used`: by any rank, per parameter."""
        full = self.step_state.full
        found: dict[Slot, Tensor | None] = {}
        for slot, is_used in zip(self.slots, used, strict=True):
            before, (_, keep) = self.now.before.get(slot), scales[slot]
            if is_used and before is not None:
                found[slot] = full[slot].add_(before, alpha=keep)
            elif is_used:
                found[slot] = full[slot]
            else:
                found[slot] = None if before is None else before.mul_(keep)
            self.totals[slot] += weight
        self._leave(found, own=False)
        self.now = _Gathered()
        self.step_state.clear()

    def show_own(self) -> None:
        """After a backward that was not reduced."""
        self._leave(dict(self.step_state.local), own=True)

    def drop(self) -> None:
        """The window failed or is discarded: `.grad` is None on every rank, whatever was reduced into it before.

        It cannot be put back. Ranks hear of a failure at different times, and a program that catches it and calls
        `zero_grad` does so before that on the rank that failed, where it would come back, and after it on the others.
        """
        self._leave({}, own=False)
        self.now, self.drops = _Gathered(), self.drops + 1
        self.totals, self.weighed, self.plain = dict.fromkeys(self.slots, 0.0), False, False

    def _leave(self, gradients: dict[Slot, Tensor] | dict[Slot, Tensor | None], own: bool) -> None:
        self._left, self._own = {}, own
        for slot in self.slots:
            gradient = gradients.get(slot)
            slot.parameter.grad = None if gradient is None else gradient.to(slot.parameter.dtype)
            if slot.parameter.grad is not None:
                setattr(slot.parameter.grad, OWN_SUM, own)
                self._left[slot] = slot.parameter.grad, slot.parameter.grad._version
