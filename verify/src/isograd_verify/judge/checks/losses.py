"""Checks of the loss: every label weighs the same, on all ranks and in all micro-batches; so does every element of a
mean. Calls are compared with calls from the same line of the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.terms import narrowed, reduced_twice, reference_tensor, shares, step_shares
from isograd_verify.record.events import Backward, Key, LabelWeight, Loss, MeanWeight, Reached, Uncounted
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding
from isograd_verify.tell.wording import labelled, meanings, spread


def token_weights(analysis: Analysis) -> Iterator[Finding]:
    """Every valid label's gradient has the same weight, over all ranks and micro-batches of the step."""
    weighed_in = {key for calls in analysis.losses.values() for key in calls}
    chosen = reference_tensor(analysis, weighed_in) if weighed_in else None
    if chosen is None:
        return
    name, found = chosen
    share = shares(analysis, found)
    tolerance = max(tolerances.LOOSE * analysis.tolerance(name), tolerances.FACTOR)
    for number, (site, all_calls) in enumerate(analysis.losses.items()):
        calls = {key: _together(weighed, tolerance) for key, weighed in all_calls.items() if key in share}
        if not calls:
            continue
        told = _one_loss(analysis, f" at {site}" if len(analysis.losses) > 1 else "", site, calls, share, tolerance)
        if told is not None:
            yield told
            return
        if number == 0:
            yield from _means_over_all(analysis, calls, share)


def counted(analysis: Analysis) -> Iterator[Finding]:
    """The labels of the loss are counted; where they are not, a note tells where the program can count them itself."""
    ranks, step = analysis.recording.ranks, analysis.step
    if step != analysis.recording.steps[0] or any(r.of(LabelWeight) for r in ranks):
        return
    unknown = [event.site for record in ranks for event in record.of(Uncounted, step)]
    if any(r.of(MeanWeight) for r in ranks) and not unknown:
        return
    backwards = [event for record in ranks for event in record.of(Backward, step)]
    places = [f"after {site}" for site in unknown] or [
        f"after {e.loss}" if e.loss else f"before {e.site}" for e in backwards if (e.loss or e.site) and not e.summed
    ]
    parts = {analysis.data.get(key, str(key)) for name in analysis.names for key in analysis.parts[name]}
    if len(parts) > 1 and places:
        sentence = (
            "the labels of the loss could not be counted, so a mean of means would not show; to have them judged, put "
            f"'loss = isograd_verify.weigh(loss, number_of_labels)' {places[0]}"
        )
        yield Finding(NOTE, "", sentence)


def undivided(analysis: Analysis) -> Iterator[Finding]:
    """Losses that nobody can count are divided by the number of micro-batches, where each is a mean of its own."""
    told: dict[str, dict[Key, float]] = defaultdict(dict)
    share = step_shares(analysis) if analysis.micros > 1 and not analysis.losses else {}
    for rank, event in analysis.of(Uncounted) if share else ():
        told[event.site][rank, event.micro] = event.weight
    for site, weights in told.items():
        total = sum(share.get(key, 0.0) * weight for key, weight in weights.items())
        if spread((total, float(analysis.micros))) <= tolerances.FACTOR:
            sentence = (
                f"step {analysis.step}: the loss at {site} counts {total:.4g} times, once for each micro-batch, and "
                "nothing divides by their number: right for a sum over labels, wrong for a mean; "
                "'isograd_verify.weigh' or a run on one device would decide"
            )
            axis = "micro-batches"
            yield Finding(INCONCLUSIVE, "accum-undivided", sentence, tensors=analysis.learning, axis=axis, site=site)
            return


def _together(calls: list[LabelWeight], tolerance: float) -> list[LabelWeight]:
    """Calls of one micro-batch whose labels have one weight (a loss in chunks) are one call."""
    low, high = min(w.low for w in calls), max(w.high for w in calls)
    count = sum(w.count for w in calls)
    return [replace(calls[0], count=count, low=low, high=high)] if spread((low, high)) <= tolerance else calls


