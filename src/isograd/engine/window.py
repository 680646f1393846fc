"""What `.grad` means to `ig.DataParallel` between two reductions, and what users have done to it meanwhile.

The backwards between two reductions are a window. Within it `.grad` shows this rank's own sum, weighted and not reduced
(StepState.local); what `.grad` was when the window began waits in `before`. A window that fails drops both: all that
was gathered since gradients were last cleared, as Engine.discard does. Users clear `.grad` by `zero_grad`, to None
or to zero in place, and different optimizers may clear different parameters; so what was cleared is found out per
parameter, when the next backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine.grad_placeholder import OWN_SUM
from isograd.engine.plan import Slot
from isograd.engine.step import StepState
from isograd.errors import EngineError


@dataclass(frozen=True)
class _Gathered:
    """Of this rank's backwards since the last reduction."""

    before: dict[Slot, Tensor] = field(default_factory=dict)  # reduced gradients that they add to
    backwards: int = 0
    unknown: bool = False  # nothing says what a loss is the mean of
    torn: bool = False  # a part of their sum was cleared


@dataclass(frozen=True)
class _Reduced:
    """What `.grad` has of all ranks since gradients were last cleared."""

    totals: dict[Slot, float]  # the weight in what it is the weighted mean of
    weighed: bool = False  # whether there were backwards of this kind, those of the running window too
    plain: bool = False


@dataclass(frozen=True)
class _LastGrads:
    """What we have left in `.grad`."""

    left: dict[Slot, tuple[Tensor, int]] = field(default_factory=dict)  # and its version
    own: bool = False  # whether that is this rank's own sum


class Window:
    """The backwards between two reductions, and `.grad` before them."""

    def __init__(self, step_state: StepState) -> None:
        self.step_state, self.slots = step_state, step_state.plan.slots
        self.now = _Gathered()
        self.reduced = self._nothing = _Reduced(dict.fromkeys(self.slots, 0.0))
        self.drops = 0  # windows that were dropped
        self._shown = _LastGrads()

    def open(self) -> None:
        """Before the first gradient of a backward arrives. `.grad` becomes None: autograd puts the new one there."""
        cleared = [slot for slot in self._shown.left if self._is_cleared(slot)]
        everything = len(cleared) == len(self._shown.left)
        if everything:
            self.reduced = self._nothing
        if self._shown.own:
            self._open_own(cleared, everything)
        else:
            totals = self.reduced.totals | dict.fromkeys(cleared, 0.0)
            self.reduced = replace(self.reduced, totals=totals)
            known = {slot: slot.parameter.grad for slot in self.slots if slot not in cleared}
            before = {slot: gradient for slot, gradient in known.items() if gradient is not None}
            self.now = replace(self.now, before=self.now.before | before)
        for slot in self.slots:
            slot.parameter.grad = None
        self._shown = _LastGrads(own=self._shown.own)

    def _open_own(self, cleared: list[Slot], everything: bool) -> None:
        step_state = self.step_state
        if everything and cleared:
            step_state.forget_own()
            self.now = _Gathered()
        elif cleared:
            self.now = replace(self.now, torn=True)
        for slot in step_state.local:  # it may have been edited; of half precision it is a copy
            shown, own = slot.parameter.grad, step_state.local[slot]
            if shown is not None and shown is not own and shown._version != self._shown.left[slot][1]:
                step_state.local.update({slot: shown.to(slot.dtype)})

    def _is_cleared(self, slot: Slot) -> bool:
        """(Gradients may be zero by themselves.)"""
        gradient, (left, version) = slot.parameter.grad, self._shown.left[slot]
        if gradient is None:
            return True
        return (gradient is not left or gradient._version != version) and not bool(gradient.any())

    def add(self, weight: float | None, rows: float, known: bool) -> None:
        """A backward of this window has ended. `weight`: what `weigh` was given. `known`: `rows` are a batch's."""
        plain, now = weight is None, self.now
        before = self.reduced
        self.reduced = replace(before, plain=before.plain or plain, weighed=before.weighed or not plain)
        self.now = replace(now, backwards=now.backwards + 1, unknown=now.unknown or (plain and not known))
        self.step_state.add_weight(rows if weight is None else weight)

    def columns(self, steps: int) -> dict[str, Tensor]:
        """What the other ranks must know, for the gather of a reduction. `steps`: that optimizers have taken."""
        weights = self.reduced.plain, self.reduced.weighed
        known = {"weights": weights, "backwards": (self.now.backwards,), "steps": (steps,)}
        return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in known.items()}

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
            before = self.reduced.totals[slot]
            share = 1.0 / (before + weight) if before + weight else 0.0  # a mean over nothing is nothing
            found[slot] = share, before * share
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
        totals = {slot: total + weight for slot, total in self.reduced.totals.items()}
        self.reduced = replace(self.reduced, totals=totals)
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
        self.reduced = self._nothing

    def _leave(self, gradients: dict[Slot, Tensor] | dict[Slot, Tensor | None], own: bool) -> None:
        left = {}
        for slot in self.slots:
            gradient = gradients.get(slot)
            slot.parameter.grad = None if gradient is None else gradient.to(slot.parameter.dtype)
            if slot.parameter.grad is not None:
                setattr(slot.parameter.grad, OWN_SUM, own)
                left[slot] = slot.parameter.grad, slot.parameter.grad._version
        self._shown = _LastGrads(left, own)
