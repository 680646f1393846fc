"""Check of losses other than cross-entropy: every element of a mean weighs the same, wherever it was computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.losses import carried, differences, equal_on_ranks, own_counts
from isograd_verify.judge.terms import reference_tensor, shares
from isograd_verify.record.events import Key, MeanWeight
from isograd_verify.tell.findings import BUG, Finding
from isograd_verify.tell.wording import spread


def mean_weights(analysis: Analysis) -> Iterator[Finding]:
    """Every element of a mean weighs the same, over all ranks and micro-batches of the step."""
    told: set[tuple[str, float]] = set()  # what was told: a sum and what divides it are one mean
    trainable = tuple(n for n in analysis.names if analysis.info(n).gradient)
    for term, (means, weights, tolerance) in _weights(analysis).items():
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
                    BUG, "mean-of-means", sentence, tensors=trainable, axis=over, coefficients=bars, site=site
                )
            break
        else:
            if _equal_at_first(analysis, term) and not equal_on_ranks(weights, tolerance):
                yield carried(analysis, f"an element of the sum or mean at {site}", weights, trainable, site)


def _equal_at_first(analysis: Analysis, term: str) -> bool:
    first = analysis.recording.steps[0]
    of_first = _weights(Analysis(analysis.recording, first)) if analysis.step > first else {}
    return term in of_first and equal_on_ranks(*of_first[term][1:])


def _weights(analysis: Analysis) -> dict[str, tuple[dict[Key, MeanWeight], dict[Key, float], float]]:
    """Of each mean or sum in the loss: itself by rank and micro-batch, what an element weighs in the gradient, and how
    exactly that is known."""
    chosen = reference_tensor(analysis) if not analysis.losses else None  # labels say more than elements
    if chosen is None:
        return {}
    tolerance = max(tolerances.LOOSE * analysis.tolerance(chosen[0]), tolerances.FACTOR)
    share = shares(analysis, chosen[1])
    found = {}
    for term, means in _terms(analysis, tolerance):
        weights = {key: share[key] * mean.weight for key, mean in means.items() if key in share}
        if weights:
            found[term] = means, weights, tolerance
    return found


def _terms(analysis: Analysis, tolerance: float) -> Iterator[tuple[str, dict[Key, MeanWeight]]]:
    """(its name, the mean by rank and micro-batch) of each mean in the loss. One that is computed several times in a
    micro-batch with one weight (a loss in chunks) is one; with several weights (row by row, say) it is a mean of means
    on purpose, and no term."""
    terms: dict[str, dict[Key, list[MeanWeight]]] = defaultdict(lambda: defaultdict(list))
    for record in analysis.recording.ranks:
        for event in record.of(MeanWeight, analysis.step):
            terms[event.term][record.rank, event.micro].append(event)
    for term, means in terms.items():
        if all(spread(one.weight for one in found) <= tolerance for found in means.values()):
            yield term, {key: _one(found) for key, found in means.items()}


def _one(found: list[MeanWeight]) -> MeanWeight:
    count, nonzero = sum(one.count for one in found), sum(one.nonzero for one in found)
    return replace(found[0], count=count, nonzero=nonzero)
