"""Names what is wrong with gradients that differ from the reference's (docs/verify.md, how a bug gets its name)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.compare.values import Place, Value, contributions, folded, projected, rows_of, sides
from isograd_verify.judge import patterns
from isograd_verify.judge.analysis import Analysis, Observed
from isograd_verify.judge.checks.gradients import axis_of, never_summed, own_only
from isograd_verify.judge.checks.norms import clipped_apart
from isograd_verify.judge.checks.traffic import reductions
from isograd_verify.judge.contributions import Fit, fit
from isograd_verify.judge.patterns import Symptom, bug_of, classes_of
from isograd_verify.judge.terms import narrowed, reduced_twice
from isograd_verify.record.events import Key
from isograd_verify.record.recording import Recording
from isograd_verify.record.sketch import sketch
from isograd_verify.tell.catalogue import BUGS, TWICE
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding, listed
from isograd_verify.tell.wording import axis_over, group_sizes, labelled, meanings, spell

if TYPE_CHECKING:
    from isograd_verify.compare.tensorwise import Tensorwise

SCALES_AT = BUGS["ulysses-scale"].look
BETWEEN_CUTS = "an adapter that all ranks hold beside a cut weight works on each rank's part, before these are summed"
BETWEEN_CUTS_AT = "the adapter's forward: sum what its cut half makes over the ranks first, or all-reduce this gradient"
VALUED = (patterns.SCALED, patterns.REREDUCED, patterns.REDIVIDED)
MOST_FACTORS = 3  # that are told one by one
ROWS, PERMUTED, UNKNOWN = "some rows", "permuted", "unknown"


@dataclass(frozen=True)
class Reading:
    """What one wrong tensor shows: a pattern, its coefficients, and words for what has none."""

    symptom: Symptom
    coefficients: dict[Key, float] = field(default_factory=dict)
    words: str = ""


def diagnose(
    analysis: Analysis,
    reference: Recording,
    truth: Mapping[str, Value],
    wrong: list[Tensorwise],
    telling: set[str],
) -> tuple[list[Finding], bool]:
    """(findings, whether some tensor shows no known pattern). `telling`: tensors that an error of all would show in."""
    groups: dict[tuple[str, float], list[str]] = defaultdict(list)
    readings: dict[tuple[str, float], Reading] = {}
    for one in wrong:
        reading = read_tensor(analysis, reference, one, truth[one.name])
        kind, value = reading.symptom.kind, reading.symptom.value
        key = (kind, round(value, 3) if kind in VALUED else 1.0)
        groups[key].append(one.name)
        readings.setdefault(key, replace(reading, symptom=replace(reading.symptom, value=key[1])))
    _single_numbers(analysis, groups)
    found = []
    own = [key for key in groups if key[0] == patterns.SCALED and key[1] and not _meant(analysis, key[1])]
    if len(own) > MOST_FACTORS:
        factors = {name: key[1] for key in own for name in groups.pop(key)}
        tensors = tuple(sorted(factors))
        sentence = (
            f"step {analysis.step}: {listed(tensors)}: {min(factors.values()):g} to {max(factors.values()):g} times "
            "what they should be, each tensor by a factor of its own, as adaptive clipping would"
        )
        bars = (("reference", 1.0), *((name, factors[name]) for name in tensors[:8]))
        found.append(Finding(BUG, "", sentence, tensors=tensors, coefficients=bars))
    found += [_finding(analysis, readings[key], names, telling, wrong) for key, names in groups.items()]
    found = _through_scores(found, [n for key in groups if key[0] in (UNKNOWN, ROWS) for n in groups[key]])
    return found, any(kind in (UNKNOWN, PERMUTED) for kind, _ in groups)


def _single_numbers(analysis: Analysis, groups: dict[tuple[str, float], list[str]]) -> None:
    """A tensor of one element is any other one times some factor: where others are not summed, neither is this one."""
    unreduced = next((key for key in groups if key[0] == patterns.UNREDUCED), None)
    odd = [key for key in groups if key[0] == patterns.SCALED and key[1] and not _meant(analysis, key[1])]
    for key in odd:
        if unreduced is not None and all(math.prod(analysis.info(name).whole) == 1 for name in groups[key]):
            groups[unreduced] += groups.pop(key)
    for key in [key for key in groups if key[0] == UNKNOWN and unreduced is not None]:
        if all(own_only(analysis, name) for name in groups[key]):
            groups[unreduced] += groups.pop(key)  # type: ignore[index]


def _through_scores(found: list[Finding], strange: list[str]) -> list[Finding]:
    """A router that is not summed over ranks: what it sends to the layers before it is right where its tokens are cut
    over these ranks, and a part of the truth where each rank has the weights of its own experts only."""
    routers = [f for f in found if f.bug == "router-unreduced"]
    if not routers or not strange:
        return found
    names = tuple(sorted({*routers[0].tensors, *strange}))
    sentence = (
        f"{routers[0].sentence}; what passes through it to {listed(strange)} is a part of the truth, too: the "
        "gradients of the tokens' weights were not summed"
    )
    told = replace(routers[0], bug="score-partial", sentence=sentence, tensors=names, cause="", look="")
    return [told, *(f for f in found if f is not routers[0] and not set(f.tensors) <= set(names))]


def _meant(analysis: Analysis, factor: float) -> dict[str, str]:
    return meanings(analysis.recording, analysis.micros, factor)


def _finding(
    analysis: Analysis, reading: Reading, names: list[str], telling: set[str], wrong: list[Tensorwise]
) -> Finding:
    symptom = reading.symptom
    everything = telling <= set(names)
    whom = f"all {len(names)} gradients" if everything else f"{classes_of(names)} ({listed(names)})"
    worst = max((max(t.errors.values(), default=0.0) for t in wrong if t.name in names), default=0.0)
    of = _meant(analysis, symptom.value) if symptom.kind == patterns.SCALED else {}
    of = narrowed(analysis, of)
    one = symptom.kind == patterns.SCALED and abs(symptom.value - 1) <= tolerances.FACTOR
    if one and worst > tolerances.COUNTS:  # no factor is so near to one that is so far away
        sentence = (
            f"step {analysis.step}: {whom}: compared as different (error up to {worst:.1e}) and found to be 1 times "
            "what they should be: a defect of the verifier, please report it"
        )
        return Finding(INCONCLUSIVE, "", sentence, tensors=tuple(sorted(names)))
    bug = bug_of(symptom, names, everything, group_sizes(analysis.recording), of)
    if bug == "cut-graph" and everything and not reductions(analysis):
        bug = "nosync-missing"
    if not bug and symptom.kind == patterns.UNREDUCED:
        bug = never_summed(analysis, names)
    if bug == "ulysses-scale" and symptom.value > 1 and reduced_twice(analysis):
        bug = "reduced-twice"
    axis, said = _said(analysis, reading)
    if TWICE in of:
        axis = axis_over(analysis.recording, analysis.all_ranks)
        said += f" ({of[TWICE]})"
    elif of:
        axis = " or ".join(of)
        said += f" ({' or '.join(of.values())})"
    elif symptom.kind == patterns.SCALED and bug:
        axis = axis_over(analysis.recording, analysis.all_ranks)
    if symptom.kind == patterns.SHARDS:
        bug = "wrong-group"
    bars = labelled(reading.coefficients)
    if symptom.kind == patterns.SCALED and not bars:
        bars = (("reference", 1.0), ("here", symptom.value))
    sentence = f"step {analysis.step}: {whom}: {said} (error up to {worst:.1e})"
    found = Finding(BUG, bug, sentence, tensors=tuple(sorted(names)), axis=axis, coefficients=bars)
    cut = {n.rpartition(".")[0] for n in analysis.names if len(analysis.replica_sets(n)) > 1}
    if bug == "adapter-unreduced" and {n.rpartition(".")[0] for n in names} <= cut:
        found = replace(found, cause=BETWEEN_CUTS, look=BETWEEN_CUTS_AT)
    if of and not bug:
        found = replace(found, cause="a loss or gradient divided, or not divided, by that number", look=SCALES_AT)
    return found


def _said(analysis: Analysis, reading: Reading) -> tuple[str, str]:
    symptom, kind = reading.symptom, reading.symptom.kind
    if kind == patterns.SCALED and symptom.value == 0:
        return "", "zero or missing where the reference has a gradient"
    if kind == patterns.SCALED:
        times = f"{symptom.value:.4g}"
        return "", "almost what they should be" if times == "1" else f"{times} times what they should be"
    across = kind in (patterns.UNREDUCED, patterns.OTHER_CUTS, patterns.SHARDS)
    ranks = (symptom.missing or analysis.all_ranks) if across else ()
    axis = spell(analysis.all_ranks) if kind == patterns.MIXED else axis_of(analysis, kind, ranks, symptom.own)
    sentence = patterns.said(kind, symptom.value, axis)
    return (axis, sentence) if sentence else ("", reading.words)


def read_tensor(analysis: Analysis, reference: Recording, one: Tensorwise, truth: Value) -> Reading:
    """(symptom, coefficients, words for what has no coefficients) of one wrong tensor, as the first rank sees it that
    is wrong by about as much as any."""
    told = {s.own: s for s in analysis.observed(one.name)}
    errors = {own: max(one.errors.get(r, 0.0) for r in s.ranks) for own, s in told.items()}
    worst = next((told[r] for r in sorted(told) if errors[r] >= tolerances.WORST * max(errors.values())), None)
    if worst is None:
        return Reading(Symptom(patterns.SCALED, 0.0))
    found, expected = sides(analysis, worst.own, "final", one.name, truth, one.places[worst.own])
    seen, wanted, parts = _coordinates(analysis, one, worst, truth, found, expected)
    tolerance = analysis.tolerance(one.name)
    size = float(wanted.norm())
    if not bool(seen.isfinite().all()):
        return Reading(Symptom(UNKNOWN), words="not finite")
    if float(seen.norm()) <= tolerances.NOTHING * size:
        return Reading(Symptom(patterns.SCALED, 0.0))
    factor = float(seen @ wanted) / max(size**2, 1e-300)
    if float((seen - factor * wanted).norm()) <= tolerances.LOOSER * tolerance * float(seen.norm()):
        return Reading(Symptom(patterns.SCALED, factor))
    seen_here = replace(worst, sketch=seen)
    return (
        _by_contributions(analysis, one.name, seen_here, wanted, parts, tolerance)
        or _by_reference(reference, analysis.step, one.name, worst, tolerance)
        or _by_shape(found, expected)
    )


def _coordinates(
    analysis: Analysis, one: Tensorwise, seen: Observed, truth: Value, found: Value | None, expected: Value | None
) -> tuple[Tensor, Tensor, dict[Key, Tensor]]:
    """(what was seen, the truth, what each backward added), all as sketches of one kind."""
    spot = one.places[seen.own]
    cover = len(seen.ranks) > 1 and analysis.covered(one.name) and spot != Place()
    part = truth if cover else spot.of(truth)
    if isinstance(part, Tensor):
        return seen.sketch, sketch(part), analysis.contributions(one.name, seen.own)
    if part.flat is not None:
        return seen.sketch, part.flat, analysis.contributions(one.name, seen.own)
    ours, theirs = (projected(part if side is None else side) for side in (found, expected))
    dims = sorted(ours.along.keys() & theirs.along.keys())
    joined = not cover and (spot.row is not None or len(spot.cuts) > 1)  # of several ranks, each with its own part
    parts = {} if joined else contributions(analysis, one.name, seen.own, dims)
    return folded(ours, dims), folded(theirs, dims), parts


def _by_contributions(
    analysis: Analysis, name: str, seen: Observed, wanted: Tensor, parts: dict[Key, Tensor], tolerance: float
) -> Reading | None:
    """Truth and observation, both as sums of what the candidate's own backwards added."""
    if not parts:
        return None
    mine = analysis.replicas_of(name, seen.own)
    near = parts if analysis.covered(name) else {k: p for k, p in parts.items() if k[0] in mine}
    loose = tolerances.LOOSER * tolerance
    for chosen in (near, parts):
        should, does = fit(wanted, chosen, tolerance, seen.own), fit(seen.sketch, chosen, tolerance, seen.own)
        if should is None or does is None or should.residual > loose or does.residual > loose:
            continue
        if not (should.determined and does.determined):
            continue
        others = {k for (k, _), c in does.coefficients.items() if k not in mine and abs(c) > tolerances.COUNTS}
        if chosen is parts and others and not analysis.covered(name):
            return Reading(Symptom(patterns.SHARDS, 1.0, tuple(sorted(others)), own=seen.own), does.coefficients)
        return _ratios(analysis, should, does, seen.own, tolerance)
    return None


