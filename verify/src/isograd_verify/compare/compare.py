"""Compares a recording with a reference: every gradient by name and block, on every rank that holds a part of it.

The reference is usually one device; it may be another layout or another framework. Data must be the same
(same_data.py); names are the same, or given by a table, or matched by shape and order. What differs
is diagnosed (diagnose.py), and the checks that need no reference run as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isograd_verify import tolerances
from isograd_verify.compare.classes import fit_all, kind_findings, shifts
from isograd_verify.compare.diagnose import diagnose
from isograd_verify.compare.divergence import first_divergence
from isograd_verify.compare.loss_terms import backward_alone, other_amounts
from isograd_verify.compare.numerics import Noise
from isograd_verify.compare.placement import Place, Value, place
from isograd_verify.compare.routing import ADVICE, without_flips
from isograd_verify.compare.same_data import same_data
from isograd_verify.compare.tensorwise import Tensorwise, cancels, common_factor, compare_tensor, limit_of
from isograd_verify.compare.values import difference, norm, nothing, of_rank, sides, whole_values
from isograd_verify.errors import VerifyError
from isograd_verify.judge.analysis import INSIDE, Analysis
from isograd_verify.judge.checks import check, placed
from isograd_verify.judge.checks.balance import coefficients_unjudged
from isograd_verify.judge.checks.gradients import scales
from isograd_verify.judge.checks.losses import counted, undivided
from isograd_verify.judge.checks.traffic import local_steps
from isograd_verify.judge.clips import only_in_both
from isograd_verify.judge.consequences import DRIFT, row, spoilt, without_consequences
from isograd_verify.judge.naming import class_of
from isograd_verify.record.events import Norm, Result
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject, listed
from isograd_verify.tell.report import timeline
from isograd_verify.tell.wording import axis_over, finding, left_out

UNPLACED = "which part each rank holds cannot be told, or it was too large to record"
NOT_THERE, NOT_HERE = "the reference has no such tensor", "only the reference has such a tensor"


def compare(
    reference: Recording,
    candidate: Recording,
    rename: dict[str, str] | None = None,
    ignore_data: bool = False,
    noise: Noise | None = None,
) -> Subject:
    """`rename`: the candidate's name -> the reference's."""
    only_in_both(reference, candidate)
    subject = Subject(str(candidate.about.get("layout") or candidate.path.name), candidate.world, compared=True)
    subject.timeline = timeline(candidate)
    data = [] if ignore_data else same_data(reference, candidate)
    subject.findings += [f for f in data if f.verdict == NOTE]
    subject.findings += left_out(candidate)
    steps = [s for s in candidate.steps if s in reference.steps]
    if not steps:
        raise VerifyError(
            "IG721",
            "the two recordings have no optimizer step in common",
            seen=f"reference: steps {reference.steps}, candidate: steps {candidate.steps}",
            fix="record both for at least one whole step",
        )
    # The reference knows which of two scales is the right one, and shows a mean of means by its gradients.
    free = check(candidate, leave_out=(scales, counted, undivided, coefficients_unjudged))
    explained = [f for f in data if f.verdict == BUG]
    narrow = noise is not None or limit_of(Analysis(candidate, steps[0])) > tolerances.NARROW
    again = "again" in reference.about  # each step began with the candidate's own weights
    for step in steps[:1] if narrow and not again else steps:  # later weights differ by rounding already
        if apart := local_steps(Analysis(candidate, step)):
            explained.append(replace(apart, verdict=NOTE))
            break
        found = _step(reference, candidate, step, rename or {}, subject, noise)
        explained += [f for f in found if f not in explained]
        if any(f.verdict == BUG or f.sentence.endswith(ADVICE) for f in found):
            break  # later steps start from other weights
    told = [placed(f, candidate) for f in merged(explained, free, again)]
    subject.findings = [*subject.partial(), *subject.findings, *told]
    return subject


def merged(explained: list[Finding], free: list[Finding], again: bool = False) -> list[Finding]:
    """A bug that both found is told once. What the reference decides is no longer open; not one of the same program."""
    free = _decided(explained, free, again)
    told = {f.bug for f in explained if f.verdict == BUG}
    named = {f.bug for f in free if f.verdict == BUG and f.bug and f.bug not in DRIFT}  # which follows from others
    kept = [f for f in free if f.verdict != INCONCLUSIVE]
    with_site = {f.bug: f for f in free if row(f.bug).knows_line and f.verdict == BUG}
    explained = [
        replace(f, sentence=f"{with_site[f.bug].sentence}; {f.sentence}", axis=with_site[f.bug].axis)
        if f.bug in with_site
        else f
        for f in explained
    ]
    named -= set(with_site) & told
    out = [f for f in kept if f.bug == "clip-per-rank" or not _told_again(f, explained)]
    out = [f for f in out if not spoilt(f, explained)]
    extra = []
    for f in explained:
        scale = f.coefficients[:1] == (("reference", 1.0),)  # a clip explains factors, and nothing else
        named_here = named if scale else {bug for bug in named if not row(bug).factor_only}
        covered = {t for g in out if g.verdict == BUG and g.bug in named_here for t in g.tensors}
        if f.bug in named and any(f.bug == g.bug and (set(f.tensors) & set(g.tensors) or not f.tensors) for g in out):
            continue
        unnamed = f.verdict != NOTE and f.bug == ""
        if unnamed and (spoilt(f, [*explained, *out]) or (named_here and set(f.tensors) <= covered)):
            continue
        extra.append(f)
    hurt = tuple(sorted({t for f in explained if f.bug == "" for t in f.tensors}))
    out = [replace(f, tensors=hurt) if f.bug == "cut-graph" and not f.tensors else f for f in out]
    extra = [
        replace(f, tensors=tuple(sorted({*f.tensors, *hurt}))) if f.bug == "positions-restart" else f for f in extra
    ]
    return without_consequences([*extra, *out] if any(f.bug for f in extra) else [*out, *extra])


def _told_again(found: Finding, explained: list[Finding]) -> bool:
    """Whether comparing has found the same bug in the same tensors. On other tensors it is another finding."""
    same = [f for f in explained if f.verdict == found.verdict == BUG and f.bug == found.bug]
    if found.bug == "":
        return bool(same) and bool(found.tensors) and set(found.tensors) <= {t for f in same for t in f.tensors}
    return any(not found.tensors or not f.tensors or set(found.tensors) & set(f.tensors) for f in same)


def _decided(explained: list[Finding], free: list[Finding], again: bool) -> list[Finding]:
    """What is a bug in one program and on purpose in another: gradients that are the reference's say which it is."""
    if all(f.verdict == NOTE for f in explained):
        blind = {(BUG, "cut-graph")} if again else set()
        return [f for f in free if not row(f.bug).on_purpose or (f.verdict, f.bug) in blind]
    if any(f.verdict == BUG and f.bug in ("", "cut-graph") for f in explained):
        return [replace(f, verdict=BUG) if f.bug == "cut-graph" else f for f in free]
    return free


