"""Checks of experts and of the terms of a loss: the balance loss counts as often as the loss of the labels does, the
bias of the choice moves once a step, and a forward that is computed once more chooses as it did before.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.patterns import class_of
from isograd_verify.judge.terms import step_shares, terms, too_often
from isograd_verify.record.events import Changed, Choice, Coefficient, LossTerm, micro_of
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, listed
from isograd_verify.tell.wording import equal, spread


def balance_counts(analysis: Analysis) -> Iterator[Finding]:
    """A balance loss counts, over all ranks and micro-batches, with the coefficient that the config tells."""
    events = [event for record in analysis.recording.ranks for event in record.of(Coefficient)]
    told = {event.name: event.value for event in events}
    coefficient, experts = told.get("router_aux_loss_coef"), told.get("num_experts", 1.0)
    if not analysis.losses or len({(e.name, e.value) for e in events}) != len(told):
        return
    share = step_shares(analysis)
    labels, calls = next(iter(analysis.losses.items()))
    main = sum(share.get(key, 0.0) * call.low * call.count for key, called in calls.items() for call in called)
    for site, found in terms(analysis).items():
        injected = all(term.injected for _, term in found)  # in each layer, and multiplied by the coefficient already
        wanted = len(found) / max(len(share), 1) if injected else coefficient
        scales = [1.0 if injected else _scale(term, coefficient or 0.0, experts) for _, term in found]
        if site == labels or not main or not wanted or not all(scales):
            continue
        weight = sum(often * term.weights[0] / scale for (often, term), scale in zip(found, scales, strict=True))
        factor = weight / wanted / main
        if abs(factor - 1) <= tolerances.TERM:
            return
        bug, axis, words = too_often(analysis, factor)
        if injected and not (bug.startswith("aux-times") and abs(factor - round(factor)) <= tolerances.FACTOR):
            continue  # a coefficient
        said = "and labels' to one for each call, of which there are" if injected else "the config says"
        sentence = (
            f"step {analysis.step}: the balance loss at {site} counts {factor:.4g} times where the labels count once: "
            f"its weights over ranks and micro-batches sum to {weight:.4g}, {said} {wanted:g}"
        ) + (f" ({words})" if words else "")
        bars = (("labels", 1.0), ("balance loss", factor))
        yield Finding(BUG if bug else INCONCLUSIVE, bug, sentence, axis=axis, coefficients=bars)
        return


def whole_terms(analysis: Analysis) -> Iterator[Finding]:
    """A term that each rank computes whole, of weights alone, counts once over all ranks and micro-batches."""
    share, (labels, calls) = step_shares(analysis), next(iter(analysis.losses.items()), ("", {}))
    main = sum(share.get(key, 0.0) * call.low * call.count for key, called in calls.items() for call in called)
    if abs(main - 1) > tolerances.FACTOR or analysis.same_data(analysis.all_ranks):
        return
    for site, found in terms(analysis).items():
        alike = all(n % len(share) == 0 for n in Counter(term.value for _, term in found).values())
        times = sum(often for often, _ in found) / len(found) * len(share)
        ways = [a / b for _, term in found for a, b in pairwise(term.weights) if b]
        bug, axis, words = too_often(analysis, times) if alike and site != labels else ("", "", "")
        counts = any(term.share for _, term in found)  # not 0 times an output that is not used
        if bug and counts and not any(abs(way * times - 1) <= tolerances.FACTOR for way in ways):
            sentence = (
                f"step {analysis.step}: the term of the loss at {site} is the same on all ranks, and counts "
                f"{times:.4g} times ({words}) where labels count once, but for its coefficient; one device would decide"
            )
            yield Finding(INCONCLUSIVE, bug, sentence, axis=axis, site=site)


def coefficients_unjudged(analysis: Analysis) -> Iterator[Finding]:
    """What a term of the loss is multiplied by is right on one device alone; a note where no config tells it."""
    config = any(record.of(Coefficient) for record in analysis.recording.ranks)
    if analysis.step != analysis.recording.steps[0] or analysis.world == 1 or config:
        return
    events = [event for _, event in analysis.of(LossTerm)]
    times = {e.site: e.weights[0] / e.weights[e.joined] for e in events if e.joined > 0 and e.weights[e.joined]}
    known = {site: factor for site, factor in times.items() if site not in analysis.losses and abs(factor) != 1}
    if known:
        told = " and ".join(f"{factor:.4g} times the term at {site}" for site, factor in known.items())
        sentence = (
            f"step {analysis.step}: the loss has {told}: whether the number of ranks or of micro-batches is a part of "
            "that is not judged without one device"
        )
        yield Finding(NOTE, "", sentence, site=next(iter(known)))


def _scale(term: LossTerm, coefficient: float, experts: float) -> float:
    """The number of experts where the term is multiplied by it on its way to the other terms, else 1; 0 where it is not
    multiplied by the coefficient, and is another term."""
    way = term.weights[: term.joined + 1] if term.joined > 0 else ()
    steps = [a / b for a, b in pairwise(way) if b]

    def among(number: float) -> bool:
        return any(abs(step - number) <= tolerances.FACTOR * number for step in steps)

    return 0.0 if not among(coefficient) else experts if among(experts) else 1.0


def computed_again(analysis: Analysis) -> Iterator[Finding]:
    """What every micro-batch of one loss adds as a whole counts once, and not once for each of them."""
    if not _one_loss(analysis):
        return
    whole: dict[str, float] = {}
    parts: dict[str, float] = {}
    for name in analysis.names:
        found = next((f for seen in analysis.observed(name) if (f := analysis.fit(seen)) is not None), None)
        if not analysis.null(name) and found is not None and found.uniform and (kind := _kind(analysis, name)):
            (whole if kind == "whole" else parts)[name] = found.each[0]
    if not whole or not parts or not equal(parts.values()):
        return
    usual, micros = next(iter(parts.values())), analysis.micros
    often = {n: micros * c / usual for n, c in whole.items() if spread((micros * c, usual)) > tolerances.COUNTS}
    if often:
        factors = " and ".join(sorted({f"{f:.4g}" for f in often.values()}))
        sentence = (
            f"step {analysis.step}: all {micros} micro-batches compute one loss, to which each adds the gradient of "
            f"its own rows, but the whole gradient of {listed(tuple(often))}: it counts {factors} times"
        )
        bug = "temperature-scale" if {class_of(name) for name in often} == {"temperature"} else ""
        bars = (("most tensors", 1.0), *often.items())
        yield Finding(BUG, bug, sentence, tensors=tuple(often), axis="micro-batches", coefficients=bars[:9])


def _one_loss(analysis: Analysis) -> bool:
    """Whether every micro-batch of a rank has the same losses, although the model was given other rows."""
    for record in analysis.recording.ranks:
        losses: dict[int, dict[str, float]] = defaultdict(dict)
        for event in record.of(LossTerm, analysis.step):
            losses[micro_of(event.micro)][event.site] = event.value
        first, *others = losses.values() or [{}]
        if len(losses) != analysis.micros or not others or any(one.keys() != first.keys() for one in others):
            return False
        if any(spread((one[site], value)) > tolerances.SAME_LOSS for one in others for site, value in first.items()):
            return False
        data = [analysis.data.get((record.rank, micro)) for micro in losses]
        if None in data or len(set(data)) < len(data):
            return False
    return True


def _kind(analysis: Analysis, name: str) -> str:
    """'whole': each rank adds the same in every micro-batch; 'parts': something else in each; '': neither is sure."""
    by_rank: dict[int, list[Tensor]] = defaultdict(list)
    for (rank, _), part in analysis.parts[name].items():
        by_rank[rank].append(part)
    kinds = set()
    for first, *others in by_rank.values():
        apart = [float((one - first).norm()) / max(float(first.norm()), 1e-300) for one in others]
        same = all(a <= analysis.tolerance(name) for a in apart)
        other = all(a > tolerances.LOOSE * analysis.tolerance(name) for a in apart)
        kinds.add("whole" if same else "parts" if other else "")
    return kinds.pop() if len(kinds) == 1 else ""


BIAS = re.compile(r"(expert|choice|router|gate|score|correction)s?_(\w+_)*bias$")
COUNT = re.compile(r"expert|router|(^|[._])(moe|chosen|load|tokens_per)([._]|$)")


def choice_bias(analysis: Analysis) -> Iterator[Finding]:
    """The bias of the choice of experts is the same in all micro-batches of a step."""
    moved: dict[str, set[int]] = defaultdict(set)
    between: set[str] = set()
    for _, event, name in _changes(analysis, BIAS):
        moved[name].add(event.micro)
        between |= {name} if event.during == "between" else set()
    names = tuple(sorted(name for name, micros in moved.items() if len(micros) > 1 or name in between))
    if names:
        sentence = (
            f"step {analysis.step}: {listed(names)} changes between the micro-batches of a step: later ones are routed "
            "by another bias, and how they are cut decides what it becomes"
        )
        yield Finding(BUG, "bias-per-micro", sentence, axis="micro-batches")


def counted_once(analysis: Analysis) -> Iterator[Finding]:
    """What a forward counts of experts' tokens is not counted again when backward computes it once more."""
    during: dict[str, dict[str, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for rank, event, name in _changes(analysis, COUNT):
        during[name][event.during].add((rank, event.micro))
    names = tuple(sorted(name for name, seen in during.items() if seen["forward"] & seen["backward"]))
    if names:
        sentence = (
            f"step {analysis.step}: {listed(names)} changes in a forward, and again in its backward, "
            "which computes that forward once more: tokens are counted twice"
        )
        yield Finding(BUG, "bias-twice", sentence)


def _changes(analysis: Analysis, buffers: re.Pattern[str]) -> Iterator[tuple[int, Changed, str]]:
    for rank, event in analysis.of(Changed):
        yield from ((rank, event, name) for name in event.names if buffers.search(name))


def same_choice(analysis: Analysis) -> Iterator[Finding]:
    """A choice that is made again in backward is one that was made in the forward."""
    places: dict[str, int] = defaultdict(int)
    for record in analysis.recording.ranks:
        events = record.of(Choice, analysis.step)
        forward = {(event.site, event.hash) for event in events if not event.again}
        for event in events:
            if event.again and any(site == event.site for site, _ in forward):
                places[event.site] += (event.site, event.hash) not in forward
    flipped = {site: count for site, count in places.items() if count}
    if flipped:
        told = ", ".join(f"{count} times at {site}" for site, count in flipped.items())
        sentence = (
            f"step {analysis.step}: a forward that backward computes once more chooses otherwise than it did before "
            f"({told}): gradients belong to other experts than the outputs"
        )
        yield Finding(BUG, "recompute-flip", sentence)
