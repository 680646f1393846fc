"""Documented bugs of the field (BUGS.md), planted one at a time: each is caught, with the right tensors named.

The defects are mutants of tests/parity/mutants.py where one fits, and small contexts here where none does.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import pytest
import torch

from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine

from ..engine import toys
from . import mutants
from .cases import Case, Trained
from .test_mutants import run_mutated

SP = Case("dp2 tp2 sp zero1", "gpt2", 3)
GQA = Case("tp4", "qwen", 1)

# bug -> (mutant, case, which gradients must be wrong in the first step: all others must be right)
PLANTED = {
    "norm-unreduced": ("debt forgotten: norm1", SP, ("norm1",)),
    "qknorm-unreduced": ("debt forgotten: q_norm", GQA, ("q_norm",)),
    "kv-replica-unreduced": ("debt forgotten: k.weight", GQA, ("k.weight",)),
    "mean-of-means": ("weight: mean of means", SP, ("",)),
    "accum-overwritten": ("accumulation: only the last micro-batch", SP, ("",)),
    "accum-rereduced": ("accumulation: earlier micro-batches reduced again", SP, ("",)),
    "accum-undivided": ("weight: loss divided by the accumulation", SP, ("",)),
    "gather-backward-sum": ("comm/ops.py:_scatter_sum:raw.reduce_scatter: doubled", SP, ("",)),
}


def step_zero_only(results: list[Trained], case: Case) -> set[str]:
    """Names of the gradients that are wrong in the first step."""
    lines = [w for w in case.wrong(results) if w.startswith("gradient of ") and " in step 0:" in w]
    return {line.removeprefix("gradient of ").split(" in step")[0] for line in lines}


@lru_cache
def wrong_without(world: Any, case: Case) -> list[str]:
    """What is wrong without any mutant: once for all bugs that are planted in a case."""
    return case.wrong(world.run(partial(run_mutated, None, case)))


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught_in_the_tensors_it_spoils(worlds, bug: str) -> None:
    mutant, case, parts = PLANTED[bug]
    assert not wrong_without(worlds(4), case)
    results = worlds(4).run(partial(run_mutated, mutant, case))
    names = set(results[0].gradients[0])
    spoiled = step_zero_only(results, case)
    if parts == ("",):
        assert len(spoiled) > 0.8 * len(names)
    else:
        assert spoiled == {n for n in names if any(part in n for part in parts)}


def test_norm_counts_replicas_makes_the_norm_too_large_and_clipping_wrong(worlds) -> None:
    results = worlds(4).run(partial(run_mutated, "norm: replicas counted on every tp rank", SP))
    truth = worlds(4).run(partial(run_mutated, None, SP))
    assert not step_zero_only(results, SP)  # gradients are right: only what is done with them is not
    assert results[0].norms[0] > truth[0].norms[0] * (1 + 1e-9)
    assert any(line.startswith("norm:") for line in SP.wrong(results))


def test_clip_per_rank_makes_replicas_drift(worlds) -> None:
    case = Case("dp2 tp2 zero0", "gpt2", 3)
    wrong = case.wrong(worlds(4).run(partial(run_mutated, "step: clip factor differs per rank", case)))
    assert any(line.startswith("replicas differ") for line in wrong)


def test_bias_n_times_changes_the_forward(worlds) -> None:
    case = Case("dp2 tp2 zero0", "gpt2", 3)
    results = worlds(4).run(partial(run_mutated, "layer: row bias added on every tp rank", case))
    assert not any(
        math.isclose(a, b, rel_tol=1e-9) for a, b in zip(results[0].losses[1:], truth_losses(case), strict=True)
    )


def truth_losses(case: Case) -> list[float]:
    from .cases import one_device

    return one_device(case.model, case.accumulation * 2).losses[1:]


def shared_module(planted: bool) -> tuple[list[str], float]:
    """A module used three times under reentrant recompute; planted: its gradient is sent after the first use only."""
    from isograd.engine.gathered import GatheredStep

    from ..engine.test_engine import Recomputed

    truth, found = {}, {}
    for target, reentrant in ((truth, None), (found, True)):
        with ExitStack() as stack:
            if planted and reentrant:
                stack.enter_context(mutants._patched(GatheredStep, "pending", lambda self: False))
            mesh, model = Mesh("dp2 zero1"), Recomputed(reentrant)
            engine = Engine(model, mesh, toys.sgd, bucket_mb=1e-5)
            x, y = toys.micro_batch(0, 2 * mesh.rank)
            engine.backward(torch.nn.functional.mse_loss(model(x.requires_grad_()), y), weight=len(x))
            target.update({n: g.clone() for n, g in engine.grads().items()})
    wrong = [n for n in truth if float((found[n] - truth[n]).norm()) > 1e-9 * float(truth[n].norm())]
    return wrong, float(truth["inner.weight"].norm())


def test_shared_module_reduced_after_its_first_use_loses_the_others(worlds) -> None:
    assert worlds(2).run(shared_module, False)[0][0] == []
    assert worlds(2).run(shared_module, True)[0][0] == ["inner.weight", "inner.bias"]


def planted_overflow(alone: bool) -> list[str]:
    """An Inf on rank 1. `alone`: each rank decides from the norm of its own rows."""
    from isograd.engine import norm

    def own_norm(rows: Any, world: Any, device: Any) -> float:
        return math.sqrt(sum(float(row.double().square().sum()) for row in rows))

    context = mutants._patched(norm, "global_norm", own_norm if alone else norm.global_norm)
    with context:
        mesh, model = Mesh("dp2 zero1"), toys.Toy()
        engine = Engine(model, mesh, toys.sgd)
        x, y = toys.micro_batch(0, 2)
        loss = toys.loss_of(model, x, y)
        if mesh.index(DATA) == 1:  # an Inf in one row of one weight, which one rank owns
            model.last.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([149]), torch.inf))
        engine.backward(loss, weight=len(x))
        skipped = engine.step().skipped
    return [str(skipped)] + [f"{n}:{p.detach().double().sum().item()!r}" for n, p in model.named_parameters()]


def test_overflow_alone_makes_replicas_differ_and_together_does_not(worlds) -> None:
    first, second = worlds(2).run(planted_overflow, False)
    assert first == second
    assert first[0] == "True"
    try:
        first, second = worlds(2).run(planted_overflow, True, timeout=20)
        assert first != second
    except Exception as error:
        # One rank gathers parameters while the other asks whose fault the skip was: both wait.
        assert "IG215" in str(error)
