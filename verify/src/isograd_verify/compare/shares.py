"""With what factor a backward's gradient is a part of the gradient of one device (combined.py adds them): one device's
first step tells whether its loss is a mean over all labels of a step, a sum, or divided by a number of its own.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import LabelWeight, Loss, LossTerm, MeanWeight, Step
from isograd_verify.record.recording import RankRecord, Recording
from isograd_verify.tell.wording import equal

SEVERAL = (
    "the loss has terms whose numbers of elements vary differently from rank to rank, or are not known: no one factor "
    "makes them those of one device"
)
SAME_DATA = "record both runs on the same data, and compare them with 'isograd-verify compare'"
WEIGH = "put 'loss = isograd_verify.weigh(loss, number_of_labels)' behind the line of the loss"


class NoReference(Exception):
    """Why there is no step of one device to compare with, and what would make one."""

    def __init__(self, why: str, fix: str, bug: str = "") -> None:
        """`bug`: what is wrong in the program itself, where that is the reason."""
        super().__init__(why)
        self.why, self.fix, self.bug = why, fix, bug


class Mixed(NoReference):
    """What a rank computes depends on the rows of other ranks: one device can be given them together only."""


@dataclass(frozen=True)
class Again:
    """A backward of some rank, done again in a world of one, where it is a step of its own."""

    rank: int
    micro: int
    record: RankRecord
    step: int
    of: int = 1  # the step of the other run

    @property
    def about(self) -> Step:
        """What was told at its end."""
        return self.record.of(Step, self.step)[0]


@dataclass(frozen=True)
class Call:
    """One call of a loss."""

    micro: int
    count: float  # its labels
    weight: float  # of each
    average: bool  # an operator took the mean: the divisor is the count by no chance
    place: str  # in the program

    @property
    def total(self) -> float:
        """What its labels weigh together."""
        return self.count * self.weight


TermTracker = dict[str, list[Call]]  # a place in the program -> the calls there
Pair = tuple[list[Call], list[Call]]  # of one term: the calls of the program's own step, and those done again


def shares(alone: Recording, again: list[Again], scale: dict[str, float]) -> list[float]:
    """The factor of each backward of `again`; `alone` is the program's own first step. `scale` gets each place of a
    mean that counts another number of times than once, which a coefficient does, or a divisor meant for all ranks."""
    factor = own_factor(alone)
    every = [(alone.ranks[0], 1), *((one.record, one.step) for one in again)]
    sums = {event.term for record, step in every for event in record.of(MeanWeight, step) if event.elements}
    labels = _labels(*every[0]), [_labels(*of) for of in every[1:]]
    means = _means(*every[0], sums), [_means(*of, sums) for of in every[1:]]
    counts = [{term: [call.count for call in calls] for term, calls in terms.items()} for terms in means[1]]
    try:
        found = _by_terms(*labels, factor, scale)
        counted = True
    except NoReference as error:
        if not means[0]:
            raise
        first, counted = error, False
    if not counted and any(labels[1]) and not all(means[1]):  # losses of several kinds, each with its own backward
        either = ({**labels[0], **means[0]}, [a or b for a, b in zip(labels[1], means[1], strict=True)])
        found = _by_terms(*either, factor, scale)
        if not equal(found):
            raise first
    elif not counted:
        found = _by_terms(*means, factor, scale)
    elif any(one != counts[0] for one in counts) and not all(
        map(equal, zip(found, _by_terms(*means, factor, {}), strict=True))
    ):
        raise NoReference(SEVERAL, SAME_DATA)
    whole = _of_weights_alone(again)
    if whole and abs(sum(found) - factor * alone.ranks[0].of(Step, 1)[0].backwards) > tolerances.FACTOR:
        raise NoReference(SEVERAL, SAME_DATA)
    if not equal(found):  # else terms that nobody counts have equal parts, too
        for one in again:
            if counted:
                _is_all_of_the_loss(one, whole)
            elif not _means_alone(one):
                raise NoReference(f"{first.why}, and its means are over different numbers of elements", WEIGH)
    return found


def in_every_call(own: RankRecord, calls: list[RankRecord], step: int, scale: dict[str, float]) -> float:
    """The one factor of all backwards of a loss, from every call of it. `own`: those of one rank, a step by itself."""
    terms_of = _labels if own.of(LabelWeight, step) else _means
    found = _by_terms(terms_of(own, step), [terms_of(call, step) for call in calls], 1.0, scale)
    if not equal(found):
        raise NoReference(SEVERAL, SAME_DATA)
    return found[0]


def counts_all(alone: Recording, again: list[Again]) -> None:
    """Given the rows of all ranks, labels weigh together, or each, what those of a first step do."""
    own, all_rows = _labels(alone.ranks[0], 1), [_labels(one.record, one.step) for one in again]
    for site in own.keys() & set(_sites(all_rows)):
        calls = [call for terms in all_rows for call in terms.get(site, [])]
        whole, now = (sum(call.total for call in of) for of in (own[site], calls))
        a_sum = not _one(whole) and equal([call.weight for call in (*own[site], *calls)])
        if not equal((whole, now)) and not a_sum:
            raise NoReference(
                f"the labels of the loss at {site} weigh {now:.4g} together where one device is given the rows of all "
                f"ranks, and {whole:.4g} in the program's own step: their number is counted before the model is called",
                SAME_DATA,
            )


def steady(candidate: Recording, step: int, begin: int) -> bool:
    """Whether each term weighs in a step what it weighs in an earlier one, in all or each of its numbers."""
    for terms_of in (_labels, _means):
        for own in candidate.ranks:
            if terms_of(own, step).keys() - terms_of(own, begin).keys():
                return False
        for site in _sites([terms_of(own, step) for own in candidate.ranks]):
            first, now = ([c for own in candidate.ranks for c in terms_of(own, n).get(site, [])] for n in (begin, step))
            same = equal([call.weight for call in (*first, *now)])
            if not same and not equal(sum(call.total for call in calls) for calls in (first, now)):
                return False
    return True


def _means_alone(one: Again) -> bool:
    """Whether means, or sums that are divided, are all of the loss: then nothing else is scaled by their numbers."""
    terms, root = one.record.of(LossTerm, one.step), float(one.record.tensors(one.step)["loss"])
    counted = Counter(call.place for calls in _means(one.record, one.step).values() for call in calls)
    every = len(terms) == 1 or Counter(term.site for term in terms) <= counted
    return every and equal((root, sum(term.share for term in terms)))


def _of_weights_alone(again: list[Again]) -> float:
    """What terms add to each loss that have no rows: they are the same in every backward, on all ranks."""
    told = [(one.record.of(LossTerm, one.step), _labels(one.record, one.step)) for one in again]
    terms = [Counter(term.share for term in of if term.site not in labels) for of, labels in told]
    return sum(functools.reduce(operator.and_, terms).elements()) if len(again) > 1 else 0.0


def _is_all_of_the_loss(one: Again, whole: float) -> None:
    """The counted terms add up to the loss, but for `whole`: no other term is scaled by their counts."""
    root = float(one.record.tensors(one.step)["loss"])
    weights = [call.weight for calls in _labels(one.record, one.step).values() for call in calls]
    counted = sum(event.count * event.value for event in one.record.of(Loss, one.step)) * weights[0]
    if not equal((root, counted + whole)):
        raise NoReference(SEVERAL, SAME_DATA)


def own_factor(alone: Recording) -> float:
    """What the program does to a gradient on one device after backward: divides by a count, removes a loss's scale."""
    analysis = Analysis(alone, 1)
    along = squares = 0.0
    added = {name: torch.stack(list(parts.values())).sum(0) for name, parts in analysis.parts.items() if parts}
    for name, total in added.items():
        if name in analysis.sums[0]:
            along += float(analysis.sums[0][name] @ total)
            squares += float(total @ total)
    factor = along / squares if squares else 1.0
    for name, total in added.items():
        seen = analysis.sums[0].get(name)
        rest = float((seen - factor * total).norm()) if seen is not None else 0.0
        if rest > tolerances.LOOSER * analysis.tolerance(name) * math.sqrt(squares) * abs(factor):
            raise NoReference(
                f"on one device the gradient of {name} is not what its backwards added, times one factor",
                "watch the program on one device by itself: 'isograd-verify run -- COMMAND'",
            )
    return factor


