"""A factor that many tensors share shows where one tensor's drowns in rounding: one percent in half precision.

A kind of parameter that each layer has (`blocks.*.norm1.weight`) has as many factors (by which the reference's gradient
fits best) as there are layers. Their mean, over that of all other tensors, is held against its noise, the largest of
three: the standard error of the quotient; beside an exact reference (prove.py), the root mean square of the same
quotient in re-associated runs of one device, half of it from all kinds; a share of the format's eps.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.compare.numerics import verdict
from isograd_verify.compare.values import Place, Value, numbers, sides
from isograd_verify.judge.analysis import Analysis
from isograd_verify.tell.findings import PASS, Finding, kind

Fitted = dict[str, tuple[float, float]]  # by tensor: its factor, and what is left, relative to the gradient


@dataclass(frozen=True)
class Shift:
    """A kind of parameter, and the factor that its tensors have beside all others."""

    kind: str
    tensors: tuple[str, ...]
    factor: float
    noise: float
    verdict: str

    @property
    def ratio(self) -> float:
        """How many times its noise it is away from one."""
        return abs(self.factor - 1) / self.noise


def fitted(found: Iterable[Tensor], expected: Iterable[Tensor]) -> tuple[float, float]:
    """(the factor that fits best, what is left relative to the gradient) of the parts of one tensor."""
    pairs = [(f.double(), e.double()) for f, e in zip(found, expected, strict=True)]
    size = sum(float(e.square().sum()) for _, e in pairs)
    if not size:
        return 1.0, 1.0
    factor = sum(float((f * e).sum()) for f, e in pairs) / size
    left = sum(float((f - factor * e).square().sum()) for f, e in pairs)
    return factor, float((left / size) ** 0.5)


def fit_all(
    analysis: Analysis, expected: Mapping[str, Value], names: dict[str, str], places: dict[str, dict[int, Place]]
) -> tuple[Fitted, float]:
    """(each tensor's factor over all ranks that hold it, the largest eps of their formats)."""
    found: Fitted = {}
    eps = 0.0
    for name in names:
        mine, theirs = [], []
        for rank, spot in places[name].items():
            final, part = sides(analysis, rank, "final", name, expected[name], spot)
            if final is not None and part is not None and tuple(final.shape) == tuple(part.shape):
                ours, reference = numbers(final, part)
                mine.append(ours)
                theirs.append(reference)
                eps = max(eps, torch.finfo(getattr(torch, analysis.about[rank][name].gradient_dtype)).eps)
        if mine:
            found[name] = fitted(mine, theirs)
    return found, eps


def mean_of(runs: list[Fitted]) -> Fitted:
    """Factors averaged over runs, and the root mean square of what is left."""
    return {
        name: (
            statistics.fmean(run[name][0] for run in runs),
            statistics.fmean(run[name][1] ** 2 for run in runs) ** 0.5,
        )
        for name in runs[0]
    }


def large_kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Kinds with enough tensors to be judged together."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[kind(name)].append(name)
    return {k: found for k, found in kinds.items() if len(found) >= tolerances.KIND_LEAST}


def shifts(found: Fitted, eps: float, runs: tuple[dict[str, float], ...] = ()) -> list[Shift]:
    """Each large kind's shift. `runs`: the tensors' factors in re-associated runs; the reference is exact then."""
    usable = {name: one for name, one in found.items() if one[1] < tolerances.KIND_ERROR}
    left, told = large_kinds(usable), list[Shift]()
    while left:  # tensors of a kind that is off are none of the others for the kinds that are left
        gone = {name for one in told for name in one.tensors}
        judged = [_shift(k, left, [n for n in usable if n not in gone], usable, eps, runs) for k in left]
        worst = max(judged, key=lambda one: (one.verdict != PASS, abs(_mean(usable, one.tensors) - 1)))
        if worst.verdict == PASS:
            return [*told, *judged]
        told.append(worst)
        del left[worst.kind]
    return told


def _shift(
    of: str,
    kinds: dict[str, list[str]],
    names: list[str],
    found: Fitted,
    eps: float,
    runs: tuple[dict[str, float], ...],
) -> Shift:
    rest = {k: [n for n in names if n not in set(mine)] for k, mine in kinds.items()}
    factor = _quotient(found, kinds[of], rest[of])
    scatter = (_error(found, kinds[of]) ** 2 + _error(found, rest[of]) ** 2) ** 0.5
    if not runs:
        limits, noise = tolerances.KIND_PAIR, max(scatter, tolerances.KIND_PAIR_FLOOR * eps)
    else:
        seen = [{n: (run[n], found[n][1]) for n in names} for run in runs]
        squares = {k: statistics.fmean((_quotient(s, kinds[k], rest[k]) - 1) ** 2 for s in seen) for k in kinds}
        measured = ((squares[of] + statistics.fmean(squares.values())) / 2) ** 0.5
        noise = max(scatter, tolerances.KIND_AVERAGED * measured, tolerances.KIND_FLOOR * eps)
        limits = tolerances.KIND
    return Shift(of, tuple(kinds[of]), factor, noise, verdict(abs(factor - 1) / noise, limits))


def _quotient(found: Fitted, names: list[str], others: list[str]) -> float:
    return _mean(found, names) / (_mean(found, others) or 1.0) if others else _mean(found, names)


def _weight(one: tuple[float, float]) -> float:
    return 1 / (one[1] ** 2 + tolerances.KIND_LEAST_SQUARE)


def _mean(found: Fitted, names: Iterable[str]) -> float:
    """Of factors, each with a weight by what is left of its tensor."""
    chosen = [found[n] for n in names]
    return sum(_weight(one) * one[0] for one in chosen) / sum(map(_weight, chosen))


def _error(found: Fitted, names: list[str]) -> float:
    """The standard error of that mean, from the differences among the tensors."""
    if len(names) < 2:
        return 0.0
    middle = _mean(found, names)
    squares = sum((_weight(found[n]) * (found[n][0] - middle)) ** 2 for n in names)
    return float(squares**0.5 / sum(_weight(found[n]) for n in names))


def kind_findings(step: int, judged: list[Shift]) -> list[Finding]:
    """What is told of kinds that are off."""
    told = []
    for one in judged:
        if one.verdict != PASS:
            sentence = (
                f"step {step}: the {len(one.tensors)} tensors {one.kind} together are {one.factor:.5g} times what they "
                f"should be, beside all others; rounding leaves {one.noise:.1e}"
            )
            bars = (("reference", 1.0), ("here", one.factor))
            told.append(Finding(one.verdict, "", sentence, tensors=one.tensors, coefficients=bars))
    return told