# -- one step ----------------------------------------------------------------------------------------------------


def _step(
    reference: Recording,
    candidate: Recording,
    step: int,
    rename: dict[str, str],
    subject: Subject,
    noise: Noise | None,
) -> list[Finding]:
    theirs = Analysis(reference, step)
    truth, start = whole_values(theirs, "final"), whole_values(theirs, "parameter")
    analysis = Analysis(candidate, step)
    limit = limit_of(analysis)
    names = match_names(analysis, truth, start, rename)
    found: list[Finding] = []
    places = places_of(analysis, start, names)
    moved = _other_weights(analysis, start, names, places, reference, step)
    if moved is not None:
        return [moved]
    expected = {n: truth[t] if t in truth else nothing(start[t]) for n, t in names.items()}
    lost = {n for n, t in names.items() if t not in truth and any(t in sums for sums in theirs.sums)}
    compared, unplaced = _every_tensor(analysis, reference, names, expected, places, noise, lost)
    unread = {t.name: INSIDE for t in compared if t.name in analysis.summed_inside}
    unread |= {t.name: analysis.unread[t.name] for t in compared if t.name in analysis.unread}
    compared = [t for t in compared if t.name not in unread]
    for one in compared:
        worst = max(one.errors.values(), default=0.0)
        if not worst <= subject.errors.get(one.name, -1.0):
            subject.errors[one.name] = worst
            subject.by_rank[one.name] = [one.errors.get(r) for r in range(analysis.world)]
    cancelled = _cancelled(analysis, theirs, names, compared)
    found += [finding(NOTE, "", f"{listed(cancelled)}: the gradient is zero but for rounding")] if cancelled else []
    wrong = [t for t in compared if t.verdict == BUG]
    if noise is not None and not wrong:
        found += common_factor(analysis, noise, names, places)
    if noise is None and not wrong and limit > tolerances.HALF_UPDATE:
        every, eps = fit_all(analysis, expected, names, places)
        found += kind_findings(step, shifts(every, eps))
    unclear = tuple(t.name for t in compared if t.verdict == INCONCLUSIVE)
    left = dict.fromkeys(unplaced, UNPLACED) | unread
    left |= _without_counterpart(analysis, truth, names)
    subject.uncompared |= left
    if unclear:
        sentence = (
            f"step {step}: {listed(unclear)}: the error is more than rounding usually leaves and less than a bug does"
        )
        found.append(finding(INCONCLUSIVE, "", sentence, tensors=unclear))
    if wrong:
        null = {n for n, t in names.items() if theirs.null(t)} | set(cancelled)
        told, strange = diagnose(
            analysis, reference, step, expected, wrong, {*(t.name for t in compared), *unplaced} - null
        )
        found += told
        names_of = tuple(sorted(t.name for t in wrong))
        if strange:
            found += other_amounts(analysis, theirs, names_of)
        if strange and not any(f.bug for f in found if f.verdict == BUG):
            found += first_divergence(reference, candidate) or backward_alone(analysis, reference, names_of, limit)
    found += _losses(reference, candidate, step, subject, limit)
    found += _norms(reference, candidate, step, bool(wrong), max(tolerances.NORM, limit))
    if not wrong and limit < tolerances.HALF_UPDATE and all(f.verdict != BUG for f in found):  # else rounding
        found += _updates(analysis, theirs, start, whole_values(theirs, "after"), names, places)
    count = max(len(compared), len(subject.errors))  # optimizers may step in turn
    of = f" of {count + len(left)}" if left else ""
    subject.facts["gradients"] = f"{count}{of} compared by name, step {step} last"
    return without_flips(
        reference, candidate, step, found, subject, lambda: fit_all(analysis, expected, names, places)[0]
    )


