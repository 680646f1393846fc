"""One device's gradient of a step, put together from backwards that a world of one did one by one (watch/feed.py).

On the rows of one rank a loss divides by the labels of these rows, or of other data. So each backward's gradient is
scaled until every label weighs in it what a label of the whole step weighs on one device. That weight is read from the
program's own first step on one device: a mean there is a mean over all labels here, a sum is a sum. Where it cannot be
known, the comparison is refused (NoReference).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isograd.errors import VerifyError
from isograd.verify import tolerances
from isograd.verify.compare.same_data import contents, same_data
from isograd.verify.judge.analysis import Analysis
from isograd.verify.record.events import (
    Backward,
    Given,
    LabelWeight,
    Loss,
    Mean,
    Parameter,
    Step,
    key,
    micro_of,
    use_of,
)
from isograd.verify.record.recording import RankRecord, RankWriter, Recording
from isograd.verify.record.sketch import dtype_name
from isograd.verify.tell.findings import listed

SEVERAL = (
    "the loss has terms whose numbers of elements vary differently from rank to rank, or are not known: no one factor "
    "makes them those of one device"
)
SAME_DATA = "record both runs on the same data, and compare them with 'isograd verify compare'"
WEIGH = "put 'loss = isograd.verify.weigh(loss, number_of_labels)' behind the line of the loss"
Terms = dict[str, list[tuple[float, float]]]  # a place in the program -> (labels, weight of each) of each call there


class NoReference(Exception):
    """Why there is no step of one device to compare with, and what would make one."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


@dataclass(frozen=True)
class Again:
    """A backward of some rank, done again in a world of one, where it is a step of its own."""

    rank: int
    micro: int
    record: RankRecord
    step: int

    @property
    def about(self) -> Step:
        """What was told at its end."""
        return self.record.of(Step, self.step)[0]


def distinct(candidate: Recording) -> list[int]:
    """Ranks with data of their own: of several that were given the same, the first."""
    seen: dict[tuple[str, ...], int] = {}
    for record in candidate.ranks:
        given = [f"{e.micro} {name} {t.hash}" for e in record.of(Given, 1) for name, t in e.tensors.items()]
        labels = [f"{e.micro} {e.labels}" for e in record.of(LabelWeight, 1)]
        seen.setdefault((*given, *labels) or (str(record.rank),), record.rank)
    return list(seen.values())


def saw_the_same(one: Recording, candidate: Recording) -> bool:
    """Whether a first step in a world of one was given by itself what the ranks were given."""
    if not contents(one):
        return False
    try:
        same_data(one, candidate)
    except VerifyError as error:
        if error.code != "IG722":
            raise
        return False
    return True


def combine(candidate: Recording, alone: Recording, again: list[Again], path: Path) -> None:
    """Writes a recording of one step of one device. `alone`: the program's own first step there."""
    weights_stayed(alone, again)
    same_beginnings(candidate, again)
    shares = _shares(alone, again)
    own = alone.ranks[0]
    names = list(dict.fromkeys(name for one in again for name in one.record.group(one.step, "sum")))
    tensors = {name: t for name, t in own.tensors(1).items() if name.startswith("parameter/")}
    for kind in ("sum", "final"):
        for name in names:
            total = _total([(one, share, f"{kind}/{name}") for one, share in zip(again, shares, strict=True)])
            if total is not None:
                tensors[f"{kind}/{name}"] = total
    writer = RankWriter(path, 0, 1)
    for number, (one, share) in enumerate(zip(again, shares, strict=True)):
        for part, value in one.record.group(one.step, "part").items():
            micro, _, name = part.partition("/")
            assert micro_of(int(micro)) == 0
            tensors[f"part/{key(number, use_of(int(micro)))}/{name}"] = share * value
        for choice, value in one.record.group(one.step, "choice").items():
            tensors[f"choice/{number}/{choice.partition('/')[2]}"] = value
        for event in one.record.of(Backward, one.step):
            writer.event(replace(event, step=1, micro=number))
        for given in one.record.of(Given, one.step):
            writer.event(replace(given, step=1, micro=number, forward=number))
        for weight in one.record.of(LabelWeight, one.step):
            writer.event(replace(weight, step=1, micro=number, low=share * weight.low, high=share * weight.high))
    writer.event(replace(own.of(Step, 1)[0], parameters=_parameters(own, tensors), backwards=len(again), left_out={}))
    writer.tensors(1, tensors)
    writer.close()