def _ratios(analysis: Analysis, should: Fit, does: Fit, own: int, tolerance: float) -> Reading:
    least = tolerances.SAME * max(map(abs, should.coefficients.values()))
    both = {k: c for k, c in should.coefficients.items() if abs(c) > least and k in does.coefficients}
    q = {k: does.coefficients[k] / c for k, c in both.items()}
    symptom = patterns.read(q, own, analysis.counts, max(tolerances.LOOSER * tolerance, tolerances.FACTOR))
    if symptom.kind == patterns.MIXED and clipped_apart(analysis, q):
        symptom = Symptom(patterns.CLIPPED)
    even = len(set(analysis.counts.values())) == 1
    if symptom.kind == patterns.MIXED and does.uniform and not (should.uniform or even):
        symptom = Symptom(patterns.PER_TOKEN)  # equal weights where the truth's differ
    return Reading(symptom, q)


def _by_reference(reference: Recording, step: int, name: str, seen: Observed, tolerance: float) -> Reading | None:
    """The observation as a sum of the reference's own micro-batches."""
    record = reference.ranks[0]
    keys = ((key.partition("/"), part) for key, part in record.group(step, "part").items())
    parts = {(0, int(micro)): part for (micro, _, other), part in keys if other == name}
    found = fit(seen.sketch, parts, tolerance) if len(parts) > 1 else None
    if found is None or found.residual > tolerances.LOOSER * tolerance or not found.determined:
        return None
    return Reading(patterns.read(found.coefficients, 0), found.coefficients)


