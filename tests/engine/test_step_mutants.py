"""StepState broken on purpose, one policy or transition at a time: the random sequences of test_step.py see each.

A mutant is killed by a wrong number, a state that is not what it should be, or a refusal with its code. A hang or a
crash would fail the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from isograd.engine import step_status
from isograd.engine.gathered import GatheredStep, State
from isograd.engine.reducer import Reducer
from isograd.engine.step import ReduceWhen, StepState
from isograd.errors import IsogradError

from . import test_step as sequences

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


def stays_open(self: StepState) -> None:
    if self.state is State.FAILED:
        self.now = replace(self.now, phase=replace(self.now.phase, state=State.OPEN, failure=None))


def keeps_some(original: Callable[[StepState], None]) -> Callable[[StepState], None]:
    def abandon(self: StepState) -> None:
        local = dict(self.now.local)
        original(self)
        self.now.local.update(local)

    return abandon


def keeps_rows(original: Callable[[StepState], None]) -> Callable[[StepState], None]:
    def clear(self: StepState) -> None:
        final_shards, reduced = dict(self.now.final_shards), dict(self.reducer.reduced)
        original(self)
        self.now.final_shards.update(final_shards)
        self.reducer.reduced.update(reduced)

    return clear


def keeps_weight(original: Callable[[StepState], None]) -> Callable[[StepState], None]:
    def clear(self: StepState) -> None:
        before = self.now
        original(self)
        self.now = replace(self.now, weight=before.weight, losses=before.losses)

    return clear


def taken_and_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient leaves, and stays as well."""

    def taken(self: StepState, slot: Any) -> Any:
        gradient = self.now.local.get(slot)
        found = original(self, slot)
        if gradient is not None:
            self.now.local[slot] = gradient
        return found

    return taken


def never_pending(self: GatheredStep) -> bool:
    return False


def at_end_forgets(self: StepState) -> None:
    """STEP: what one backward kept is lost when the next one begins."""
    if self.state is not State.FAILED:
        self.now.local.clear()


def replaces(self: Reducer, bucket: Any, rows: Any) -> None:
    """A further reduction of a bucket takes the place of the one before."""
    self.reduced.update(zip(bucket.slots, rows, strict=True))


def settles_again(original: Callable[..., None]) -> Callable[..., None]:
    def finish(self: StepState, flush: bool) -> None:
        original(self, flush)
        for rows in self.now.final_shards.values():
            rows.mul_(2)

    return finish


MUTANTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a failure leaves the step open": (StepState, "fail", lambda f: after(f, stays_open)),
    "a failed step takes a further backward": (StepState, "must_be", lambda f: lambda self, *states: None),
    "a step that is dropped keeps gradients": (StepState, "abandon", keeps_some),
    "clear keeps reduced rows": (StepState, "clear", keeps_rows),
    "clear keeps the weight": (StepState, "clear", keeps_weight),
    "a gradient that leaves stays as well": (StepState, "_pop", taken_and_kept),
    "what has not left is forgotten at the step": (GatheredStep, "pending", lambda f: never_pending),
    "a backward that stays loses what stayed before": (StepState, "begin", lambda f: before(f, at_end_forgets)),
    "a further reduction replaces the one before": (Reducer, "_add", lambda f: replaces),
    "finished rows are doubled": (StepState, "finish_reductions", settles_again),
    "zero_grad in a step goes unseen": (StepState, "problem_in_grads", lambda f: lambda self: None),
    "a rank that failed tells nobody": (step_status, "refuse_failed", lambda f: lambda *args: None),
}


def outcome(name: str | None) -> str:
    """How the sequences end on this rank, alone: "" when they see nothing."""
    owner, attribute, change = MUTANTS[name] if name else (ReduceWhen, "__doc__", lambda f: f)
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
    if steps.engine.step_state.now.used:
        steps.model.zero_grad()
        with pytest.raises(IsogradError, match="IG553"):
            steps.backward()


def test_without_a_mutant_the_sequences_pass(worlds) -> None:
    assert worlds(1).run(partial(outcome, None)) == [""]


@pytest.mark.medium
@pytest.mark.parametrize("name", MUTANTS)
def test_the_sequences_see_a_broken_step(worlds, name: str) -> None:
    (said,) = worlds(1).run(partial(outcome, name))
    assert said, f"{name}: survives"
