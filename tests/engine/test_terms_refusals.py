"""What a step of several terms refuses, each with its code; after a refusal the next step starts from nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.comm import world
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine import DataParallel, Engine
from isograd.errors import EngineError, IsogradError

from . import several, toys

NOTHING: dict[str, float] = {}


def refusal(run: Callable[[], object]) -> str:
    """The error in words; "" when there is none."""
    try:
        run()
    except IsogradError as error:
        return str(error)
    return ""


def value(engine: Engine) -> Tensor:
    return engine.model.gain * 2.0  # type: ignore[no-any-return, operator]


def new_engine(zero: int = 1, **options: Any) -> Engine:
    model = toys.Toy()
    return Engine(model, Mesh(f"dp{world.world()[1]} zero{zero}"), toys.sgd, **options)


@pytest.mark.parametrize(
    "given",
    [(1.0,), (1.0, 2, 0.1, 4), (1.0, 2, "0.1"), (1.0, 2, torch.nan), torch.ones(())],
    ids=["one", "four", "text", "NaN", "no tuple"],
)
def test_a_term_has_a_value_a_weight_and_perhaps_a_coefficient(given: Any) -> None:
    with pytest.raises(EngineError, match=r"IG560.*'lm'"):
        Terms(lm=given)


def test_terms_are_a_mapping_of_triples() -> None:
    terms = Terms(lm=(torch.ones(()), 3), balance=[torch.zeros(()), 2, 0.01])
    assert list(terms) == ["lm", "balance"]
    assert terms["lm"].coefficient == 1.0
    assert terms["balance"].weight == 2
    assert "balance" in repr(terms)


def wrong_terms() -> list[str]:
    """Each is refused before its backward begins, so that the step that was begun can still be finished."""
    engine = new_engine()
    engine.begin(lm=1, balance=2)
    one = value(engine)
    given = {
        "IG562: the term 'balence' was not announced for this step (did you mean 'balance'?)": {"balence": (one, 1)},
        "IG514: the value of the term 'lm'": {"lm": (one.expand(2), 1)},
        "IG514: the value of the term 'balance'": {"balance": (1.0, 1)},
        "IG515: the weight of the term 'lm'": {"lm": (one, -1)},
        "IG515: the weight of the term 'balance'": {"balance": (one, float("nan"))},
        "IG513: the term 'balance'": {"balance": (one.detach(), 1)},
        "IG567: the value of the term 'balance'": {"lm": (one, 1), "balance": (one.bfloat16(), 1)},
    }
    wrong = [
        f"{words}: {said}"
        for words, terms in given.items()
        if not (said := refusal(lambda t=terms: engine.backward(Terms(**t)))).startswith(words)
    ]
    engine.backward(Terms(lm=(one, 1), balance=(value(engine), 2, 0.5)))
    found = dict(engine.grads().items())["gain"]
    assert abs(float(found) - 3.0) < 1e-12
    assert not engine.step().skipped
    return wrong


def test_wrong_terms_are_refused_by_name_and_leave_nothing_behind(worlds) -> None:
    assert worlds(1).run(wrong_terms) == [[]]


def refused_together(zero: int) -> list[list[str]]:
    """For each mistake of rank 1 alone, what this rank was told; then a step without one."""
    rank, _ = world.world()
    engine = new_engine(zero, overlap=False)
    told = []

    def step(weights: dict[str, Any], brings: dict[str, Any]) -> None:
        engine.begin(**weights)
        engine.backward(Terms(**{name: (value(engine), weight) for name, weight in brings.items()}))
        engine.step()

    good = {"lm": 2, "balance": 3}
    mistakes: list[Callable[[], object]] = [
        lambda: step({"lm": 2, "balence": 3} if rank else good, good),
        lambda: step({"lm": -2, "balance": 3} if rank else good, good),
        lambda: step({"lm": "two", "balance": 3} if rank else good, good),
        lambda: step(good, {"lm": 1, "balance": 3} if rank else good),
        lambda: step(good, {"lm": 2} if rank else good),
        lambda: engine.step() if rank else step(good, good),
        lambda: plain_first(engine, good) if rank else step(good, good),
        lambda: begun_twice(engine, good),
        lambda: mixed(engine, good),
        lambda: second_backward(engine),
    ]
    for mistake in mistakes:
        told.append(refusal(mistake))
        if not engine.step_state.empty:  # told before the other ranks were
            engine.discard()
        assert engine.step_state.empty
    step(good, good)
    return told


def plain_first(engine: Engine, weights: dict[str, Any]) -> None:
    engine.backward(value(engine), weight=1)
    engine.begin(**weights)


def begun_twice(engine: Engine, weights: dict[str, Any]) -> None:
    engine.begin(**weights)
    engine.begin(**weights)


def mixed(engine: Engine, weights: dict[str, Any]) -> None:
    engine.begin(**weights)
    engine.backward(value(engine), weight=2)


def second_backward(engine: Engine) -> None:
    engine.backward(Terms(lm=(value(engine), 2)))
    engine.backward(Terms(lm=(value(engine), 2)))


CODES = [
    ("IG561", "IG561"),
    ("IG550", "IG515"),
    ("IG550", "IG515"),
    ("IG563", "IG563"),
    ("IG563", "IG563"),
    ("IG566", "IG566"),
    ("IG550", "IG565"),
    ("IG566", "IG566"),
    ("IG565", "IG565"),
    ("IG564", "IG564"),
]


@pytest.mark.medium
@pytest.mark.parametrize("zero", [1, 3])
def test_what_one_rank_does_wrong_is_refused_on_all(worlds, zero: int) -> None:
    told = worlds(2).run(partial(refused_together, zero))
    codes = CODES if zero < 3 else [*CODES[:6], ("IG572", "IG572"), *CODES[7:]]  # a backward meets another rank's begin
    assert [tuple(words[:5] for words in pair) for pair in zip(*told, strict=True)] == codes
    first = told[0]
    assert "ranks [0]: balance, lm; ranks [1]: balence, lm" in first[0]
    assert "rank 1: EngineError: IG515" in first[1] or "rank 1: IG515" in first[1]
    assert "rank 1: 1 of 'lm', 2 announced" in first[3]
    assert "rank 1: 0 of 'balance', 3 announced" in first[4]
    assert "on ranks [0]" in first[5]


def failures() -> list[str]:
    """A rank fails or discards where the others begin; then all go on."""
    rank, ranks = world.world()
    model = several.Several()
    engine = Engine(model, Mesh(f"dp{ranks} zero1"), toys.sgd, clip=0.5)
    micros = several.micros_of(engine.mesh, 0, 2 * ranks)
    told = []
    if rank:  # in the first forward of train_step, before the weights are known
        told.append(refusal(lambda: engine.train_step(micros)))
    else:
        hook = model.toy.out.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.train_step(micros)
        hook.remove()
        told.append("IG550")
    with toys.Failing(model.toy, 3):  # in a backward, on all ranks
        with pytest.raises(ZeroDivisionError):
            engine.train_step(micros)
        told.append("")
    told.append("" if rank == 0 and engine.discard() is None else refusal(lambda: engine.begin(lm=1)) if rank else "")
    engine.accumulate(micros)
    engine.discard()
    truth = several.one_device(2 * ranks, steps=1)
    engine.accumulate(micros)
    found = dict(engine.grads().items())
    for name, expected in truth.gradients[0].items():
        assert float((found[name] - expected).norm()) <= 1e-9 * float(expected.norm()), name
    stats = engine.step()
    assert abs(stats.loss - truth.losses[0]) < 1e-12
    return told


def test_a_rank_that_fails_or_discards_meets_those_that_begin(worlds) -> None:
    told = worlds(2).run(failures, timeout=60)
    assert [words[:5] for words in told[0]] == ["IG550", "", ""]
    assert [words[:5] for words in told[1]] == ["IG550", "", "IG558"]
    assert "ZeroDivisionError" in told[1][0]


def other_batches(layout: str) -> str:
    engine = new_engine_of(layout)
    return refusal(lambda: engine.begin(lm=1 + world.world()[0]))


def new_engine_of(layout: str) -> Engine:
    from isograd.models import Transformer, TransformerConfig

    mesh = Mesh(layout)
    config = TransformerConfig(vocab=11, hidden=8, layers=2, heads=2, head_dim=4, mlp=8)
    return Engine(Transformer(config, mesh, dtype=torch.float64), mesh, toys.sgd)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_ranks_that_hold_one_batch_announce_the_same(worlds, layout: str) -> None:
    said = worlds(2).run(partial(other_batches, layout))
    assert all(words.startswith("IG516") and layout[:2] in words for words in said)


def test_data_parallel_refuses_terms(worlds) -> None:
    (said,) = worlds(1).run(weighed_terms)
    assert said.startswith("IG568") and "ig.Engine" in said


def weighed_terms() -> str:
    model = DataParallel(toys.Toy())
    loss = model(torch.ones(2, 13).double()).mean()
    return refusal(lambda: model.weigh(Terms(lm=(loss, 2)), 2))  # type: ignore[arg-type]