def _by_shape(found: Value | None, expected: Value | None) -> Reading:
    """Right in some rows only; or the same rows in another order."""
    strange = Reading(Symptom(UNKNOWN), words="differs from the reference in no known pattern")
    if found is None or expected is None or tuple(found.shape) != tuple(expected.shape) or not found.shape:
        return strange
    mine, theirs = (rows_of(v, 0) if isinstance(v, Tensor) or 0 in v.along else None for v in (found, expected))
    if mine is None or theirs is None:  # only columns are known
        return strange
    size = float(theirs.norm()) or 1.0
    least = tolerances.ROW * size / len(mine) ** 0.5
    used = theirs.norm(dim=1) > least  # else zero on both sides: ids that do not occur, key biases
    right, wrong = (((mine - theirs).norm(dim=1) <= least) == is_right for is_right in (True, False))
    silent, last = (mine.norm(dim=1) == 0).nonzero().flatten().tolist(), int(used.sum())
    first = silent[0] if silent else 0
    if bool(used[:last].all()) and silent == [*range(first, len(mine))] and 1 < first < last and last % first == 0:
        words = f"rows {first}-{last - 1} have a gradient on one device only, as if ids began at 0 on each rank"
        return Reading(Symptom(patterns.RESTARTED), words=words)
    if bool((right & used).any()) and bool(wrong.any()):
        bad = wrong.nonzero().flatten().tolist()
        rows = f"{bad[0]}-{bad[-1]}" if bad == [*range(bad[0], bad[-1] + 1)] else listed([str(b) for b in bad], 4)
        words = f"right in {int((right & used).sum())} of {len(mine)} rows, wrong in rows {rows}: cuts disagree"
        return Reading(Symptom(ROWS), words=words)
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        permuted = _same_rows(mine.reshape(-1, 1), theirs.reshape(-1, 1), size)
    else:
        ours, reference = projected(found), projected(expected)
        both = ours.along.keys() & reference.along.keys()
        permuted = any(_same_rows(ours.along[d].T, reference.along[d].T, size) for d in both)
        words = f"{strange.words}; of a permutation sketches show only one of whole rows or columns"
        strange = replace(strange, words=words)
    if permuted:
        return Reading(Symptom(PERMUTED), words="the right numbers in other places: a permutation")
    return strange


def _same_rows(mine: Tensor, theirs: Tensor, size: float) -> bool:
    """Whether rows of numbers are the same ones in another order."""
    first, second = (rows[rows[:, 0].argsort()] for rows in (mine, theirs))
    return torch.allclose(first, second, rtol=tolerances.PERMUTED, atol=tolerances.PERMUTED_SMALL * size)