def _labels(record: RankRecord, step: int) -> TermTracker:
    found: TermTracker = defaultdict(list)
    for event in record.of(LabelWeight, step):
        if event.count and abs(event.high - event.low) <= tolerances.FACTOR * abs(event.high):
            found[event.site].append(Call(event.micro, event.count, event.low, event.average, event.site))
    return dict(found)


def _means(record: RankRecord, step: int, sums: Collection[str] = ()) -> TermTracker:
    """A sum that is divided by another number than its own of elements (that of the whole step, say) is no mean.
    `sums`: terms known for such by another call, though here their divisor be a number of elements by chance."""
    found: TermTracker = defaultdict(list)
    added = {(e.micro, e.site): e.nonzero or e.count for e in record.of(MeanWeight, step) if e.divided}
    for event in record.of(MeanWeight, step):
        if event.weight and not event.divided:
            by_chance = event.term in sums and not event.average
            elements = event.elements or (added.get((event.micro, event.site), 0.0) if by_chance else 0.0)
            count = elements or event.count
            found[event.term].append(Call(event.micro, count, event.weight, event.average, event.site))
    return dict(found)


def _by_terms(alone: TermTracker, again: list[TermTracker], factor: float, scale: dict[str, float]) -> list[float]:
    if not alone or not all(again):
        raise NoReference("the labels of the loss cannot be counted", WEIGH)
    pairs = {site: (alone.get(site, []), [t.get(site, []) for t in again]) for site in _sites(again)}
    apart = any(_means_of_their_own(*pair, factor) for pair in pairs.values())
    flat = {site: (own, [call for calls in theirs for call in calls]) for site, (own, theirs) in pairs.items()}
    of = {site: factor / (len({call.micro for call in own}) if apart and own else 1) for site, (own, _) in flat.items()}
    means = [pair for site, pair in flat.items() if _one(sum(call.total for call in pair[0]) * of[site])]
    sure = any(all(call.average for call in own) for own, _ in means)
    wanted = {
        site: _expected_weight(*pair, of[site], any(_as_that(pair, one, sure) for one in means), scale)
        for site, pair in flat.items()
    }
    shares = []
    for terms in again:
        found = [wanted[site] / call.weight for site, calls in terms.items() for call in calls]
        if max(found) - min(found) > tolerances.FACTOR * max(map(abs, found)):
            raise NoReference(SEVERAL, SAME_DATA)
        shares.append(found[0])
    return shares


