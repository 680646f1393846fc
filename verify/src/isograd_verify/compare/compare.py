"""Compares a recording with a reference: every gradient by name and block, on every rank that holds a part of it. What
differs is diagnosed (diagnose.py), and the checks that need no reference run as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from isograd_verify import tolerances
from isograd_verify.compare.classes import Fitted, fit_all, kind_findings, shifts
from isograd_verify.compare.diagnose import diagnose
from isograd_verify.compare.divergence import first_divergence
from isograd_verify.compare.loss_terms import backward_alone, other_amounts
from isograd_verify.compare.numerics import Noise
from isograd_verify.compare.routing import ADVICE, without_flips
from isograd_verify.compare.same_data import same_data
from isograd_verify.compare.tensorwise import Tensorwise, cancels, common_factor, compare_tensor, limit_of
from isograd_verify.compare.values import Place, Value, difference, norm, nothing, of_rank, place, sides, whole_values
from isograd_verify.errors import VerifyError
from isograd_verify.judge.analysis import INSIDE, Analysis
from isograd_verify.judge.checks import check, placed
from isograd_verify.judge.checks.balance import coefficients_unjudged
from isograd_verify.judge.checks.gradients import scales
from isograd_verify.judge.checks.losses import counted, undivided
from isograd_verify.judge.checks.traffic import local_steps
from isograd_verify.judge.clips import bound
from isograd_verify.judge.consequences import DRIFT, row, spoilt, without_consequences
from isograd_verify.judge.patterns import class_of
from isograd_verify.record.events import Norm, Result
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject, listed
from isograd_verify.tell.report import timeline
from isograd_verify.tell.wording import axis_over, left_out

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
    if not (bound(reference) and bound(candidate)):  # a gradient before its clip is not compared with one behind it
        reference.about["bound"] = candidate.about["bound"] = 0.0
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
        found = _Step(reference, candidate, step, rename or {}).judged(subject, noise)
        explained += [f for f in found if f not in explained]
        if any(f.verdict == BUG or f.sentence.endswith(ADVICE) for f in found):
            break  # later steps start from other weights
    shared = {f.bug for f in check(reference) if f.verdict == BUG} | {"cut-graph"} if again else set[str]()
    told = [placed(f, candidate) for f in merged(explained, free, shared)]
    subject.findings = [*subject.partial(), *subject.findings, *told]
    return subject


def merged(explained: list[Finding], free: list[Finding], shared: Collection[str] = ()) -> list[Finding]:
    """A bug that both found is told once. `shared`: bugs of the reference itself, which it does not decide."""
    free = _decided(explained, free, shared)
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


def _decided(explained: list[Finding], free: list[Finding], shared: Collection[str]) -> list[Finding]:
    """What is a bug in one program and on purpose in another: gradients that are the reference's say which it is."""
    if all(f.verdict == NOTE for f in explained):
        return [f for f in free if not row(f.bug).on_purpose or (f.verdict == BUG and f.bug in shared)]
    if any(f.verdict == BUG and f.bug in ("", "cut-graph") for f in explained):
        return [replace(f, verdict=BUG) if f.bug == "cut-graph" else f for f in free]
    return free