def _one_loss(
    analysis: Analysis, where: str, site: str, calls: dict[Key, list[LabelWeight]], share: dict[Key, float],
    tolerance: float,
) -> Finding | None:  # fmt: skip
    number = {len(weighed) for weighed in calls.values()}
    if len(number) > 1 or any(spread((w.low, w.high)) > tolerance for weighed in calls.values() for w in weighed):
        sentence = (
            f"step {analysis.step}: the loss{where} weighs its labels one by one, or is not called equally often for "
            "all micro-batches: whether each divides by its own number of labels cannot be told"
        )
        return Finding(NOTE, "", sentence)
    for i in range(number.pop()):
        counts = {key: weighed[i].count for key, weighed in calls.items()}
        weights = {key: share[key] * weighed[i].low for key, weighed in calls.items()}
        if spread(weights.values()) > tolerance:
            return _unequal(analysis, where, site, weights, counts, tolerance)
    return None


def _unequal(
    analysis: Analysis, where: str, site: str, weights: dict[Key, float], counts: dict[Key, float], tolerance: float
) -> Finding:
    """A mean of means where weights follow the counts; else labels may be weighed on purpose."""
    follows, steps = own_counts(weights, counts, tolerance), analysis.recording.steps
    if not follows and analysis.step > steps[0] and not equal_on_ranks(weights, tolerance):
        first = Analysis(analysis.recording, steps[0])
        if first.losses and not any(f.bug in ("", "mean-of-means") for f in token_weights(first)):
            return carried(analysis, f"a label of the loss{where}", weights, site)
    over, times, told, bars = differences(weights, counts)
    sentence = (
        f"step {analysis.step}: all gradients: a label's weight{where} differs by {times:.3g}x between {over} "
        f"({follows or 'and does not follow the numbers of labels: on purpose, or not'}: {told})"
    )
    verdict = BUG if follows else INCONCLUSIVE
    return Finding(verdict, "mean-of-means", sentence, tensors=analysis.learning, axis=over, coefficients=bars)


def differences(
    weights: dict[Key, float], counts: dict[Key, float]
) -> tuple[str, float, str, tuple[tuple[str, float], ...]]:
    """(over what weights differ, how many times, the counts in words, each weight beside their mean, for bars)."""
    several = {"ranks": {k for k, _ in weights}, "micro-batches": {m for _, m in weights}}
    over = " and ".join(axis for axis, numbers in several.items() if len(numbers) > 1)
    low, *_, high = sorted(abs(w) for w in weights.values())
    mean = sum(weights[k] * counts[k] for k in weights) / sum(counts.values())
    bars = labelled({k: v / mean for k, v in weights.items()}) if mean else ()
    return over, high / low if low else 0.0, ", ".join(f"{counts[k]:g}" for k in sorted(counts)), bars


def own_counts(weights: dict[Key, float], counts: dict[Key, float], tolerance: float) -> str:
    """Who divides by a number of labels of its own; empty when weights follow no such number."""
    owners: dict[str, Callable[[Key], Any]] = {
        "each divides by its own number of labels": lambda key: key,
        "each rank divides by its own number of labels": lambda key: key[0],
        "each micro-batch divides by its own number of labels": lambda key: key[1],
    }
    for words, owner in owners.items():
        totals: dict[Any, float] = defaultdict(float)
        for key, n in counts.items():
            totals[owner(key)] += n
        if spread(weights[key] * totals[owner(key)] for key in weights) <= tolerance:
            return words
    return ""


def carried(analysis: Analysis, what: str, weights: dict[Key, float], site: str = "") -> Finding:
    """Weights that were equal in the first step and follow no numbers now: ranks carry something from step to step."""
    each = {rank: next(w for (r, _), w in weights.items() if r == rank) for rank, _ in weights}
    sentence = (
        f"step {analysis.step}: {what} weighs {', '.join(f'{w:.4g} on rank {rank}' for rank, w in each.items())}, and "
        f"the same on all in step {analysis.recording.steps[0]}; it follows no number of elements: each rank divides "
        "by, or multiplies with, a number that it carries from step to step and that is made from its own rows, or "
        "weighs its rows on purpose"
    )
    return Finding(INCONCLUSIVE, "statistic-unreduced", sentence, tensors=analysis.learning, axis="ranks", site=site)


def equal_on_ranks(weights: dict[Key, float], tolerance: float) -> bool:
    """Whether all ranks give one weight in each micro-batch; a rank without a part in the loss gives none."""
    return all(
        spread(w for (_, m), w in weights.items() if m == micro and w) <= tolerance for micro in {m for _, m in weights}
    )


