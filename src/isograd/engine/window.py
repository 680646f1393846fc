"""What `.grad` means to `ig.DataParallel` between two reductions, and what users have done to it meanwhile.

The backwards between two reductions are a window. Within it `.grad` shows this rank's own sum, weighted and not reduced
(StepState.local); what `.grad` was when the window began waits in `before`. A window that fails drops both: all that
was gathered since gradients were last cleared, as Engine.discard does. Users clear `.grad` by `zero_grad`, to None
or to zero in place, and different optimizers may clear different parameters; so what was cleared is found out per
parameter, when the next backward begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.engine.grad_placeholder import set_grads
from isograd.engine.plan import Slot
from isograd.engine.step import StepState
from isograd.errors import EngineError


@dataclass(frozen=True)
class _Running:
    """This rank's backwards since the last reduction."""

    before: dict[Slot, Tensor] = field(default_factory=dict)  # reduced gradients that they add to
    backwards: int = 0
    unknown: bool = False  # nothing says what a loss is the mean of
    torn: bool = False  # a part of their sum was cleared


@dataclass(frozen=True)
class _Now:
    """All that there is until the next reduction, or until gradients are cleared, or dropped."""

    running: _Running = field(default_factory=_Running)
    weights: dict[Slot, float] = field(default_factory=dict)  # the weight in what `.grad`, reduced, is the mean of
    weighed: bool = False  # whether there were backwards of this kind since then, those of the running window too
    plain: bool = False
    left: dict[Slot, tuple[Tensor, int]] = field(default_factory=dict)  # what we have put into `.grad`; its version
    own: bool = False  # whether that is this rank's own sum
    drops: int = 0  # windows that were dropped
    opened: int = 0  # steps of optimizers that were begun, and are not over, where they say so
    steps: int = 0  # that were taken


class Window:
    """The backwards between two reductions, and `.grad` before them."""

    def __init__(self, step_state: StepState) -> None:
        self.step_state, self.slots = step_state, step_state.plan.slots
        self.now = _Now()

    def change(self, **fields: Any) -> None:
        """All that it writes of itself: `now` is made anew."""
        self.now = replace(self.now, **fields)

    def open(self) -> None:
        """Before the first gradient of a backward arrives. `.grad` becomes None: autograd puts the new one there."""
        now, running = self.now, self.now.running
        cleared = [slot for slot in now.left if self._is_cleared(slot)]
        if len(cleared) == len(now.left):  # everything
            now = replace(now, weights={}, weighed=False, plain=False)
        if now.own:
            running = self._open_own(cleared)
        else:
            now = replace(now, weights={slot: w for slot, w in now.weights.items() if slot not in cleared})
            known = {slot: slot.parameter.grad for slot in self.slots if slot not in cleared}
            before = {slot: gradient for slot, gradient in known.items() if gradient is not None}
            running = replace(running, before=running.before | before)
        set_grads((slot.parameter, None) for slot in self.slots)
        self.now = replace(now, running=running, left={})

    def _open_own(self, cleared: list[Slot]) -> _Running:
        step_state, running = self.step_state, self.now.running
        if cleared and len(cleared) == len(self.now.left):
            step_state.change(weight=0.0, local={}, used=set())
            running = _Running()
        elif cleared:
            running = replace(running, torn=True)
        shown = {slot: (slot.parameter.grad, own) for slot, own in step_state.now.local.items()}
        edited = {  # of half precision it is a copy
            slot: gradient.to(slot.dtype)
            for slot, (gradient, own) in shown.items()
            if gradient is not None and gradient is not own and gradient._version != self.now.left[slot][1]
        }
        step_state.change(local=step_state.now.local | edited)
        return running

    def _is_cleared(self, slot: Slot) -> bool:
        """(Gradients may be zero by themselves.)"""
        gradient, (left, version) = slot.parameter.grad, self.now.left[slot]
        if gradient is None:
            return True
        return (gradient is not left or gradient._version != version) and not bool(gradient.any())

    def add(self, weight: float | None, rows: float | None) -> None:
        """A backward of this window has ended. `weight`: what `weigh` was given. `rows`: a batch's, if it had one."""
        plain, now, running = weight is None, self.now, self.now.running
        unknown = running.unknown or (plain and rows is None)
        running = replace(running, backwards=running.backwards + 1, unknown=unknown)
        self.change(running=running, plain=now.plain or plain, weighed=now.weighed or not plain)
        self.step_state.add_weight(weight if weight is not None else 1.0 if rows is None else rows)

    def columns(self) -> dict[str, Tensor]:
        """What the other ranks must know, for the gather of a reduction."""
        kinds = self.now.plain, self.now.weighed
        known = {"losses": kinds, "backwards": (self.now.running.backwards,), "steps": (self.now.steps,)}
        return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in known.items()}

    def problem(self, mesh: Mesh) -> EngineError | None:
        """What this rank alone can see is wrong."""
        running = self.now.running
        if running.unknown and (mesh.size("world") > 1 or running.backwards > 1):
            return EngineError("IG549", where=mesh.describe_rank())
        return EngineError("IG537", where=mesh.describe_rank()) if running.torn else None

    def scales(self, weight: float, *, by_rows: bool, backwards: float) -> dict[Slot, tuple[float, float]]:
        """Per parameter: what the sum of this window counts in `.grad`, and what `before` counts.

        by_rows: every backward is a mean over rows, and they add up, as under DDP. Else `.grad` is one weighted mean.
        """
        if by_rows:
            return dict.fromkeys(self.slots, (backwards / weight if weight else 0.0, 1.0))
        found = {}
        for slot in self.slots:
            before = self.now.weights.get(slot, 0.0)
            share = 1.0 / (before + weight) if before + weight else 0.0  # a mean over nothing is nothing
            found[slot] = share, before * share
        return found

    def finish(self, used: Sequence[bool], weight: float, scales: dict[Slot, tuple[float, float]]) -> None:
        """`step_state.now.full` holds what this window counts, reduced. `used`: by any rank, per parameter."""
        full = self.step_state.now.full
        found: dict[Slot, Tensor | None] = {}
        for slot, is_used in zip(self.slots, used, strict=True):
            before, (_, keep) = self.now.running.before.get(slot), scales[slot]
            if is_used and before is not None:
                found[slot] = full[slot].add_(before, alpha=keep)
            elif is_used:
                found[slot] = full[slot]
            else:
                found[slot] = None if before is None else before.mul_(keep)
        weights = {slot: self.now.weights.get(slot, 0.0) + weight for slot in self.slots}
        self._leave(found, replace(self.now, running=_Running(), weights=weights, own=False))
        self.step_state.clear()

    def show_own(self) -> None:
        """After a backward that was not reduced."""
        self._leave(self.step_state.now.local, replace(self.now, own=True))

    def drop(self) -> None:
        """The window failed or is discarded: `.grad` is None on every rank, whatever was reduced into it before.

        It cannot be put back. Ranks hear of a failure at different times, and a program that catches it and calls
        `zero_grad` does so before that on the rank that failed, where it would come back, and after it on the others.
        """
        self._leave({}, _Now(drops=self.now.drops + 1, opened=self.now.opened, steps=self.now.steps))

    def _leave(self, gradients: Mapping[Slot, Tensor | None], now: _Now) -> None:
        found = {slot: g.to(slot.parameter.dtype) for slot, g in gradients.items() if g is not None}
        set_grads((slot.parameter, found.get(slot)) for slot in self.slots)
        self.now = replace(now, left={slot: (gradient, gradient._version) for slot, gradient in found.items()})
