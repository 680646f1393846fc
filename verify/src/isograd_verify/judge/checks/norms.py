"""Checks of norm and clip: one norm on all ranks, which counts every element once, one factor, and no scaler's."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.patterns import class_of
from isograd_verify.record.events import Backward, Key, Norm, ScaledClip, micro_of
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding, listed
from isograd_verify.tell.wording import axis_over, spread


def norms(analysis: Analysis) -> Iterator[Finding]:
    """All ranks use one norm, it counts every element once, and they clip by one factor."""
    reported = {rank: event.value for rank, event in analysis.of(Norm)}  # earlier ones may be of a step left out
    bars = _bars(reported)
    names = analysis.learning
    omitted = _omits_experts(analysis, reported)
    if omitted:
        low, high = min(reported.values()), max(reported.values())
        sentence = (
            f"step {analysis.step}: the norm ({low:.6g}{f' to {high:.6g}' if high > low else ''}) {omitted}; each "
            f"element once gives {true_norm(analysis):.6g}"
        )
        sets = next(sets for name in analysis.names if len(sets := analysis.replica_sets(name)) > 1)
        axis = axis_over(analysis.recording, tuple(ranks[0] for ranks in sets))
        yield Finding(BUG, "norm-omits-experts", sentence, axis=axis, coefficients=bars)
        return
    if len(reported) > 1 and spread(reported.values()) > tolerances.NORM:
        low, high = min(reported.values()), max(reported.values())
        unequal = tuple(n for n in names if _copies_differ(analysis, n))
        if unequal:
            axis = axis_over(analysis.recording, tuple(reported))
            sentence = (
                f"step {analysis.step}: copies of the gradients of {listed(unequal)} differ between {axis} before the "
                f"clip, and the norm with them: {low:.6g} to {high:.6g}"
            )
            yield Finding(BUG, "replicas-differ", sentence, tensors=unequal, axis=axis, coefficients=bars)
            return
        yield _per_rank(analysis, f"the gradient norm differs between ranks: {low:.6g} to {high:.6g}", reported, names)
        return
    if reported:
        yield from _norm_is_true(analysis, next(iter(reported.values())), names)
    factors = {r: f for r in range(analysis.world) if (f := _one_factor(analysis, r)) is not None}
    if len(factors) > 1 and spread(factors.values()) > tolerances.FACTOR:
        low, high = min(factors.values()), max(factors.values())
        yield _per_rank(analysis, f"ranks clip by different factors: {low:.4g} to {high:.4g}", factors, names)


def _bars(values: dict[int, float]) -> tuple[tuple[str, float], ...]:
    return tuple((f"rank {rank}", value) for rank, value in values.items())


def _per_rank(analysis: Analysis, what: str, values: dict[int, float], names: tuple[str, ...]) -> Finding:
    unlike: list[int] = []  # the first rank with each value: along an axis whose ranks agree, nothing is wrong
    for rank, value in values.items():
        if all(spread((value, values[other])) > tolerances.NORM for other in unlike):
            unlike.append(rank)
    axis, sentence = axis_over(analysis.recording, tuple(unlike)), f"step {analysis.step}: {what}"
    return Finding(BUG, "clip-per-rank", sentence, tensors=names, axis=axis, coefficients=_bars(values))


def scaled_clips(analysis: Analysis) -> Iterator[Finding]:
    """Gradients are clipped when a gradient scaler has taken its factor from them."""
    one = next((clip for _, clip in analysis.of(ScaledClip)), None)
    if one is not None:
        sentence = (
            f"step {analysis.step}: gradients are clipped at {one.bound:g} while the gradient scaler's factor "
            f"{one.scale:g} is still in them: that bounds them at {one.bound / one.scale:.3g}"
        )
        bars = (("what the program says", 1.0), ("what it does", 1 / one.scale))
        yield Finding(BUG, "clip-scaled", sentence, tensors=analysis.learning, coefficients=bars, site=one.site)


def scaled_apart(analysis: Analysis) -> Iterator[Finding]:
    """What backwards add to a gradient has a gradient scaler's factor in all of them, or in none."""
    for record in analysis.recording.ranks:
        told = {e.micro: e for e in record.of(Backward, analysis.step) if e.scaled}
        kinds = {
            n: {e.scaled: e.site for r, m in parts if r == record.rank and (e := told.get(micro_of(m)))}
            for n, parts in analysis.parts.items()
        }
        names = tuple(n for n, sites in kinds.items() if len(sites) > 1)
        if names:
            sites = kinds[names[0]]
            sentence = (
                f"step {analysis.step}: a gradient scaler has multiplied the loss of the backward at {sites[1]}, and "
                f"not that at {sites[-1]}, and both add to {listed(names)}: unless the program multiplies it by hand, "
                "the second counts less"
            )
            yield Finding(INCONCLUSIVE, "", sentence, names, "micro-batches", look="scaler.scale around every loss")
            return


def clipped_apart(analysis: Analysis, found: dict[Key, float]) -> bool:
    """Whether the contributions of each rank have a factor of its own, as after a clip by its own norm: the larger the
    norm that it reported, the smaller its factor, and factor x norm one number where both were clipped."""
    reported = {rank: event.value for rank, event in analysis.of(Norm)}
    by_rank: dict[int, list[float]] = {}
    for (rank, _), value in found.items():
        by_rank.setdefault(rank, []).append(value)
    if len(by_rank) < 2 or by_rank.keys() - reported.keys():
        return False
    if any(value <= 0 or spread(values) > tolerances.ONE_FACTOR for values in by_rank.values() for value in values):
        return False
    factors = {rank: values[0] for rank, values in by_rank.items()}
    top = max(factors.values())
    clipped = [rank for rank, factor in factors.items() if factor < top * (1 - tolerances.ONE_FACTOR)]
    others = [rank for rank in factors if rank not in clipped]
    ordered = bool(clipped) and max(reported[r] for r in others) < min(reported[r] for r in clipped)
    return ordered and spread(factors[r] * reported[r] for r in clipped) <= tolerances.NORM


