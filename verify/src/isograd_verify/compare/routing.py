"""Choices of experts against the reference's: how many tokens went elsewhere by rounding, and what that excuses.

A token whose scores are the reference's to rounding and whose choice is not has *flipped*. Its gradients are those of
other experts, so what differs after a flip is not shown to be a bug, unless it is what flips cannot do
(beyond_flips.py), and nothing is shown to be right. A run with the reference's choices shows it (--replay-routing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from isograd_verify.compare.beyond_flips import factors
from isograd_verify.compare.classes import Fitted
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.choices import counterpart, joined, read
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject, listed

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
    """The findings of a step, with what flips leave of them. `subject` is told the numbers. `fit`: the factor of each
    tensor, and what is left of it."""
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