def _sites(again: list[TermTracker]) -> Iterator[str]:
    return iter(dict.fromkeys(site for terms in again for site in terms))


def _one(weight: float) -> bool:
    """Or minus one: a loss may be the negative of a mean of log-probabilities."""
    return abs(abs(weight) - 1) <= tolerances.FACTOR


def _means_of_their_own(alone: list[Call], again: list[list[Call]], factor: float) -> bool:
    """Whether in each micro-batch the labels weigh one together, because each divides by its own number of labels."""
    by_micro: dict[int, list[Call]] = defaultdict(list)
    for call in alone:
        by_micro[call.micro].append(call)
    micros = [*by_micro.values(), *again]
    if not alone or not all(_one(sum(call.total for call in calls) * factor) for calls in micros):
        return False
    counts = [sum(call.count for call in calls) for calls in micros]
    return not equal(counts) or all(call.average for calls in micros for call in calls)


def _as_that(pair: Pair, other: Pair, sure: bool) -> bool:
    """Whether a term is a mean as another is. `sure`: an operator takes some mean of that weight."""
    ours, theirs = ([call for calls in of for call in calls] for of in (pair, other))
    same = [(a.micro, a.count) for a in ours] == [(b.micro, b.count) for b in theirs]
    uneven = same and not equal([call.count for call in ours])
    alike = uneven and equal([a.weight / b.weight for a, b in zip(ours, theirs, strict=True)])
    return alike or (sure and all(call.average for call in ours))


def _expected_weight(
    alone: list[Call], replayed: list[Call], factor: float, sure: bool, scale: dict[str, float]
) -> float:
    """The weight that a label of the whole step has in the gradient of one device. `sure`: it is a mean as another term
    is, so that another weight is a coefficient."""
    site = replayed[0].place
    if not alone:
        raise NoReference(f"the loss at {site} has no part in the first step on one device", WEIGH)
    calls = [*alone, *replayed]
    weights, counts = [call.weight for call in calls], [call.count for call in calls]
    whole = sum(call.total for call in alone) * factor  # of all labels of a step together
    per_label = whole / sum(call.count for call in replayed)
    if _one(whole) or sure:
        return per_label
    if equal(weights) and _one(weights[0] * factor):
        return weights[0] * factor  # a sum
    if factor != 1 and _one(factor * sum(call.count for call in alone)):
        return per_label  # a sum with a coefficient, and gradients that are divided by the number of labels
    scale[site] = whole
    if equal(weights) and not equal(counts):
        return weights[0] * factor  # divided by a number of the program's own
    if not equal(counts) and equal([call.total for call in replayed]):
        return per_label
    if all(call.average for call in calls) and len({call.micro for call in alone}) == 1:
        return per_label
    raise NoReference(
        f"all labels of a step together weigh {whole:.4g} on one device: whether the loss at {site} is a mean over "
        "them or is divided by a fixed number cannot be told",
        "let the loss be a mean over labels, or give the ranks different numbers of labels",
    )
