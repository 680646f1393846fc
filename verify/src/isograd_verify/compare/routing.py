"""Choices of experts against the reference's: how many tokens went elsewhere by rounding, and what that excuses
(docs/verify.md, where rounding decides between experts).

A flip takes from one expert what it adds to another, and a gradient G becomes G + E. Of E nothing is known. But if all
of several tensors are one and the same multiple of G, by the size of a group or the number of micro-batches, and little
else is left of them, then E would have to be nearly a multiple of G in each: flips do not do that, and it is a bug.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from isograd_verify import tolerances
from isograd_verify.compare.classes import Fitted
from isograd_verify.judge import patterns
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.patterns import Symptom, bug_of, class_of, classes_of
from isograd_verify.record.choices import counterpart, joined, read
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject, listed
from isograd_verify.tell.wording import axis_over, group_sizes, meanings


def factors(analysis: Analysis, fitted: Fitted, flipped: int) -> list[Finding]:
    """One finding for all gradients, else one for each kind of parameter. `fitted`: of each tensor."""
    usable = [
        n for n in fitted if math.prod(analysis.info(n).whole) >= tolerances.FLIP_ELEMENTS and not analysis.null(n)
    ]
    everything = _shared_factor(analysis, fitted, usable, flipped, True)
    if everything is not None:
        return [everything]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in usable:
        kinds[class_of(name)].append(name)
    found = (_shared_factor(analysis, fitted, names, flipped, False) for names in kinds.values())
    return [one for one in found if one is not None]


def _shared_factor(
    analysis: Analysis, fitted: Fitted, names: Collection[str], flipped: int, everything: bool
) -> Finding | None:
    if len(names) < tolerances.FLIP_TENSORS:
        return None
    sizes = {*group_sizes(analysis.recording), analysis.micros} - {0, 1}
    for value in (v for size in sorted(sizes) for v in (float(size), 1 / size)):
        rests = [math.hypot(fitted[n][1], fitted[n][0] - value) / value for n in names]  # of the factor's tensor
        if max(rests) * tolerances.FLIP_SURE <= abs(value - 1) / max(value, 1.0):
            break
    else:
        return None
    of = meanings(analysis.recording, analysis.micros, value)
    bug = bug_of(Symptom(patterns.SCALED, value), names, everything, group_sizes(analysis.recording), of)
    whom = f"all {len(names)} gradients" if everything else f"{classes_of(names)} ({listed(list(names))})"
    sentence = (
        f"step {analysis.step}: {whom}: {value:.4g} times what they should be ({' or '.join(of.values())}); up to "
        f"{max(rests):.1%} of a tensor is left, which {flipped} flipped choices may explain, as they do not the factor"
    )
    bars = (("reference", 1.0), ("here", value))
    axis = " or ".join(of) or axis_over(analysis.recording, analysis.all_ranks)
    return Finding(BUG, bug, sentence, tensors=tuple(sorted(names)), axis=axis, coefficients=bars)


ADVICE = "run it once more with the reference's choices (--replay-routing): what differs then is no flip"


@dataclass
class Counts:
    """How many tokens' choices of a step were compared, and how they came out."""

    tokens: int = 0
    flipped: int = 0  # other choices from scores that are the same to rounding
    apart: int = 0  # other choices from other scores
    unknown: int = 0  # rows that the reference does not have: padding, or what they are made of differs already
    modules: Counter[str] = field(default_factory=Counter)  # flips in each


def counted(reference: Recording, candidate: Recording, step: int) -> Counts:
    """Over all ranks, layers and micro-batches of a step."""
    counts = Counts()
    known = joined(one for record in reference.ranks for one in read(record.tensors(step)))
    for record in candidate.ranks:
        for one in read(record.tensors(step)):
            theirs = counterpart(known, one)
            if theirs is None:
                continue
            rows = one.find(theirs)
            other = (rows >= 0) & ~one.same_choice(theirs, rows)
            flips = other & one.same_scores(theirs, rows)
            counts.tokens += len(rows)
            counts.flipped += int(flips.sum())
            counts.apart += int((other & ~flips).sum())
            counts.unknown += int((rows < 0).sum())
            counts.modules[one.module] += int(flips.sum())
    return counts


def without_flips(
    reference: Recording,
    candidate: Recording,
    step: int,
    found: list[Finding],
    subject: Subject,
    fit: Callable[[], Fitted],
) -> list[Finding]:
    """The findings of a step, with what flips leave of them; `subject` gets numbers, `fit` gives tensors' factors."""
    counts = counted(reference, candidate, step)
    if not counts.tokens:
        return found
    replayed = bool(reference.about.get("replay") or candidate.about.get("replay"))
    told = f"{counts.flipped} of {counts.tokens} choices fell otherwise"
    where = ", ".join(f"{count} in {module}" for module, count in counts.modules.most_common(3) if count)
    rest = [f"{counts.apart} from other scores"] if counts.apart else []
    rest += [f"{counts.unknown} of rows that the reference has not (padding is one)"] if counts.unknown else []
    subject.facts["routing"] = ", ".join([told + (" and were replayed" if replayed and counts.flipped else ""), *rest])
    if replayed or not counts.flipped:
        return found
    open_ = [f for f in found if f.verdict in (BUG, INCONCLUSIVE)]
    if not open_:
        return found
    sure = factors(Analysis(candidate, step), fit(), counts.flipped)
    known = {t for f in sure for t in f.tensors}
    tensors = tuple(sorted({t for f in open_ for t in f.tensors} - known))
    if sure and not tensors:
        return [*sure, *(f for f in found if f.verdict == NOTE)]
    sentence = (
        f"step {step}: {told} than in the reference, although their scores are the same to rounding ({where}): tokens "
        f"went to other experts, so what differs ({listed(tensors) or 'the loss'}) may be no bug; {ADVICE}"
    )
    return [*sure, Finding(INCONCLUSIVE, "", sentence, tensors=tensors), *(f for f in found if f.verdict == NOTE)]