def _cancelled(analysis: Analysis, one: Analysis, names: dict[str, str], compared: list[Tensorwise]) -> list[str]:
    """Gradients that are zero but for rounding pass, each run with rounding of its own."""
    fed = [tuple(of) for of in one.recording.about.get("again", {}).get(str(analysis.step), [])]
    null = [t for t in compared if t.verdict != PASS and cancels(analysis, one, t.name, names[t.name], fed)]
    for tensor in null:
        tensor.verdict = PASS
    return [tensor.name for tensor in null]


def _every_tensor(
    analysis: Analysis,
    reference: Recording,
    names: dict[str, str],
    expected: Mapping[str, Value],
    places: dict[str, dict[int, Place]],
    noise: Noise | None,
    lost: set[str],
) -> tuple[list[Tensorwise], list[str]]:
    """(what was compared, names of what could not be). `lost`: gradients that the reference had and did not record."""
    whole = math.hypot(*map(norm, expected.values()))
    compared: list[Tensorwise] = []
    left: list[str] = []
    given = {key for record in reference.ranks for key in record.tensors(analysis.step)}
    for name, theirs in names.items():
        if f"sum/{theirs}" not in given and not any(analysis.about[r][name].gradient for r in analysis.holders(name)):
            continue
        one: Tensorwise | None = None
        if name not in lost and all(rank in places[name] for rank in analysis.holders(name)):
            one = compare_tensor(analysis, name, expected[name], places[name], whole, noise)
        if one is None:
            left.append(name)
        else:
            compared.append(one)
    return compared, left


def match_names(
    analysis: Analysis, truth: Mapping[str, Value], start: Mapping[str, Value], rename: dict[str, str]
) -> dict[str, str]:
    """The candidate's names -> the reference's."""
    theirs = {**start, **truth}
    unknown = [v for v in rename.values() if v not in theirs]
    if unknown:
        raise VerifyError(
            "IG723", "the rename table names tensors that the reference has not",
            seen=listed(unknown), expected=f"one of {listed(list(theirs), 6)}", fix="candidate name: reference name",
        )  # fmt: skip
    names = {n: rename.get(n, n) for n in analysis.names if rename.get(n, n) in theirs}
    left = [n for n in theirs if n not in names.values()]
    for name in analysis.names:
        if name in names or not left:
            continue
        shape = analysis.info(name).whole
        fits = next((n for n in left if tuple(theirs[n].shape) == shape), None)
        if fits is not None:
            names[name] = fits
            left.remove(fits)
    if not names:
        raise VerifyError(
            "IG724", "no parameter of the candidate is one of the reference's",
            seen=f"{listed(analysis.names)}; reference: {listed(list(theirs))}",
            fix="give --rename a JSON object of candidate name: reference name",
        )  # fmt: skip
    return names


