"""Steps of several terms broken on purpose, one scale at a time: each mutant ends in a wrong number or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from isograd.core.loss_terms import Terms
from isograd.core.mesh import DATA
from isograd.engine import Engine, LossScale, step_status, validation
from isograd.engine.step import StepState
from isograd.engine.term_weights import TermWeights
from isograd.errors import IsogradError

from ..pipeline import test_terms as stages
from . import several

Change = Callable[[Any], Any]


def weights(change: Callable[[TermWeights, dict[str, float]], dict[str, float]]) -> tuple[Any, str, Change]:
    """Of all ranks, which a term is divided by."""

    def wrapped(original: Any) -> Any:
        def agreed(self: TermWeights, *args: Any, **how: bool) -> TermWeights:
            found: TermWeights = original(self, *args, **how)
            found.weights = change(found, found.weights)
            return found

        return agreed

    return TermWeights, "agreed", wrapped


def own_weights(shares: TermWeights, found: dict[str, float]) -> dict[str, float]:
    assert shares.expected is not None
    mine = shares.expected[shares.mesh.rank].tolist()
    return {name: weight or 1.0 for name, weight in zip(found, mine, strict=True)}


def given(change: Callable[[str, Any], Any]) -> tuple[Any, str, Change]:
    """The terms of a backward are taken for others."""

    def wrapped(original: Any) -> Any:
        return lambda self, terms: original(self, Terms(**{name: change(name, term) for name, term in terms.items()}))

    return TermWeights, "seeds", wrapped


def seeds(change: Callable[[Any, Any], Any]) -> tuple[Any, str, Change]:
    """Roots are seeded with something else; losses and weights are counted as they are."""

    def wrapped(original: Any) -> Any:
        def seeded(self: TermWeights, terms: Terms) -> Any:
            roots, found, *rest = original(self, terms)
            by_root = {id(term.value): term for term in terms.values()}
            return roots, [change(s, by_root[id(r)]) for r, s in zip(roots, found, strict=True)], *rest

        return seeded

    return TermWeights, "seeds", wrapped


def kept(original: Any) -> Any:
    def next_step(self: TermWeights) -> TermWeights:
        found: TermWeights = original(self)
        found.expected = self.expected
        return found

    return next_step


MUTANTS: dict[str, tuple[Any, str, Change]] = {
    "a term is divided by this rank's weight": weights(own_weights),
    "a term is divided by the mean of the ranks' weights": weights(
        lambda shares, found: {name: weight / shares.mesh.size(DATA) for name, weight in found.items()}
    ),
    "a term is divided by twice its weight": weights(
        lambda shares, found: {name: weight * (1 + (name == "balance")) for name, weight in found.items()}
    ),
    "all terms are divided by the first one's weight": (TermWeights, "_share", lambda f: lambda self, name: 1.0),
    "a term has the share of the first one": (
        TermWeights, "_share", lambda f: lambda self, name: f(self, next(n for n, w in self.weights.items() if w))
    ),
    "a coefficient is left out": given(lambda name, t: (t.value, t.weight, float(t.coefficient != 0))),
    "a coefficient counts twice": given(lambda name, t: (t.value, t.weight, t.coefficient * abs(t.coefficient))),
    "a weight is counted and not in the seed": seeds(lambda seed, term: seed / max(float(term.weight), 1.0)),
    "a weight is in the seed twice": seeds(lambda seed, term: seed * float(term.weight)),
    "a seed is divided by the accumulation": seeds(lambda seed, term: seed / 2),
    "the loss scale is left out": (
        StepState,
        "_as_gradients",
        lambda f: lambda self, roots, found: [s.to(r.dtype) for r, s in zip(roots, found, strict=True)],
    ),
    "a weight of zero is not looked at": (validation, "adds_nothing", lambda f: lambda *given: False),
    "what was announced outlives its step": (TermWeights, "next_step", kept),
    "the stats are this rank's": (
        TermWeights, "means", lambda f: lambda self, columns: f(self, columns[:1])
    ),
    "weights that did not come go unseen": (TermWeights, "refuse_incomplete", lambda f: lambda self, columns: None),
}  # fmt: skip

OF_STAGES: dict[str, tuple[Any, str, Change]] = {
    "a stage's own terms are lost": (StepState, "seeds_of", lambda f: lambda self, t: [f(self, t), ([], [])][1]),
    "a stage's own terms count twice": (StepState, "seeds_of", lambda f: lambda self, t: [x * 2 for x in f(self, t)]),
    "only the last stage's terms are in the stats": (
        step_status, "with_own_things", lambda f: lambda mesh: list(mesh.layout.ranks(DATA, 1))
    ),
    "stages do not add up what came": (
        TermWeights,
        "refuse_incomplete",
        lambda f: lambda self, columns: [setattr(self, "_stages", self._stages[:, -1:]), f(self, columns)][1],
    ),
}  # fmt: skip


@contextmanager
def broken(table: dict[str, tuple[Any, str, Change]], name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    owner, attribute, change = table[name]
    with patch.object(owner, attribute, change(owner.__dict__[attribute])):
        yield


def outcome(name: str | None) -> str:
    """How two steps under dp2 with two micro-batches each end on this rank; "" when all is right."""
    with broken(MUTANTS, name):
        try:
            found = several.run("dp2 zero1", 4, loss_scale=LossScale(8.0))
            wrong = "; ".join(several.differences(found, several.one_device(4)))
            return wrong or too_few()
        except IsogradError as error:
            return str(error)


def too_few() -> str:
    """A micro-batch that was announced and does not come."""
    model = several.Several()
    mesh = several.Mesh("dp2 zero1")
    engine = Engine(model, mesh, several.toys.sgd)
    micros = several.micros_of(mesh, 0, 4)
    engine.begin(**several.announced(micros))
    engine.backward(model(*micros[0]))
    try:
        engine.step()
    except IsogradError as error:
        return "" if error.code == "IG563" else str(error)
    return "a step with a micro-batch too few was taken"


def outcome_of_stages(name: str | None) -> str:
    with broken(OF_STAGES, name):
        try:
            return "; ".join(stages.on_stages("pp2 zero1", own=True))
        except IsogradError as error:
            return str(error)


@pytest.mark.medium
def test_without_a_mutant_all_is_right(worlds) -> None:
    assert worlds(2).run(partial(outcome, None)) == ["", ""]
    assert worlds(2).run(partial(outcome_of_stages, None)) == ["", ""]


@pytest.mark.medium
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_scale_of_a_term_is_seen(worlds, name: str) -> None:
    assert any(worlds(2).run(partial(outcome, name))), f"{name}: survives"


@pytest.mark.medium
@pytest.mark.parametrize("name", OF_STAGES)
def test_a_broken_term_of_a_stage_is_seen(worlds, name: str) -> None:
    assert any(worlds(2).run(partial(outcome_of_stages, name))), f"{name}: survives"