def clipped_early(analysis: Analysis, found: dict[Key, float]) -> bool:
    """Whether each rank has clipped before its last backward, and what was there by then counts less than the rest."""
    last = max(micro_of(m) for _, m in found)
    events = [(rank, event.micro) for rank, event in analysis.of(Norm) if event.micro < last]
    clip = {rank: max(micro for r, micro in events if r == rank) for rank, _ in events}
    behind = [value for (rank, m), value in found.items() if micro_of(m) > clip.get(rank, last)]
    before = [value for (rank, m), value in found.items() if micro_of(m) <= clip.get(rank, last)]
    if not before or {rank for rank, _ in found} - clip.keys() or spread(behind) > tolerances.ONE_FACTOR:
        return False
    return max(before) <= max(behind) * (1 + tolerances.ONE_FACTOR)


def _copies_differ(analysis: Analysis, name: str) -> bool:
    if analysis.covered(name) or analysis.null(name) or name in analysis.unsure:
        return False
    for ranks in analysis.replica_sets(name):
        held = [analysis.sums[r][name] for r in ranks if name in analysis.sums[r]]
        if any(float((t - held[0]).norm()) > analysis.tolerance(name) * float(held[0].norm()) for t in held[1:]):
            return True
    return False


def _one_factor(analysis: Analysis, rank: int) -> float | None:
    """The factor between a rank's gradients and what its optimizer received; None: there is no such one."""
    clipped = analysis.recording.ranks[rank].group(analysis.step, "clipped")
    whole = analysis.sums[rank]
    factors: list[float] = []
    for name, now in clipped.items():
        square = float(whole[name] @ whole[name]) if name in whole else 0.0
        if square == 0 or analysis.null(name) or not bool(now.isfinite().all()):  # this rank's rows of an embedding
            continue
        factor = float(now @ whole[name]) / square
        limit = tolerances.LOOSE * analysis.tolerance(name) * float(now.norm())
        if float((now - factor * whole[name]).norm()) > limit:
            return None
        factors.append(factor)
    return factors[0] if factors and spread(factors) <= tolerances.ONE_FACTOR else None


def true_norm(analysis: Analysis) -> float | None:
    """The norm with every element counted once; None when that cannot be told."""
    parts = _squares(analysis)
    return None if parts is None else math.sqrt(sum(parts.values()))


def _squares(analysis: Analysis) -> dict[tuple[str, tuple[int, ...]], float] | None:
    """(parameter, ranks that hold the same part of it) -> the sum of the squares of its gradient there."""
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for name in analysis.names:
        if name in analysis.unsure:
            return None
        for ranks in analysis.replica_sets(name):
            held = [analysis.about[rank][name] for rank in ranks]
            about = next((one for one in held if one.gradient), held[0])
            if about.squares is None and about.gradient:
                return None
            found[name, ranks] = about.squares or 0.0
    return found


def _omits_experts(analysis: Analysis, reported: dict[int, float]) -> str:
    """What the norms of all ranks leave out, in words: experts, or those of other ranks; '' when they do not."""
    if not any(class_of(name) == "experts" for name in analysis.names):
        return ""
    parts = _squares(analysis)
    if parts is None or not reported or not 0 < sum(parts.values()) < math.inf:
        return ""
    others = sum(value for (name, _), value in parts.items() if class_of(name) != "experts")
    experts = {key: value for key, value in parts.items() if class_of(key[0]) == "experts"}
    own = {rank: sum(value for (_, ranks), value in experts.items() if rank in ranks) for rank in reported}
    limit = max(tolerances.TRUE_NORM, *(analysis.tolerance(name) for name in analysis.names))
    truth = math.sqrt(others + sum(experts.values()))
    if any(value >= truth * (1 - limit) for value in reported.values()):
        return ""
    for words, held in (("has no experts in it", dict.fromkeys(own, 0.0)), ("has each rank's own experts only", own)):
        if all(abs(reported[r] - math.sqrt(others + held[r])) <= limit * truth for r in reported):
            return words
    return ""


def _norm_is_true(analysis: Analysis, reported: float, names: tuple[str, ...]) -> Iterator[Finding]:
    truth = true_norm(analysis)
    rounding = max((analysis.tolerance(name) for name in names), default=0.0)  # norms are rounded as gradients are
    if truth is None or not 0 < truth < math.inf or reported <= truth * (1 + max(tolerances.TRUE_NORM, rounding)):
        return
    held = [(len(ranks), analysis.about[ranks[0]][n]) for n in analysis.names for ranks in analysis.replica_sets(n)]
    copies = sum(times * (about.squares or 0.0) for times, about in held)
    repeated = tuple(n for n in names if any(len(r) > 1 for r in analysis.replica_sets(n)))
    exact = abs(reported - math.sqrt(copies)) <= tolerances.FACTOR * reported
    sentence = f"step {analysis.step}: the norm is {reported:.6g} but each element once gives {truth:.6g}" + (
        ": it counts every copy of replicated tensors" if exact else ""
    )
    bars = (("reported", reported / truth), ("each element once", 1.0))
    axis = axis_over(analysis.recording, analysis.replica_sets(repeated[0])[0]) if repeated else ""
    yield Finding(BUG, "norm-counts-replicas", sentence, tensors=repeated, axis=axis, coefficients=bars)