def _without_counterpart(analysis: Analysis, truth: Mapping[str, Value], names: dict[str, str]) -> dict[str, str]:
    ours = [n for n in analysis.names if n not in names and analysis.info(n).gradient]
    return dict.fromkeys(ours, NOT_THERE) | {n: NOT_HERE for n in truth if n not in names.values()}


def places_of(analysis: Analysis, start: Mapping[str, Value], names: dict[str, str]) -> dict[str, dict[int, Place]]:
    """By name and rank: where what the rank holds stands in the whole tensor."""
    found: dict[str, dict[int, Place]] = {}
    for name, theirs in names.items():
        holders = analysis.holders(name)
        found[name] = {}
        for i, rank in enumerate(holders):
            info = analysis.about[rank][name]
            local = of_rank(analysis, rank, "parameter", name)
            if theirs not in start or local is None:
                continue
            if _given_whole(analysis, rank, name, start[theirs]):
                found[name][rank] = Place()
                continue
            spot = place(local, start[theirs], info, i, len(holders))
            if spot is not None:
                found[name][rank] = spot
    for name in names:  # a constant bias follows its module's weight, which has values to be found by
        weight = name.rpartition(".")[0] + ".weight"
        if name != weight and weight in found and analysis.info(name).constant:
            for rank, spot in found[weight].items():
                cuts = tuple(c for c in spot.cuts if c[0] == 0)
                if rank in found[name] and cuts and analysis.about[rank][name].shape == (len(cuts[0][1]),):
                    found[name][rank] = Place(cuts)
    return found


def _given_whole(analysis: Analysis, rank: int, name: str, whole: Value) -> bool:
    """Whether a rank holds nothing of a parameter between steps, and its engine tells the whole gradient (ZeRO 3 of
    DeepSpeed)."""
    local, final = (of_rank(analysis, rank, kind, name) for kind in ("parameter", "final"))
    empty = local is not None and not local.numel()
    return empty and final is not None and tuple(final.shape) == tuple(whole.shape)


def _other_weights(
    analysis: Analysis,
    start: Mapping[str, Value],
    names: dict[str, str],
    places: dict[str, dict[int, Place]],
    reference: Recording,
    step: int,
) -> Finding | None:
    """The two runs must begin a step with the same weights, each rank with its own part of them."""
    apart: list[str] = []
    whole = math.hypot(*map(norm, start.values()))
    for name, theirs in names.items():
        for rank, spot in places[name].items():
            local, expected = sides(analysis, rank, "parameter", name, start[theirs], spot)
            if local is None or expected is None or not local.numel():  # its weights are elsewhere until needed
                continue
            size = max(norm(expected), tolerances.FLOOR * whole)
            same = tuple(local.shape) == tuple(expected.shape)
            if not same or norm(difference(local, expected)) > tolerances.START * size:
                apart.append(name)
    apart = list(dict.fromkeys(apart))
    swapped = _swapped(analysis, names, places)
    names_of = tuple(sorted({*apart, *swapped}))
    if not names_of:
        return None
    first = step == min(reference.steps)
    if swapped:
        ranks = tuple(sorted({r for n in swapped for r in places[n]}))
        sentence = f"step {step}: {listed(tuple(swapped))}: ranks hold each other's shards of the weights"
        return finding(BUG, "resume-other-rank", sentence, tensors=names_of, axis=axis_over(analysis.recording, ranks))
    if first:
        sentence = f"the weights of {listed(names_of)} differ before the first step: initialised or loaded differently"
        return finding(INCONCLUSIVE, "", sentence, tensors=names_of)
    sentence = f"step {step}: weights of {listed(names_of)} differ although the gradients before were equal"
    return finding(INCONCLUSIVE, "", sentence, tensors=names_of)


def _swapped(analysis: Analysis, names: dict[str, str], places: dict[str, dict[int, Place]]) -> list[str]:
    """Tensors of which later ranks hold earlier rows, found by their values: no framework cuts that way but one that
    says where its shards sit (FSDP2 over tensor parallel)."""
    found = []
    for name in names:
        if all(analysis.about[rank][name].box is not None for rank in places[name]):
            continue
        firsts = [spot.cuts[0][1][0] for _, spot in sorted(places[name].items()) if spot.cuts and spot.cuts[0][1]]
        if len(set(firsts)) > 1 and len(firsts) == len(set(firsts)) and firsts != sorted(firsts):
            found.append(name)
    return found