def _parameters(own: RankRecord, tensors: dict[str, Tensor]) -> dict[str, Parameter]:
    found = {}
    for name, about in own.of(Step, 1)[0].parameters.items():
        final = tensors.get(f"final/{name}")
        kind = dtype_name(final) if final is not None else about.gradient_dtype
        found[name] = replace(
            about, gradient=f"sum/{name}" in tensors, gradient_hash="", gradient_dtype=kind, finite=True
        )
    return found


def _total(terms: list[tuple[Again, float, str]]) -> Tensor | None:
    """The sum of one tensor over backwards; None when one of them had it and it was too large to be recorded."""
    total: Tensor | None = None
    kind = torch.float64
    for one, share, path in terms:
        tensors, name = one.record.tensors(one.step), path.partition("/")[2]
        if path not in tensors:
            if f"sum/{name}" in tensors:
                return None
            continue
        kind = tensors[path].dtype
        scaled = share * tensors[path].double()
        total = scaled if total is None else total + scaled
    return None if total is None else total.to(kind)


def weights_stayed(alone: Recording, again: list[Again]) -> None:
    """Every backward was done with the weights of the first step."""
    began = {name: about.before for name, about in alone.ranks[0].of(Step, 1)[0].parameters.items()}
    for one in again:
        moved = [n for n, about in one.about.parameters.items() if about.before != began.get(n)]
        if moved:
            raise NoReference(
                f"the weights of {listed(moved)} changed while data were replayed: something else than a step of a "
                "torch optimizer without a closure changes them",
                SAME_DATA,
            )


def same_beginnings(candidate: Recording, again: list[Again]) -> None:
    """What comes back to the model's output is the same on one device, but for a factor: so are targets that nobody
    hashes, and the loss does not mix what several ranks have computed."""
    for one in again:
        theirs = _begun(candidate.ranks[one.rank], 1, one.micro)
        ours = _begun(one.record, one.step, 0)
        limit = max(tolerances.LIMITS.get(a.gradient_dtype, (0.0, 0.0))[1] for a in one.about.parameters.values())
        equal = [_apart(a, b) <= max(limit, tolerances.SAME) for a, b in zip(theirs, ours, strict=False)]
        if not equal or not all(equal) or len(theirs) != len(ours):
            raise NoReference(
                f"backward begins otherwise on one device with the data of rank {one.rank}, micro-batch {one.micro}: "
                "its loss sees what other ranks computed, or labels that are made after the model was called",
                "make inputs and labels before the model is called, as local variables of the functions around the "
                "call; where the loss joins ranks, record both runs on the same data and use 'verify compare'",
            )


def _apart(a: Tensor, b: Tensor) -> float:
    """How far apart two vectors point; 0 where both are zero."""
    return float((a / max(float(a.norm()), 1e-300) - b / max(float(b.norm()), 1e-300)).norm())


def _begun(record: RankRecord, step: int, micro: int) -> list[Tensor]:
    found = record.group(step, f"begun/{micro}")
    return [found[number] for number in sorted(found, key=int)]


# -- what a label weighs -----------------------------------------------------------------------------------------


def _shares(alone: Recording, again: list[Again]) -> list[float]:
    """For each backward: the factor with which its gradient is a part of the gradient of one device."""
    factor = _own_factor(alone)
    labels, means = (
        (terms_of(alone.ranks[0], 1), [terms_of(one.record, one.step) for one in again])
        for terms_of in (_labels, _means)
    )
    try:
        shares = _by_terms(*labels, factor)
        counted = True
    except NoReference as error:
        if not means[0]:
            raise
        first, counted = error, False
    if not counted:
        shares = _by_terms(*means, factor)
    elif _uneven(means[1]) and not all(map(_near, shares, _by_terms(*means, factor))):
        raise NoReference(SEVERAL, SAME_DATA)
    if not all(_near(shares[0], share) for share in shares):  # else terms that nobody counts have equal parts, too
        if not counted:
            raise NoReference(f"{first.why}, and its means are over different numbers of elements", WEIGH)
        for one in again:
            _is_all_of_the_loss(one)
    return shares


