"""One parameter compared with the reference's on every rank that holds a part of it: whole, and block by block.

Which error is rounding and which is a bug depends on the precision (LIMITS), or on measured noise when there is some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.compare.numerics import Noise
from isograd_verify.compare.numerics import verdict as judged
from isograd_verify.compare.values import Place, Value, norm, projected, sides
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.sketch import COUNT, dtype_name
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS, Finding


@dataclass(frozen=True)
class Distance:
    """How far two tensors are from each other, relative to the second: of sketches an estimate, and its bounds."""

    error: float
    least: float
    most: float


@dataclass
class Tensorwise:
    """One parameter, compared on each rank that holds it."""

    name: str
    places: dict[int, Place]
    errors: dict[int, float]  # rank -> worst over blocks
    verdict: str


def blocks(t: Tensor) -> list[Tensor]:
    """A tensor and its parts: heads, experts and shard borders lie on some of these cuts."""
    if t.dim() == 0 or t.numel() < 16:
        return [t]
    return [t, *t.tensor_split(8, 0), *(t.tensor_split(8, 1) if t.dim() > 1 else ())]


def compare_tensor(
    analysis: Analysis, name: str, truth: Value, places: dict[int, Place], whole: float, noise: Noise | None
) -> Tensorwise | None:
    """One parameter on each rank that holds it, beside the reference's; None: a gradient was not recorded."""
    errors: dict[int, float] = {}
    ratios: list[float] = []
    kinds = set()
    least, most = 0.0, 0.0 if analysis.holders(name) else math.inf
    for rank in analysis.holders(name):
        if rank not in places or rank in analysis.owners_step.get(name, ()):
            continue
        dtype = analysis.about[rank][name].gradient_dtype or analysis.about[rank][name].dtype
        kinds.add(dtype)
        final, expected = sides(analysis, rank, "final", name, truth, places[rank])
        if expected is None or (final is None and analysis.about[rank][name].gradient):
            return None
        if final is None:
            errors[rank] = 1.0 if norm(expected) > tolerances.NOTHING * whole else 0.0
            least, most = max(least, errors[rank]), max(most, errors[rank])
            continue
        apart = block_error(final, expected, whole, dtype)
        errors[rank] = apart.error
        least, most = _largest([least, apart.least]), _largest([most, apart.most])
        if noise is not None and name in noise.mean and isinstance(final, Tensor):
            part = places[rank].of if final.shape == places[rank].of(truth).shape else (lambda t: t)
            ratios.append(noise.ratio(name, final, part, whole))
    if ratios and all(map(math.isfinite, errors.values())):
        return Tensorwise(name, places, errors, judged(max(ratios)))
    if isinstance(truth, Tensor):
        kinds.add(dtype_name(truth))
    limits = [tolerances.LIMITS.get(kind, tolerances.LIMITS["float32"]) for kind in kinds]  # the widest count
    low, high = max(low for low, _ in limits), max(high for _, high in limits)
    verdict = PASS if most <= low else BUG if not least <= high else INCONCLUSIVE
    return Tensorwise(name, places, errors, verdict)


def block_error(found: Value, expected: Value, whole: float, dtype: str = "") -> Distance:
    """The worst relative error over the tensor and its blocks; NaN when there is one. `dtype`: of what was found."""
    dtype = dtype_name(found) if isinstance(found, Tensor) else dtype
    floor = tolerances.FLOORS.get(dtype, tolerances.FLOOR) * whole
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        pairs = zip(blocks(found.double()), blocks(expected.double()), strict=True)
        error = _largest([_relative_error(mine, theirs, floor) for mine, theirs in pairs])
        return Distance(error, error, error)
    ours, theirs = projected(found), projected(expected)
    errors, doubts = [0.0], [1.0]
    for d in ours.along.keys() & theirs.along.keys():
        pieces = min(8, ours.along[d].numel() // tolerances.ESTIMATE_LEAST)
        cut = [(one.along[d], *(one.along[d].tensor_split(pieces, 1) if pieces > 1 else ())) for one in (ours, theirs)]
        errors += [_relative_error(mine, reference, floor * COUNT**0.5) for mine, reference in zip(*cut, strict=True)]
        doubts += [1 + tolerances.ESTIMATE * max(sums.numel(), 1) ** -0.5 for sums in cut[0]]
    bounds = zip(errors, doubts, strict=True)
    least, most = zip(*((e / doubt, e * doubt) for e, doubt in bounds), strict=True)
    return Distance(_largest(errors), _largest(least), _largest(most))


def _relative_error(mine: Tensor, theirs: Tensor, floor: float) -> float:
    return float((mine - theirs).norm()) / max(float(theirs.norm()), floor, 1e-300)


def _largest(errors: Iterable[float]) -> float:
    errors = list(errors)
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def common_factor(
    analysis: Analysis, noise: Noise, names: dict[str, str], places: dict[str, dict[int, Place]]
) -> list[Finding]:
    """All tensors together show a factor that drowns in each one's rounding (one percent in bf16, say)."""
    along = squares = 0.0
    for name, theirs in names.items():
        for rank, spot in places[name].items():
            final = analysis.recording.ranks[rank].tensors(analysis.step).get(f"final/{name}")
            if final is not None and theirs in noise.mean:  # by sketches: each tensor is judged by itself
                expected = spot.of(noise.mean[theirs])
                along += float((final.double() * expected).sum())
                squares += float(expected.square().sum())
    factor = along / squares if squares else 1.0
    verdict = judged(abs(factor - 1) / noise.factor, tolerances.ALL_TOGETHER)
    if verdict == PASS:
        return []
    sentence = f"all gradients together are {factor:.8g} times the reference's; rounding leaves {noise.factor:.1e}"
    bars = (("reference", 1.0), ("here", factor))
    return [Finding(verdict, "", sentence, tensors=tuple(names), coefficients=bars)]


def cancels(analysis: Analysis, reference: Analysis, name: str, theirs: str, fed: list[tuple[int, int, float]]) -> bool:
    """Whether a gradient is what rounding leaves of terms that cancel: small in both, and no farther from the other
    than the two runs' backwards are on the same rows. `fed`: rank, micro-batch and factor of those."""
    seen, truth = analysis.observed(name), reference.sums[0].get(theirs)
    if truth is None or not seen:
        return False
    eps = max(torch.finfo(getattr(torch, analysis.about[r][name].dtype)).eps for r in analysis.holders(name))
    parts, again = analysis.contributions(name, seen[0].own), reference.parts[theirs]
    doubt = 0.0 if fed else sum(4 * eps * float(mine.norm()) for mine in parts.values())
    for number, (rank, micro, factor) in enumerate(fed):
        mine, other = parts.get((rank, micro)), again.get((0, number))
        if mine is not None and other is not None:
            doubt += float((factor * mine - other).norm()) + 4 * eps * float(other.norm())
    largest = tolerances.CANCELLED * eps * reference.largest
    small = all(float(t.norm()) <= largest for t in (truth, *(one.sketch for one in seen)))
    return small and all(float((one.sketch - truth).norm()) <= 2 * doubt for one in seen)


def limit_of(analysis: Analysis) -> float:
    """Up to which relative error tensors of this run's dtype are equal."""
    kinds = {i.dtype for i in analysis.about[0].values()} & tolerances.LIMITS.keys()
    return max((tolerances.LIMITS[kind][0] for kind in kinds), default=tolerances.LIMITS["float64"][0])
