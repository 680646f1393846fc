"""Check of losses other than cross-entropy: every element of a mean weighs the same, wherever it was computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from isograd.verify import tolerances
from isograd.verify.judge.analysis import Analysis
from isograd.verify.judge.checks.losses import own_counts
from isograd.verify.judge.terms import reference_tensor, shares
from isograd.verify.record.events import Key, Mean
from isograd.verify.tell.findings import BUG, Finding
from isograd.verify.tell.wording import finding, labelled, spread


def mean_weights(analysis: Analysis) -> Iterator[Finding]:
    """Every element of a mean weighs the same, over all ranks and micro-batches of the step."""
    chosen = reference_tensor(analysis) if not analysis.losses else None  # labels say more than elements
    if chosen is None:
        return
    name, found = chosen
    tolerance = max(tolerances.LOOSE * analysis.tolerance(name), tolerances.FACTOR)
    share = shares(analysis, found)
    for site, means in _terms(analysis):
        weights = {key: share[key] * weight for key, (_, weight) in means.items() if key in share}
        counts = {key: means[key][0] for key in weights}
        if len(set(counts.values())) < 2 or spread(weights.values()) <= tolerance:
            continue
        follows = own_counts(weights, counts, tolerance)
        if not follows:
            continue  # scaled on purpose, or no term of the loss
        sizes = [abs(w) for w in weights.values()]
        over = "ranks" if len({k for k, _ in weights}) > 1 else ""
        over = " and ".join(filter(None, [over, "micro-batches" if len({m for _, m in weights}) > 1 else ""]))
        told = ", ".join(f"{counts[k]:g}" for k in sorted(counts))
        sentence = (
            f"step {analysis.step}: the mean at {site}: an element's weight differs by "
            f"{max(sizes) / min(sizes):.3g}x between {over} ({follows.replace('labels', 'elements')}: {told})"
        )
        mean = sum(weights[k] * counts[k] for k in weights) / sum(counts.values())
        bars = labelled({k: w / mean for k, w in weights.items()})
        trainable = tuple(n for n in analysis.names if analysis.info(n).gradient)
        yield finding(BUG, "mean-of-means", sentence, tensors=trainable, axis=over, coefficients=bars)


def _terms(analysis: Analysis) -> Iterator[tuple[str, dict[Key, tuple[float, float]]]]:
    """(call site, number of elements and weight of each by rank and micro-batch) of each mean in the loss. One that is
    computed several times in a micro-batch (row by row, say) is a mean of means on purpose, and no term."""
    terms: dict[str, dict[Key, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    sites: dict[str, str] = {}
    for record in analysis.recording.ranks:
        for event in record.of(Mean, analysis.step):
            terms[event.term][record.rank, event.micro].append((event.count, event.weight))
            sites[event.term] = event.site
    for term, means in terms.items():
        if all(len(found) == 1 for found in means.values()):
            yield sites[term], {key: found[0] for key, found in means.items()}