class _Step:
    """A step of both runs: the reference's values, and where the candidate's parts of them stand."""

    def __init__(self, reference: Recording, candidate: Recording, step: int, rename: dict[str, str]) -> None:
        self.reference, self.candidate, self.step = reference, candidate, step
        self.theirs, self.ours = Analysis(reference, step), Analysis(candidate, step)
        self.truth, self.start = whole_values(self.theirs, "final"), whole_values(self.theirs, "parameter")
        self.limit = limit_of(self.ours)
        self.names = match_names(self.ours, self.truth, self.start, rename)
        self.places = places_of(self.ours, self.start, self.names)
        truth, start = self.truth, self.start
        self.expected = {n: truth[t] if t in truth else nothing(start[t]) for n, t in self.names.items()}

    def judged(self, subject: Subject, noise: Noise | None) -> list[Finding]:
        """What differs; `subject` gets the numbers."""
        moved = self._other_weights()
        if moved is not None:
            return [moved]
        found: list[Finding] = []
        analysis, names, limit = self.ours, self.names, self.limit
        compared, unplaced = self._every_tensor(noise)
        unread = {t.name: INSIDE for t in compared if t.name in analysis.summed_inside}
        unread |= {t.name: analysis.unread[t.name] for t in compared if t.name in analysis.unread}
        compared = [t for t in compared if t.name not in unread]
        for one in compared:
            worst = max(one.errors.values(), default=0.0)
            if not worst <= subject.errors.get(one.name, -1.0):
                subject.errors[one.name] = worst
                subject.by_rank[one.name] = [one.errors.get(r) for r in range(analysis.world)]
        cancelled = self._cancelled(compared)
        found += [Finding(NOTE, "", f"{listed(cancelled)}: the gradient is zero but for rounding")] if cancelled else []
        wrong = [t for t in compared if t.verdict == BUG]
        if noise is not None and not wrong:
            found += common_factor(analysis, noise, names, self.places)
        if noise is None and not wrong and limit > tolerances.HALF_UPDATE:
            every, eps = fit_all(analysis, self.expected, names, self.places)
            found += kind_findings(self.step, shifts(every, eps))
        unclear = tuple(t.name for t in compared if t.verdict == INCONCLUSIVE)
        left = dict.fromkeys(unplaced, UNPLACED) | unread
        left |= {n: NOT_THERE for n in analysis.names if n not in names and analysis.info(n).gradient}
        left |= {n: NOT_HERE for n in self.truth if n not in names.values()}
        subject.uncompared |= left
        if unclear:
            sentence = (
                f"step {self.step}: {listed(unclear)}: the error is more than rounding usually leaves and less than a "
                "bug does"
            )
            found.append(Finding(INCONCLUSIVE, "", sentence, tensors=unclear))
        if wrong:
            null = {n for n, t in names.items() if self.theirs.null(t)} | set(cancelled)
            telling = {*(t.name for t in compared), *unplaced} - null
            told, strange = diagnose(analysis, self.reference, self.expected, wrong, telling)
            found += told
            names_of = tuple(sorted(t.name for t in wrong))
            if strange:
                found += other_amounts(analysis, self.theirs, names_of)
            if strange and not any(f.bug for f in found if f.verdict == BUG):
                found += first_divergence(self.reference, self.candidate) or backward_alone(
                    analysis, self.reference, names_of, limit
                )
        found += self._losses(subject)
        found += [] if wrong else self._norms()
        if not wrong and limit < tolerances.HALF_UPDATE and all(f.verdict != BUG for f in found):  # else rounding
            found += self._updates()
        count = max(len(compared), len(subject.errors))  # optimizers may step in turn
        of = f" of {count + len(left)}" if left else ""
        subject.facts["gradients"] = f"{count}{of} compared by name, step {self.step} last"

        def factors() -> Fitted:
            return fit_all(analysis, self.expected, names, self.places)[0]

        return without_flips(self.reference, self.candidate, self.step, found, subject, factors)

    def _cancelled(self, compared: list[Tensorwise]) -> list[str]:
        """Gradients that are zero but for rounding pass, each run with rounding of its own."""
        fed = [tuple(of) for of in self.reference.about.get("again", {}).get(str(self.step), [])]
        wrong = [t for t in compared if t.verdict != PASS]
        null = [t for t in wrong if cancels(self.ours, self.theirs, t.name, self.names[t.name], fed)]
        for tensor in null:
            tensor.verdict = PASS
        return [tensor.name for tensor in null]

    def _every_tensor(self, noise: Noise | None) -> tuple[list[Tensorwise], list[str]]:
        """(what was compared, names of what could not be: those, too, that the reference had and did not record)."""
        analysis, whole = self.ours, math.hypot(*map(norm, self.expected.values()))
        compared: list[Tensorwise] = []
        left: list[str] = []
        given = {key for record in self.reference.ranks for key in record.tensors(self.step)}
        for name, theirs in self.names.items():
            holders = analysis.holders(name)
            if f"sum/{theirs}" not in given and not any(analysis.about[r][name].gradient for r in holders):
                continue
            one: Tensorwise | None = None
            lost = theirs not in self.truth and any(theirs in sums for sums in self.theirs.sums)
            if not lost and all(rank in self.places[name] for rank in holders):
                one = compare_tensor(analysis, name, self.expected[name], self.places[name], whole, noise)
            if one is None:
                left.append(name)
            else:
                compared.append(one)
        return compared, left

    def _sides(self, kind: str, whole: Mapping[str, Value]) -> Iterator[tuple[str, int, Value | None, Value | None]]:
        """(name, rank, what it holds, what it should hold) of each part that has a place in the reference's."""
        for name, theirs in self.names.items():
            for rank, spot in self.places[name].items():
                if theirs in whole:
                    yield name, rank, *sides(self.ours, rank, kind, name, whole[theirs], spot)

    def _other_weights(self) -> Finding | None:
        """The two runs must begin a step with the same weights, each rank with its own part of them."""
        apart: set[str] = set()
        whole = math.hypot(*map(norm, self.start.values()))
        for name, _, local, expected in self._sides("parameter", self.start):
            if local is None or expected is None or not local.numel():  # its weights are elsewhere until needed
                continue
            size = max(norm(expected), tolerances.FLOOR * whole)
            same = tuple(local.shape) == tuple(expected.shape)
            if not same or norm(difference(local, expected)) > tolerances.START * size:
                apart.add(name)
        swapped = []  # of which later ranks hold earlier rows; FSDP2 over tp declares such boxes
        for name, spots in self.places.items():
            firsts = [spot.cuts[0][1][0] for _, spot in sorted(spots.items()) if spot.cuts and spot.cuts[0][1]]
            told = all(self.ours.about[rank][name].box is not None for rank in spots)
            if not told and len(set(firsts)) > 1 and len(firsts) == len(set(firsts)) and firsts != sorted(firsts):
                swapped.append(name)
        names = tuple(sorted({*apart, *swapped}))
        if not names:
            return None
        if swapped:
            axis = axis_over(self.candidate, tuple(sorted({r for n in swapped for r in self.places[n]})))
            sentence = f"step {self.step}: {listed(tuple(swapped))}: ranks hold each other's shards of the weights"
            return Finding(BUG, "resume-other-rank", sentence, tensors=names, axis=axis)
        sentence = f"step {self.step}: weights of {listed(names)} differ although the gradients before were equal"
        if self.step == min(self.reference.steps):
            sentence = f"the weights of {listed(names)} differ before the first step: initialised or loaded differently"
        return Finding(INCONCLUSIVE, "", sentence, tensors=names)

    def _losses(self, subject: Subject) -> list[Finding]:
        both = (self.candidate, self.reference)
        told = [[(e.loss, e.weight) for e in run.ranks[0].of(Result, self.step)] for run in both]
        if not all(told):
            return []
        (ours, weight), (theirs, expected) = told[0][0], told[1][0]
        error = abs(ours - theirs) / max(abs(theirs), 1e-30)
        subject.facts["loss"] = f"{theirs:.6g}, relative difference {error:.1e}"
        if error <= self.limit and weight == expected:
            return []
        of = f"{ours:.9g} over weight {weight:g} instead of {theirs:.9g} over {expected:g}"
        return [Finding(BUG, "", f"step {self.step}: the loss is {of}")]

    def _norms(self) -> list[Finding]:
        """Equal gradients must give the reference's norm on every rank."""
        ours, theirs = (
            {r.rank: e.value for r in recording.ranks for e in r.of(Norm, self.step)[::-1]}
            for recording in (self.candidate, self.reference)
        )
        if not ours or 0 not in theirs:
            return []
        limit = max(tolerances.NORM, self.limit)
        off = {r: v for r, v in ours.items() if abs(v - theirs[0]) > limit * theirs[0]}
        if not off:
            return []
        bars = (("reference", 1.0), *((f"rank {r}", v / theirs[0]) for r, v in ours.items()))
        agree, first = len({round(v / theirs[0], 6) for v in ours.values()}) == 1, min(off)
        bug = "norm-counts-replicas" if agree and off[first] > theirs[0] else "clip-per-rank"
        sentence = (
            f"step {self.step}: gradients are right, but the norm is {off[first]:.6g} on rank {first} instead of "
            f"{theirs[0]:.6g}"
        )
        return [Finding(BUG, bug, sentence, axis=axis_over(self.candidate, tuple(ours)), coefficients=bars)]

    def _updates(self) -> list[Finding]:
        """Equal gradients must give equal updates: left are the clip factor, the learning rate, the optimizer."""
        analysis, after = self.ours, whole_values(self.theirs, "after")
        starts = {(name, rank): both for name, rank, *both in self._sides("parameter", self.start)}
        apart: dict[str, float] = {}
        for name, rank, *ends in self._sides("after", after):
            # Adam makes a full step of what is rounding alone.
            if (name, rank) not in starts or analysis.negligible(name) or rank in analysis.owners_step.get(name, ()):
                continue
            both = ends, starts[name, rank]
            if any(one is None or not one.numel() for of in both for one in of):
                continue
            moved, expected = (difference(*one) for one in zip(*both, strict=True))  # type: ignore[arg-type]
            rounding = tolerances.UPDATE.get(analysis.about[rank][name].dtype, tolerances.UPDATE_OTHER)
            apart_by, size = norm(difference(moved, expected)), norm(expected)
            if apart_by > rounding * max(size, tolerances.NOTHING):
                apart[name] = apart_by / max(size, 1e-300)
        fed = str(self.step) in self.reference.about.get("again", {})  # then zeros may be left of an earlier backward
        absent = tuple(
            name
            for name, theirs in sorted(self.names.items())
            if (name in apart or not (theirs in after or fed))
            and class_of(name) == "experts"
            and self.theirs.info(theirs).gradient
            and not all(analysis.about[rank][name].gradient for rank in analysis.holders(name))
        )
        if absent:
            how = "and move otherwise" if absent[0] in apart else "and would move otherwise by a decay or a momentum"
            sentence = f"step {self.step}: {listed(absent)} have no gradient where the reference has zeros, {how}"
            verdict = BUG if absent[0] in apart else INCONCLUSIVE
            return [Finding(verdict, "expert-none", sentence, tensors=absent)]
        if not apart:
            return []
        names, most = tuple(sorted(apart)), max(apart.values())
        sentence = f"step {self.step}: gradients are equal but the updates of {listed(names)} differ (by {most:.1e})"
        return [Finding(INCONCLUSIVE, "", sentence, tensors=names)]


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


def places_of(analysis: Analysis, start: Mapping[str, Value], names: dict[str, str]) -> dict[str, dict[int, Place]]:
    """By name and rank: where what the rank holds stands in the whole tensor."""
    found: dict[str, dict[int, Place]] = {}
    for name, theirs in names.items():
        holders = analysis.holders(name)
        found[name] = {}
        for i, rank in enumerate(holders):
            info = analysis.about[rank][name]
            local, final = (of_rank(analysis, rank, kind, name) for kind in ("parameter", "final"))
            if theirs not in start or local is None:
                continue
            spot = place(local, start[theirs], info, i, len(holders))
            if not local.numel() and final is not None and tuple(final.shape) == tuple(start[theirs].shape):
                spot = Place()  # ZeRO 3 of DeepSpeed: nothing is held between steps, and the whole gradient is told
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
