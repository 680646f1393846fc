"""What a step did, and what an evaluation found: the mean loss of all data ranks' batches, and that of each term."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isograd.core.loss_terms import Terms
from isograd.engine.nonfinite import NonFiniteReport
from isograd.engine.term_weights import Mean, mean_of, weighted

COLUMNS = 3  # of `columns`


@dataclass(frozen=True)
class Evaluation:
    """A loss without a step; equal on all ranks."""

    loss: float
    weight: float  # of several terms, the first one's that has any
    terms: Mapping[str, Mean] = field(default_factory=dict)  # of a model that returns several


@dataclass(frozen=True)
class Stats:
    """What one step did; equal on all ranks."""

    loss: float  # sum of weighted losses / global weight: the number that was optimized
    grad_norm: float  # of the mean gradient, before clipping
    weight: float  # global: all tokens (rows, ...) of the step; of several terms, the first one's that has any
    skipped: bool  # the norm was not finite: no rank stepped
    loss_scale: float
    terms: Mapping[str, Mean] = field(default_factory=dict)  # of a step of several; `loss` is their weighted sum
    nonfinite: NonFiniteReport | None = None  # where, in a step that was skipped


@dataclass(frozen=True)
class PendingStats:
    """Of a step that the host has not waited for."""

    wait: Callable[[], Stats]  # raises what is refused


def columns(results: Sequence[Any], device: torch.device) -> Tensor:
    """The weight and the weighted loss of this rank's results, and how many of them are Terms."""
    found = torch.zeros(COLUMNS, dtype=torch.float64, device=device)
    for result in results:
        if isinstance(result, Terms):
            found[2] += 1
            continue
        loss, weight = result
        count = torch.as_tensor(weight, dtype=torch.float64, device=device)
        found[:2] += torch.stack((count, weighted(loss.double(), count)))
    return found


def sums_of_terms(results: Iterable[Any]) -> dict[str, tuple[float, float, float]]:
    """{name: (weight, weighted value, the same times the coefficient)} of this rank's results that are Terms."""
    found: dict[str, tuple[float, float, float]] = {}
    for name, (value, weight, coefficient) in (pair for r in results if isinstance(r, Terms) for pair in r.items()):
        count = torch.as_tensor(weight, dtype=torch.float64, device=value.device)
        part = float(weighted(value.detach().double().reshape(()), count))
        before = found.get(name, (0.0, 0.0, 0.0))
        found[name] = before[0] + float(count), before[1] + part, before[2] + part * coefficient
    return found


def of_terms(notes: Iterable[Mapping[str, Sequence[float]]]) -> Evaluation:
    """notes: `sums_of_terms` of all ranks with data or stages of their own."""
    sums: dict[str, list[float]] = {}
    for note in notes:
        for name, numbers in note.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 3), numbers, strict=True)]
    means = {name: mean_of(*numbers) for name, numbers in sums.items()}
    there = [term for term in means.values() if term.weight > 0]
    return Evaluation(sum(t.part for t in there) if there else math.nan, there[0].weight if there else 0.0, means)


def merge(found: Sequence[Evaluation]) -> Evaluation:
    """Several evaluations as one."""
    found = [one for one in found if one.weight]
    if any(one.terms for one in found):
        weighed = [{n: (t.weight, t.mean * t.weight, t.part * t.weight) for n, t in e.terms.items()} for e in found]
        return of_terms([{n: numbers for n, numbers in each.items() if numbers[0]} for each in weighed])
    weight = sum(one.weight for one in found)
    return Evaluation(sum(one.loss * one.weight for one in found) / weight if weight else math.nan, weight)