def _uneven(again: list[Terms]) -> bool:
    """Whether some term's numbers of elements differ between backwards."""
    counts = [{term: [n for n, _ in calls] for term, calls in terms.items()} for terms in again]
    return any(one != counts[0] for one in counts)


def _is_all_of_the_loss(one: Again) -> None:
    """The counted terms add up to the number with which backward began: no other term is scaled by their counts."""
    root = float(one.record.tensors(one.step)["loss"])
    weights = [w for calls in _labels(one.record, one.step).values() for _, w in calls]
    counted = sum(event.count * event.value for event in one.record.of(Loss, one.step)) * weights[0]
    if not _near(root, counted):
        raise NoReference(SEVERAL, SAME_DATA)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= tolerances.FACTOR * max(abs(a), abs(b))


def _own_factor(alone: Recording) -> float:
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
                "watch the program on one device by itself: 'isograd verify run -- COMMAND'",
            )
    return factor


def _labels(record: RankRecord, step: int) -> Terms:
    found: Terms = defaultdict(list)
    for event in record.of(LabelWeight, step):
        if event.count and abs(event.high - event.low) <= tolerances.FACTOR * abs(event.high):
            found[event.site].append((event.count, event.low))
    return dict(found)


def _means(record: RankRecord, step: int) -> Terms:
    found: Terms = defaultdict(list)
    for event in record.of(Mean, step):
        if event.weight and not event.divided:
            found[event.term].append((event.count, event.weight))
    return dict(found)


def _by_terms(alone: Terms, again: list[Terms], factor: float) -> list[float]:
    if not alone or not all(again):
        raise NoReference("the labels of the loss cannot be counted", WEIGH)
    wanted = {site: _wanted(alone.get(site, []), [t.get(site, []) for t in again], factor) for site in _sites(again)}
    shares = []
    for terms in again:
        found = [wanted[site] / weight for site, calls in terms.items() for _, weight in calls]
        if max(found) - min(found) > tolerances.FACTOR * max(map(abs, found)):
            raise NoReference(SEVERAL, SAME_DATA)
        shares.append(found[0])
    return shares


def _sites(again: list[Terms]) -> Iterator[str]:
    return iter(dict.fromkeys(site for terms in again for site in terms))


def _wanted(alone: list[tuple[float, float]], again: list[list[tuple[float, float]]], factor: float) -> float:
    """The weight that a label of the whole step has in the gradient of one device."""
    if not alone:
        raise NoReference("a term of the loss has no part in the first step on one device", WEIGH)

    def equal(values: list[float]) -> bool:
        return max(values) - min(values) <= tolerances.FACTOR * max(map(abs, values))

    def one(weight: float) -> bool:  # or minus one: a loss may be the negative of a mean of log-probabilities
        return abs(abs(weight) - 1) <= tolerances.FACTOR

    replayed = [call for calls in again for call in calls]
    weights, counts = [w for _, w in (*alone, *replayed)], [n for n, _ in (*alone, *replayed)]
    whole = sum(n * w for n, w in alone) * factor  # of all labels of a step together
    per_label = whole / sum(n for n, _ in replayed)
    if one(whole):
        return per_label
    if equal(weights) and (not equal(counts) or one(weights[0] * factor)):
        return weights[0] * factor  # a sum, or one divided by a number of the program's own
    if not equal(counts) and equal([n * w for n, w in replayed]):
        return per_label
    raise NoReference(
        f"all labels of a step together weigh {whole:.4g} on one device: whether the loss is a mean over them or is "
        "divided by a fixed number cannot be told",
        "let the loss be a mean over labels, or give the ranks different numbers of labels",
    )
