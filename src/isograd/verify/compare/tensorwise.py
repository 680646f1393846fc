"""One parameter compared with the reference's on every rank that holds a part of it: whole, block by block, by sketch.

Which error is rounding and which is a bug depends on the precision (LIMITS), or on measured noise when there is some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from isograd.verify import tolerances
from isograd.verify.compare.numerics import Noise
from isograd.verify.compare.numerics import verdict as judged
from isograd.verify.compare.placement import Place
from isograd.verify.judge.analysis import Analysis
from isograd.verify.record.recording import Recording
from isograd.verify.record.sketch import dtype_name
from isograd.verify.tell.findings import BUG, INCONCLUSIVE, PASS, Finding
from isograd.verify.tell.wording import finding


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
    analysis: Analysis, name: str, truth: Tensor, places: dict[int, Place], whole: float, noise: Noise | None
) -> Tensorwise:
    """One parameter's gradient on each rank that holds it, beside the reference's; `noise` judges where there is
    one."""
    errors: dict[int, float] = {}
    ratios: list[float] = []
    kinds = set()
    for rank in analysis.holders(name):
        if rank not in places:
            continue
        expected = places[rank].of(truth)
        final = analysis.recording.ranks[rank].tensors(analysis.step).get(f"final/{name}")
        kinds.add(analysis.about[rank][name].gradient_dtype or analysis.about[rank][name].dtype)
        if final is None:
            errors[rank] = 1.0 if float(expected.double().norm()) > tolerances.NOTHING * whole else 0.0
            continue
        if final.shape != expected.shape and final.numel() == truth.numel():
            expected = truth  # an engine gave the whole gradient to every rank
        errors[rank] = block_error(final, expected, whole)
        if noise is not None and name in noise.mean:
            part = places[rank].of if final.shape == places[rank].of(truth).shape else (lambda t: t)
            ratios.append(noise.ratio(name, final, part, whole))
    if ratios and all(map(math.isfinite, errors.values())):
        return Tensorwise(name, places, errors, judged(max(ratios)))
    kinds.add(dtype_name(truth))
    return Tensorwise(name, places, errors, _by_limits(errors, kinds))


def _by_limits(errors: dict[int, float], kinds: Iterable[str]) -> str:
    """The verdict on relative errors of tensors that were held in these dtypes: the widest limits among them."""
    limits = [tolerances.LIMITS.get(kind, tolerances.LIMITS["float32"]) for kind in kinds]
    low, high = max(low for low, _ in limits), max(high for _, high in limits)
    worst = max((math.inf if math.isnan(e) else e for e in errors.values()), default=math.inf)
    return PASS if worst <= low else BUG if worst > high else INCONCLUSIVE


def unrecorded(analysis: Analysis, reference: Recording, name: str, theirs: str) -> bool:
    """Whether a gradient that was there is in neither or only one recording: more than the limit for full tensors."""
    held = [r for r in analysis.holders(name) if analysis.about[r][name].gradient]
    missing = any(f"final/{name}" not in analysis.recording.ranks[r].tensors(analysis.step) for r in held)
    tensors = reference.ranks[0].tensors(analysis.step)
    return missing or (f"sum/{theirs}" in tensors and f"final/{theirs}" not in tensors)


def compare_sketch(
    analysis: Analysis, reference: Recording, name: str, theirs: str, places: dict[int, Place]
) -> Tensorwise | None:
    """Compared by its sketch alone, as whole tensors and covers can be: 256 sums over all elements instead of each."""
    truth = reference.ranks[0].tensors(analysis.step).get(f"sum/{theirs}")
    cut = any(spot.partial for spot in places.values()) and not analysis.covered(name)
    if truth is None or reference.world > 1 or cut:
        return None
    size = max(float(truth.norm()), 1e-300)
    errors = {r: float((seen.sketch - truth).norm()) / size for seen in analysis.observed(name) for r in seen.ranks}
    return Tensorwise(name, places, errors, _by_limits(errors, [analysis.info(name).gradient_dtype]))


def block_error(found: Tensor, expected: Tensor, whole: float) -> float:
    """The worst relative error over the tensor and its blocks; NaN when there is one."""
    worst = 0.0
    for mine, theirs in zip(blocks(found.double()), blocks(expected.double()), strict=True):
        size = max(float(theirs.norm()), tolerances.FLOORS.get(dtype_name(found), tolerances.FLOOR) * whole, 1e-300)
        error = float((mine - theirs).norm()) / size
        if math.isnan(error):
            return error
        worst = max(worst, error)
    return worst


def common_factor(
    analysis: Analysis, noise: Noise, names: dict[str, str], places: dict[str, dict[int, Place]]
) -> list[Finding]:
    """All tensors together show a factor that drowns in each one's rounding (one percent in bf16, say)."""
    along = squares = 0.0
    for name, theirs in names.items():
        for rank, spot in places[name].items():
            final = analysis.recording.ranks[rank].tensors(analysis.step).get(f"final/{name}")
            if final is not None and theirs in noise.mean:
                expected = spot.of(noise.mean[theirs])
                along += float((final.double() * expected).sum())
                squares += float(expected.square().sum())
    factor = along / squares if squares else 1.0
    verdict = judged(abs(factor - 1) / noise.factor, tolerances.ALL_TOGETHER)
    if verdict == PASS:
        return []
    sentence = f"all gradients together are {factor:.8g} times the reference's; rounding leaves {noise.factor:.1e}"
    bars = (("reference", 1.0), ("here", factor))
    return [finding(verdict, "", sentence, tensors=tuple(names), coefficients=bars)]


def limit_of(analysis: Analysis) -> float:
    """Up to which relative error tensors of this run's dtype are equal."""
    kinds = {i.dtype for i in analysis.about[0].values()} & tolerances.LIMITS.keys()
    return max((tolerances.LIMITS[kind][0] for kind in kinds), default=tolerances.LIMITS["float64"][0])