def _losses(reference: Recording, candidate: Recording, step: int, subject: Subject, limit: float) -> list[Finding]:
    """The loss that a program says it optimised."""
    told = [[(e.loss, e.weight) for e in r.ranks[0].of(Result, step)] for r in (candidate, reference)]
    if not all(told):
        return []
    (ours, weight), (theirs, expected) = told[0][0], told[1][0]
    error = abs(ours - theirs) / max(abs(theirs), 1e-30)
    subject.facts["loss"] = f"{theirs:.6g}, relative difference {error:.1e}"
    if error <= limit and weight == expected:
        return []
    sentence = f"step {step}: the loss is {ours:.9g} over weight {weight:g} instead of {theirs:.9g} over {expected:g}"
    return [finding(BUG, "", sentence)]


# -- norm and update ---------------------------------------------------------------------------------------------


def _norms(reference: Recording, candidate: Recording, step: int, wrong: bool, limit: float) -> list[Finding]:
    """Equal gradients must give the reference's norm on every rank."""

    def reported(recording: Recording) -> dict[int, float]:
        return {r.rank: e.value for r in recording.ranks for e in r.of(Norm, step)[::-1]}

    ours, theirs = reported(candidate), reported(reference)
    if wrong or not ours or 0 not in theirs:
        return []
    off = {r: v for r, v in ours.items() if abs(v - theirs[0]) > limit * theirs[0]}
    if not off:
        return []
    bars = (("reference", 1.0), *((f"rank {r}", v / theirs[0]) for r, v in ours.items()))
    agree = len({round(v / theirs[0], 6) for v in ours.values()}) == 1
    bug = "norm-counts-replicas" if agree and ours[min(off)] > theirs[0] else "clip-per-rank"
    sentence = f"step {step}: gradients are right, but the norm is {off[min(off)]:.6g} on rank {min(off)} instead of {theirs[0]:.6g}"  # noqa: E501
    ranks = axis_over(candidate, tuple(ours))
    return [finding(BUG, bug, sentence, axis=ranks, coefficients=bars)]


def _updates(
    analysis: Analysis,
    reference: Analysis,
    before: Mapping[str, Value],
    after: Mapping[str, Value],
    names: dict[str, str],
    places: dict[str, dict[int, Place]],
) -> list[Finding]:
    """Equal gradients must give equal updates: what is left is the clip factor, the learning rate, the optimizer."""
    step = analysis.step
    apart: dict[str, float] = {}
    for name, theirs in names.items():
        if analysis.negligible(name):  # Adam makes a full step of what is rounding alone
            continue
        for rank, spot in places[name].items():
            if theirs not in after or theirs not in before or rank in analysis.owners_step.get(name, ()):
                continue
            ends = sides(analysis, rank, "after", name, after[theirs], spot)
            starts = sides(analysis, rank, "parameter", name, before[theirs], spot)
            if any(one is None or not one.numel() for one in (*ends, *starts)):
                continue
            moved, expected = (difference(*both) for both in zip(ends, starts, strict=True))  # type: ignore[arg-type]
            rounding = tolerances.UPDATE.get(analysis.about[rank][name].dtype, tolerances.UPDATE_OTHER)
            apart_by, size = norm(difference(moved, expected)), norm(expected)
            if apart_by > rounding * max(size, tolerances.NOTHING):
                apart[name] = apart_by / max(size, 1e-300)
    fed = str(step) in reference.recording.about.get("again", {})  # then zeros may be left of an earlier backward
    absent = tuple(
        name
        for name, theirs in sorted(names.items())
        if (name in apart or not (theirs in after or fed))
        and class_of(name) == "experts"
        and reference.info(theirs).gradient
        and not all(analysis.about[rank][name].gradient for rank in analysis.holders(name))
    )
    if absent:
        how = "and move otherwise" if absent[0] in apart else "and would move otherwise by a decay or a momentum"
        sentence = f"step {step}: {listed(absent)} have no gradient where the reference has zeros, {how}"
        verdict = BUG if absent[0] in apart else INCONCLUSIVE
        return [finding(verdict, "expert-none", sentence, tensors=absent)]
    if not apart:
        return []
    bugs: Any = tuple(sorted(apart))
    sentence = (
        f"step {step}: gradients are equal but the updates of {listed(bugs)} differ (by {max(apart.values()):.1e})"
    )
    return [finding(INCONCLUSIVE, "", sentence, tensors=bugs, axis="")]
