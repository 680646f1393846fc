"""What `.grad` means to `ig.DataParallel` between two reductions, and what users have done to it meanwhile.

The backwards between two reductions are a window. Within it `.grad` shows this rank's own sum, weighted and not reduced
(the ledger's `local`); what `.grad` was when the window began waits in `before`. A window that fails drops both: all
that was gathered since gradients were last cleared, as Engine.discard does. Users clear `.grad` by `zero_grad`, to None
or to zero in place, and different optimizers may clear different parameters; so what was cleared is found out per
parameter, when the next backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isograd.engine.ledger import Ledger
from isograd.engine.plan import Slot
from isograd.engine.withheld import OWN_SUM
from isograd.errors import EngineError
from isograd.mesh import Mesh


class Window:
    """The backwards between two reductions, and `.grad` before them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.slots = ledger, ledger.plan.slots
        self.before: dict[Slot, Tensor] = {}  # reduced gradients that this window adds to
        self.totals = dict.fromkeys(self.slots, 0.0)  # all ranks' weight in what `.grad` is the weighted mean of
        self.backwards = 0  # of this window, on this rank
        self.drops = 0  # windows that were dropped
        self.steps = 0  # of optimizers, where they are counted
        self.stepping = 0  # steps that were begun, and are not over
        self.unknown = False  # whether nothing says what a loss of this window is the mean of
        self.weighed = self.plain = False  # which kinds of backwards there were since gradients were last cleared
        self._left: dict[Slot, tuple[Tensor, int]] = {}  # what we left in `.grad`, and its version
        self._own = False  # whether that is this rank's own sum
        self._torn = False  # whether a part of an own sum was cleared

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
                    self.before[slot] = slot.parameter.grad
        for slot in self.slots:
            slot.parameter.grad = None
        self._left = {}

    def _open_own(self, cleared: list[Slot], everything: bool) -> None:
        ledger = self.ledger
        if everything and cleared:
            ledger.local, ledger.used, ledger.told.weight = {}, set(), 0.0
            self.before, self.backwards, self.unknown = {}, 0, False
        elif cleared:
            self._torn = True
        for slot in ledger.local:  # it may have been edited; of half precision it is a copy
            shown = slot.parameter.grad
            if shown is not None and shown is not ledger.local[slot] and shown._version != self._left[slot][1]:
                ledger.local[slot] = shown.to(slot.dtype)

    def _is_cleared(self, slot: Slot) -> bool:
        """(Gradients may be zero by themselves.)"""
        gradient, (left, version) = slot.parameter.grad, self._left[slot]
        if gradient is None:
            return True
        return (gradient is not left or gradient._version != version) and not bool(gradient.any())

    def add(self, weight: float | None, rows: float, known: bool) -> None:
        """A backward of this window has ended. `weight`: what `weigh` was given. `known`: `rows` are a batch's."""
        if weight is None:
            self.plain, self.unknown = True, self.unknown or not known
        else:
            self.weighed = True
        self.backwards += 1
        self.ledger.told.weight = self.ledger.told.weight + (rows if weight is None else weight)

    def columns(self) -> Tensor:
        """What the other ranks must know, for the gather of a reduction."""
        return torch.tensor([self.weighed, self.plain, self.backwards, self.steps], dtype=torch.float64)

    def problem(self, mesh: Mesh) -> EngineError | None:
        """What this rank alone can see is wrong."""
        if self.unknown and (mesh.size("world") > 1 or self.backwards > 1):
            return EngineError(
                "IG549",
                "a loss counts by its rows, and they are not known",
                seen="a backward of a loss that no output of model(...) is a part of, without weigh",
                expected="the loss of what model(...) returned, not model.module or a method of it",
                fix="call model(...); or loss = model.weigh(loss, rows) (accelerate: backward(loss, weight=rows))",
                where=mesh.where(),
            )
        if not self._torn:
            return None
        return EngineError(
            "IG537",
            "a part of the gradients was cleared between two backwards under no_sync",
            seen="zero_grad of an optimizer that has some of the parameters, before their sum was reduced",
            expected="gradients cleared after a backward outside no_sync, or all of them",
            where=mesh.where(),
        )

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

    def settle(self, used: Sequence[bool], weight: float, scales: dict[Slot, tuple[float, float]]) -> None:
        """`ledger.full` holds what this window counts, reduced. `used`: by any rank, per parameter."""
        full = self.ledger.full
        found: dict[Slot, Tensor | None] = {}
        for slot, is_used in zip(self.slots, used, strict=True):
            before, (_, keep) = self.before.get(slot), scales[slot]
            if is_used and before is not None:
                found[slot] = full[slot].add_(before, alpha=keep)
            elif is_used:
                found[slot] = full[slot]
            else:
                found[slot] = None if before is None else before.mul_(keep)
            self.totals[slot] += weight
        self._leave(found, own=False)
        self.before, self.backwards, self.unknown = {}, 0, False
        self.ledger.clear()

    def show_own(self) -> None:
        """After a backward that was not reduced."""
        self._leave(dict(self.ledger.local), own=True)

    def drop(self) -> None:
        """The window failed or is discarded: `.grad` is None on every rank, whatever was reduced into it before.

        It cannot be put back. Ranks hear of a failure at different times, and a program that catches it and calls
        `zero_grad` does so before that on the rank that failed, where it would come back, and after it on the others.
        """
        self._leave({}, own=False)
        self.before, self.backwards, self._torn, self.drops = {}, 0, False, self.drops + 1
        self.unknown = False
        self.totals, self.weighed, self.plain = dict.fromkeys(self.slots, 0.0), False, False

    def _leave(self, gradients: dict[Slot, Tensor] | dict[Slot, Tensor | None], own: bool) -> None:
        self._left, self._own = {}, own
        for slot in self.slots:
            gradient = gradients.get(slot)
            slot.parameter.grad = None if gradient is None else gradient.to(slot.parameter.dtype)
            if slot.parameter.grad is not None:
                setattr(slot.parameter.grad, OWN_SUM, own)
                self._left[slot] = slot.parameter.grad, slot.parameter.grad._version
