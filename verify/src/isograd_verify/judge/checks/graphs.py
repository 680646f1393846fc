"""Checks of the graph: collectives without a backward on the way to the loss, and a log_softmax without one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import CUT, KEPT, OTHERS, Collective, LabelWeight, Logits, Loss, Reached
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding, listed
from isograd_verify.tell.wording import axis_over, spread

_REACHES = {
    CUT: "has no backward but receives a tensor that needs a gradient",
    KEPT: (
        "changes a tensor in place on its way to the loss, and backward passes it by: right if all ranks use the "
        "result in the same way, wrong if not"
    ),
    OTHERS: (
        "has no backward, and what other ranks gave reaches the loss: right if every rank computes all of the loss, "
        "wrong if each has a part of its own"
    ),
}


def graph_cuts(analysis: Analysis) -> Iterator[Finding]:
    """What a collective without a backward returns does not reach the loss."""
    found: dict[tuple[str, str], Collective] = {}
    for record in analysis.recording.ranks:
        calls = {e.n: e for e in record.of(Collective)}
        reached = [(n, how) for e in record.of(Reached, analysis.step) for n, how in e.calls]
        for n, how in reached:
            found.setdefault((how, calls[n].site), calls[n])
    for how, site in sorted(found):
        event = found[how, site]
        lost = tuple(n for n in analysis.names if analysis.info(n).trainable and not analysis.info(n).gradient)
        module = f" (module {event.module})" if event.module else ""
        sentence = f"step {analysis.step}: {event.op} at {site}{module} {_REACHES[how]}"
        verdict = BUG if how == CUT else INCONCLUSIVE
        if how == CUT:
            sentence += f": {listed(lost)} got none" if lost else ": what flows through it is lost or not summed"
        axis = axis_over(analysis.recording, event.group)
        counts = _whole_loss_everywhere(analysis, event.group) if how == OTHERS else None
        share = _share_of_one_loss(analysis, event.group) if how == OTHERS and counts is None else None
        if share is not None:
            if spread((share, 1.0)) > tolerances.FACTOR:
                sentence = (
                    f"step {analysis.step}: {event.op} at {site}{module} has no backward; every rank computes all of "
                    f"the loss (its labels and its value are the same on {axis}), so what each rank adds must be "
                    f"summed: all gradients count {share:.4g} times what they should"
                )
                known = (("all of the loss", 1.0), ("here", share))
                yield Finding(
                    BUG, "cut-graph", sentence, tensors=analysis.learning, axis=axis, coefficients=known, site=site
                )  # fmt: skip
            continue
        if counts is None:
            names = lost if how == CUT else ()
            yield Finding(verdict, "cut-graph", sentence, tensors=names, axis=axis, site=site)
            continue
        copied, parts = counts
        should = next(iter(copied.values()))
        wrong = {n: c / should for n, c in parts.items() if spread((c, should)) > tolerances.COUNTS}
        if wrong:
            factors = " and ".join(sorted({f"{f:.4g}" for f in wrong.values()}))
            sentence = (
                f"step {analysis.step}: {event.op} at {site}{module} has no backward; every rank computes all of "
                f"the loss ({listed(list(copied))} gets the same gradient on {axis}), so what each rank adds to the "
                f"other tensors must be summed: {listed(list(wrong))} count {factors} times what they should"
            )
            bars = (*copied.items(), *((n, parts[n]) for n in wrong))[:9]
            yield Finding(BUG, "cut-graph", sentence, tensors=tuple(wrong), axis=axis, coefficients=bars, site=site)


def _whole_loss_everywhere(
    analysis: Analysis, group: tuple[int, ...]
) -> tuple[dict[str, float], dict[str, float]] | None:
    """(tensors with equal contributions on all ranks of a group although data differ, with their coefficient: they are
    used after the gather, by a loss that every rank computes; tensors whose contributions all differ, with theirs)."""
    if analysis.same_data(group):
        return None
    copied: dict[str, float] = {}
    parts: dict[str, float] = {}
    for name in analysis.names:
        if analysis.null(name):
            continue
        found = next((f for seen in analysis.observed(name) if (f := analysis.fit(seen)) is not None), None)
        if found is None or not found.uniform:
            return None
        together = [{rank for rank, _ in members} for members in found.classes.values()]
        if all(set(group) <= ranks for ranks in together):
            copied[name] = found.each[0]
        elif all(len(ranks) == 1 for ranks in together):
            parts[name] = found.each[0]
    return (copied, parts) if copied and parts else None


def _share_of_one_loss(analysis: Analysis, group: tuple[int, ...]) -> float | None:
    """How often a loss counts that every rank of a group computes from all rows, with a graph for its own: what labels
    weigh together, times the coefficient of all contributions. None: no such loss is shown, or no meaning."""
    if analysis.same_data(group):
        return None
    told = []
    for record in (analysis.recording.ranks[rank] for rank in group):
        weights = [e for e in record.of(LabelWeight, analysis.step) if e.count]
        even = all(e.labels and spread((e.low, e.high)) <= tolerances.FACTOR for e in weights)
        values = [e.value for e in record.of(Loss, analysis.step) if e.count]
        if not weights or not even or len(values) != len(weights):
            return None
        told.append(([e.labels for e in weights], values, sum(e.count * e.low for e in weights)))
    labels, values, whole = told[0]
    for other, others, weigh in told[1:]:
        same = all(spread(pair) <= tolerances.SAME_LOSS for pair in zip(values, others, strict=False))
        if other != labels or not same or spread((weigh, whole)) > tolerances.FACTOR:
            return None
    found: list[float] = []
    for name in analysis.names:
        fits = [analysis.fit(seen) for seen in analysis.observed(name) if not analysis.null(name)]
        if any(f is None or not f.uniform or any(len(c) > 1 for c in f.classes.values()) for f in fits):
            return None
        found += [f.each[0] for f in fits if f is not None]
    if not found or spread(found) > tolerances.FACTOR:
        return None
    share = found[0] * whole
    known = (1.0, 1 / len(group))
    return share if any(spread((share, value)) <= tolerances.FACTOR for value in known) else None


def logit_gradients(analysis: Analysis) -> Iterator[Finding]:
    """Under torch's loss_parallel, the gradient of a row of logits sums to zero over the vocabulary."""
    told = [record.of(Logits, analysis.step) for record in analysis.recording.ranks]
    half = any(i.dtype in ("bfloat16", "float16") for about in analysis.about for i in about.values())
    for events in zip_longest(*told):
        if None in events:
            return  # some ranks call it more often than others: which calls belong together is not known
        shift, size = abs(sum(e.shift for e in events)), sum(e.size for e in events)
        if shift > (tolerances.SHIFT_HALF if half else tolerances.SHIFT) * size:
            sentence = (
                f"step {analysis.step}: inside loss_parallel() the gradient that reaches the logits is no "
                f"log_softmax's: its rows sum to {shift / size:.2g} of their size instead of 0, so something other "
                "than cross-entropy uses log_softmax there"
            )
            axis = axis_over(analysis.recording, analysis.all_ranks)
            yield Finding(BUG, "log-softmax-uncorrected", sentence, tensors=analysis.learning, axis=axis)
            return