def _means_over_all(
    analysis: Analysis, calls: dict[Key, list[LabelWeight]], share: dict[Key, float]
) -> Iterator[Finding]:
    """The gradient is a multiple of the mean over all labels, and there are as many micro-batches, or ranks."""
    ranks = analysis.recording.ranks
    means = {e.reduction for r in ranks for e in r.of(Loss)} == {"mean"}
    if not means or any(event.calls for r in ranks for event in r.of(Reached)):
        return  # sums, or a loss that looks at other ranks' rows: its labels are counted on several ranks
    seen: set[tuple[str, int]] = set()
    total = 0.0
    for key, weighed in calls.items():
        data = (analysis.data.get(key, str(key)), key[1])
        if data not in seen:
            seen.add(data)
            total += share[key] * sum(w.low * w.count for w in weighed)
    of = meanings(analysis.recording, analysis.micros, total)
    if not of or total < 1:
        return
    of = narrowed(analysis, of)
    bug = "accum-undivided" if set(of) == {"micro-batches"} else "" if "micro-batches" in of else "ulysses-scale"
    bug = "reduced-twice" if bug == "ulysses-scale" and reduced_twice(analysis) else bug
    sentence = (
        f"step {analysis.step}: all gradients are {total:.4g} times the mean over the step's labels, which is "
        f"{' or '.join(of.values())}; a run on one device would decide"
    )
    yield Finding(INCONCLUSIVE, bug, sentence, tensors=analysis.learning, axis=" or ".join(of))


def mean_weights(analysis: Analysis) -> Iterator[Finding]:
    """Every element of a mean weighs the same, over all ranks and micro-batches of the step."""
    told: set[tuple[str, float]] = set()  # what was told: a sum and what divides it are one mean
    for term, (means, weights, tolerance) in _element_weights(analysis).items():
        if spread(weights.values()) <= tolerance:
            continue
        site = next(iter(means.values())).site
        for counts in ({key: means[key].count for key in weights}, {key: means[key].nonzero for key in weights}):
            follows = own_counts(weights, counts, tolerance) if len(set(counts.values())) > 1 else ""
            if not follows:
                continue  # scaled on purpose, or no term of the loss
            over, times, numbers, bars = differences(weights, counts)
            sentence = (
                f"step {analysis.step}: the mean at {site}: an element's weight differs by {times:.3g}x between {over} "
                f"({follows.replace('labels', 'elements')}: {numbers})"
            )
            one = (over, round(times, 4))
            if not any(mean.divided for mean in means.values()) or one not in told:
                told.add(one)
                yield Finding(
                    BUG, "mean-of-means", sentence, tensors=analysis.learning, axis=over, coefficients=bars, site=site
                )
            break
        else:
            first = analysis.recording.steps[0]
            of_first = _element_weights(Analysis(analysis.recording, first)) if analysis.step > first else {}
            equal = term in of_first and equal_on_ranks(*of_first[term][1:])
            if equal and not equal_on_ranks(weights, tolerance):
                yield carried(analysis, f"an element of the sum or mean at {site}", weights, site)


def _element_weights(analysis: Analysis) -> dict[str, tuple[dict[Key, MeanWeight], dict[Key, float], float]]:
    """Of each mean or sum in the loss: itself, what an element weighs in the gradient, how exactly that is known."""
    chosen = reference_tensor(analysis) if not analysis.losses else None  # labels say more than elements
    if chosen is None:
        return {}
    tolerance = max(tolerances.LOOSE * analysis.tolerance(chosen[0]), tolerances.FACTOR)
    share = shares(analysis, chosen[1])
    terms: dict[str, dict[Key, list[MeanWeight]]] = defaultdict(lambda: defaultdict(list))
    for rank, event in analysis.of(MeanWeight):
        terms[event.term][rank, event.micro].append(event)
    found = {}
    for term, each in terms.items():
        # Computed several times in a micro-batch with one weight it is one; with several a mean of means on purpose.
        if all(spread(one.weight for one in of) <= tolerance for of in each.values()):
            counts = {k: (sum(one.count for one in of), sum(one.nonzero for one in of)) for k, of in each.items()}
            means = {k: replace(each[k][0], count=n, nonzero=nonzero) for k, (n, nonzero) in counts.items()}
            weights = {key: share[key] * mean.weight for key, mean in means.items() if key in share}
            if weights:
                found[term] = means, weights, tolerance
    return found
