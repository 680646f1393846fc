"""The ledger broken on purpose, one policy or transition at a time: the random sequences of test_ledger.py see each.

A mutant is killed by a wrong number, a state that is not what it should be, or a refusal with its code. A hang or a
crash would fail the test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from isograd.engine import totals
from isograd.engine.flights import Flights
from isograd.engine.ledger import Leave, Ledger, State
from isograd.errors import IsogradError

from . import test_ledger as sequences

SEEDS = range(500, 530)


def after(original: Callable[..., Any], more: Callable[..., None]) -> Callable[..., Any]:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        more(self)
        return found

    return broken


def before(original: Callable[..., Any], more: Callable[..., None]) -> Callable[..., Any]:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        more(self)
        return original(self, *args, **kwargs)

    return broken


def stays_open(self: Ledger) -> None:
    if self.state is State.FAILED:
        self.state, self.failure = State.OPEN, None


def keeps_some(original: Callable[[Ledger], None]) -> Callable[[Ledger], None]:
    def clear(self: Ledger) -> None:
        local = dict(self.local)
        original(self)
        self.local = local

    return clear


def keeps_rows(original: Callable[[Ledger], None]) -> Callable[[Ledger], None]:
    def clear(self: Ledger) -> None:
        paid, due = dict(self.paid), dict(self.flights.due)
        original(self)
        self.paid, self.flights.due = paid, due

    return clear


def keeps_weight(original: Callable[[Ledger], None]) -> Callable[[Ledger], None]:
    def clear(self: Ledger) -> None:
        told = self.told
        original(self)
        self.told = told

    return clear


def taken_and_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient leaves, and stays as well."""

    def taken(self: Ledger, slot: Any) -> Any:
        gradient = self.local.get(slot)
        found = original(self, slot)
        if gradient is not None:
            self.local[slot] = gradient
        return found

    return taken


def never_pending(self: Ledger) -> bool:
    return False


def at_end_forgets(self: Ledger) -> None:
    """AT_END: what one backward kept is lost when the next one begins."""
    if self.state is not State.FAILED:
        self.local.clear()


def lands_over(self: Flights) -> None:
    """EAGER: what lands takes the place of what had landed."""
    bucket, flight = self._air.popleft()
    self.due.update(zip(bucket.slots, flight.wait(), strict=True))


def settles_again(original: Callable[..., None]) -> Callable[..., None]:
    def settle(self: Ledger, flush: bool) -> None:
        original(self, flush)
        for rows in self.paid.values():
            rows.mul_(2)

    return settle


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a failure leaves the step open": (Ledger, "fail", lambda f: after(f, stays_open)),
    "a failed step takes a further backward": (Ledger, "must_be", lambda f: lambda self, *states: None),
    "clear keeps gradients": (Ledger, "clear", keeps_some),
    "clear keeps reduced rows": (Ledger, "clear", keeps_rows),
    "clear keeps the weight": (Ledger, "clear", keeps_weight),
    "a gradient that leaves stays as well": (Ledger, "_taken", taken_and_kept),
    "what has not left is forgotten at the step": (Ledger, "pending", lambda f: never_pending),
    "a backward that stays loses what stayed before": (Ledger, "begin", lambda f: before(f, at_end_forgets)),
    "what lands replaces what had landed": (Flights, "_land", lambda f: lands_over),
    "settled rows are doubled": (Ledger, "settle", settles_again),
    "zero_grad in a step goes unseen": (Ledger, "_refuse_cleared", lambda f: lambda self: None),
    "a rank that failed tells nobody": (totals, "refuse_failed", lambda f: lambda *args: None),
}


def outcome(name: str | None) -> str:
    """How the sequences end on this rank, alone: "" when they see nothing."""
    owner, attribute, change = MUTANTS[name] if name else (Leave, "__doc__", lambda f: f)
    original = getattr(owner, attribute)
    try:
        if name:
            setattr(owner, attribute, change(original))
        for seed in SEEDS:
            sequences.sequences(seed, 1)
            cleared_by_hand()
    except (AssertionError, IsogradError, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if name:
            setattr(owner, attribute, original)
    return ""


def cleared_by_hand() -> None:
    """zero_grad in the middle of a step."""
    steps = sequences.Steps(1)
    steps.backward()
    steps.backward()
    if steps.engine.ledger._withheld:
        steps.model.zero_grad()
        with pytest.raises(IsogradError, match="IG553"):
            steps.backward()


def test_without_a_mutant_the_sequences_pass(worlds) -> None:
    assert worlds(1).run(partial(outcome, None)) == [""]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_sequences_see_a_broken_ledger(worlds, name: str) -> None:
    (said,) = worlds(1).run(partial(outcome, name))
    assert said, f"{name}: survives"
