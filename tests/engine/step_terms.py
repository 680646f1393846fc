"""Random steps of several terms, for the random sequences of test_step.py: right by the definition, or refused."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.comm import raw
from isograd.core.loss_terms import Terms
from isograd.core.mesh import DATA
from isograd.engine import naive
from isograd.errors import EngineError

SHARES = {"a": 1.0, "b": -0.3, "c": 2.0}  # coefficients
ENDINGS = ["steps"] * 4 + ["fails", "discards", "announces more"]


def step_of_terms(steps: Any, draw: random.Random) -> None:
    """One step between two others. `draw` draws the same on all ranks."""
    steps.step()
    engine, mine = steps.engine, steps.mine
    ranks, count = range(steps.mesh.size(DATA)), draw.randrange(1, 4)
    kinds = ([0, 1, 3], [0, 0.5, 2], [0, 1])
    drawn = [[[float(draw.choice(kind)) for kind in kinds] for _ in ranks] for _ in range(count)]
    ending, who = draw.choice(ENDINGS), draw.choice(ranks)
    announced = {name: sum(each[mine][i] for each in drawn) for i, name in enumerate(SHARES)}
    announced["b"] += ending == "announces more" and who == mine
    engine.begin(**announced)
    parts: dict[str, list[tuple[Tensor, float]]] = {name: [] for name in SHARES}
    for each in drawn:
        weights = dict(zip(SHARES, each[mine], strict=True))
        branches, seed = [i for i in range(steps.model.BRANCHES) if draw.random() < 0.7], draw.randrange(10**6) + mine
        ours, theirs = (values(model, weights, branches, seed) for model in (steps.model, steps.twin))
        with engine.no_sync() if draw.random() < 0.4 else nullcontext():
            engine.backward(Terms(**{name: (value, weights[name], SHARES[name]) for name, value in ours.items()}))
        for name, value in theirs.items():
            parts[name].append((value, weights[name]))
    if ending == "steps":
        check(steps, parts)
    elif ending == "discards" and who == mine:
        engine.discard()
    else:
        if ending == "fails" and who == mine:
            engine.step_state.fail("a loader's error, say")
        code = {"fails": "IG550", "discards": "IG558", "announces more": "IG563"}[ending]
        with pytest.raises(EngineError, match=code):
            engine.step()
        if ending == "discards":  # else the next `discard` here, in a step that is empty still, would be for this one
            engine.discard()
    assert engine.step_state.empty
    steps.copy_to_twin()


def values(model: Any, weights: dict[str, float], branches: list[int], seed: int) -> dict[str, Tensor]:
    """`a` is NaN over no row where that is allowed, and `c` may be absent then."""
    rows = int(weights["a"])
    x = torch.randn(rows + 2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out = model(x, branches)
    lax = model.nan_over_none and not model.at_zero_3  # else other ranks need the backward of each term
    first = out[:rows].mean() if rows or lax else out[:rows].sum()
    found = {"a": first, "b": out[rows:].abs().mean(), "c": out.sum()}
    return {name: value for name, value in found.items() if weights[name] or name != "c" or not lax}


def check(steps: Any, parts: dict[str, list[tuple[Tensor, float]]]) -> None:
    """Gradients, the loss and the stats of each term by the definition."""
    sums = [[sum(float(v.detach()) * w for v, w in part if w), sum(w for _, w in part)] for part in parts.values()]
    everyone = sum(raw.gather_list(torch.tensor(sums, dtype=torch.float64), steps.mesh.group(DATA)))
    assert isinstance(everyone, Tensor)
    if not float(everyone[:, 1].sum()) > 0:
        with pytest.raises(EngineError, match="IG512"):
            steps.engine.step()
        return
    terms = [(share, parts[name]) for name, share in SHARES.items()]
    truth = naive.gradients_of_terms(dict(steps.twin.named_parameters()), terms, steps.mesh)
    steps.compare(truth)
    stats, loss = steps.engine.step(), 0.0
    for (name, share), (value, weight) in zip(SHARES.items(), everyone.tolist(), strict=True):
        seen = stats.terms[name]
        assert seen.weight == weight and (abs(seen.mean - value / weight) < 1e-11 if weight else math.isnan(seen.mean))
        part = share * value / weight if weight else 0.0
        assert abs(seen.part - part) < 1e-11
        loss += part
    assert abs(stats.loss - loss) < 1e-11
