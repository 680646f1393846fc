"""Checks of state: copies stay equal, all ranks step together, every parameter has a gradient and an owner, and the
model learns something."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.graphs import graph_cuts
from isograd_verify.judge.checks.traffic import served_ranks
from isograd_verify.record.events import Backward, Collective, Event, Input, Loss, Parameter, Step
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, listed
from isograd_verify.tell.wording import axis_over, spell


def steps_together(analysis: Analysis) -> Iterator[Finding]:
    """All ranks step, or none does."""
    if analysis.step != 1:
        return
    taken, by_backward, met = (
        [_steps_by(record.events, kind, analysis.all_ranks) for record in analysis.recording.ranks]
        for kind in (Input, Backward, Collective)
    )
    if len({tuple(t) for t in met}) == 1 and len({0, *met[0]}) == len(met[0]) + 1:  # behind the same collectives of all
        return
    if len({tuple(t) for t in by_backward}) == 1 or not all(t and t[-1] for t in taken):
        taken = by_backward
    served = served_ranks(analysis)
    if served:
        sentence = (
            f"{spell(served)} took no optimizer step at all, and got tensors from other ranks outside of backward: a "
            "rank that steps for all and gives its weights to the others; what the others hold is not judged"
        )
        yield Finding(INCONCLUSIVE, "", sentence, axis=spell(served))
        return
    common = min((t[-1] for t in taken if t), default=0)
    within = [[b for b in t if b <= common] for t in taken]
    if len({tuple(t) for t in within}) > 1:
        everywhere = set().union(*map(set, within))
        skipped = [(r, sorted(everywhere - set(t))) for r, t in enumerate(within) if everywhere - set(t)]
        rank, at = skipped[0]
        sentence = f"rank {rank} took no optimizer step after micro-batch {at[0]}, while other ranks did"
        names = tuple(n for n in analysis.names if analysis.info(n).trainable)
        bars = tuple((f"rank {r}", float(len(t))) for r, t in enumerate(within))
        axis = spell([r for r, _ in skipped])
        yield Finding(BUG, "overflow-alone", sentence, tensors=names, axis=axis, coefficients=bars)


def _steps_by(events: list[Event], kind: type[Event], everyone: tuple[int, ...]) -> list[int]:
    """After how many forwards, backwards or collectives of all ranks each step was taken."""
    taken, seen = [], 0
    for event in events:
        seen += isinstance(event, kind) and getattr(event, "group", everyone) == everyone
        if isinstance(event, Step) and not event.note:
            taken.append(seen)
    return taken


def replicas(analysis: Analysis) -> Iterator[Finding]:
    """Copies of a parameter are equal, byte for byte, before each step."""
    apart: dict[str, tuple[int, ...]] = {}
    later = analysis.parameters_at(analysis.step + 1)
    for name in analysis.names:
        if name in analysis.unsure:
            continue
        for ranks in analysis.replica_sets(name):
            unseen = not all(name in later[rank] for rank in ranks)
            brought = name in analysis.owners_step and unseen  # behind the step
            began = {analysis.about[r][name].before for r in ranks}
            if len(began) > 1 or not (analysis.made_equal(name, ranks) or brought):
                apart[name] = ranks
    if apart:
        names = tuple(sorted(apart))
        ranks = max(apart.values(), key=len)
        axis = axis_over(analysis.recording, ranks)
        sentence = f"step {analysis.step}: copies of {listed(names)} differ between {axis} after the step"
        yield Finding(BUG, "replicas-differ", sentence, tensors=names, axis=axis)
    if analysis.unsure:
        names = tuple(sorted(analysis.unsure))
        sentence = (
            f"step {analysis.step}: {listed(names)} begin constant and differ between ranks after the step: shards "
            "or drifting copies, which nothing tells; compare with a recording of one device"
        )
        yield Finding(INCONCLUSIVE, "", sentence, tensors=names)


def continuity(analysis: Analysis) -> Iterator[Finding]:
    """Between two steps nothing but the optimizer changes a parameter; a reload brings back this rank's own part."""
    before: list[dict[str, Parameter]] = [
        next((e.parameters for e in r.of(Step, analysis.step - 1)), {}) for r in analysis.recording.ranks
    ]
    swapped: dict[str, tuple[int, int]] = {}
    changed: list[str] = []
    for name in analysis.names:
        for rank in analysis.holders(name):
            was, now = before[rank].get(name), analysis.about[rank][name].before
            if was is None or not now or was.hash == now:
                continue
            others = {r: one.hash for r, of in enumerate(before) if r != rank and (one := of.get(name)) is not None}
            owners = [r for r, hashed in others.items() if hashed == now]
            if set(owners) & analysis.replicas_of(name, rank):
                continue  # it took a copy's value, as under ZeRO 1
            changed.append(name)
            if owners:
                swapped[name] = (rank, owners[0])
    if swapped:
        rank, other = next(iter(swapped.values()))
        sentence = f"step {analysis.step}: {listed([*swapped])}: rank {rank} now holds what rank {other} held before"
        axis = axis_over(analysis.recording, (rank, other))
        yield Finding(BUG, "resume-other-rank", sentence, tensors=tuple(swapped), axis=axis)
    elif changed:
        names = tuple(dict.fromkeys(changed))
        step = analysis.step
        sentence = f"{listed(names)} changed between steps {step - 1} and {step} without the optimizer"
        yield Finding(NOTE, "", sentence, tensors=names)


def missing(analysis: Analysis) -> Iterator[Finding]:
    """Every trainable parameter has a finite gradient, and an optimizer that owns it."""
    trainable = [n for n in analysis.names if analysis.info(n).trainable]
    infos = {n: [analysis.about[r][n] for r in analysis.holders(n)] for n in trainable}
    bad = tuple(n for n in trainable if not all(i.finite for i in infos[n]))
    if bad:
        ranks = [r for r, about in enumerate(analysis.about) if any(n in about and not about[n].finite for n in bad)]
        sentence = f"step {analysis.step}: the gradients of {listed(bad)} are not finite on {spell(ranks)}"
        yield Finding(BUG, "non-finite", sentence, tensors=bad, axis=spell(ranks))
    lost = tuple(n for n in trainable if analysis.contributions(n) and not any(i.gradient for i in infos[n]))
    stepped = any(not event.note for _, event in analysis.of(Step))
    if lost and stepped:  # else a program may have thrown them away after a step of its own
        axis = axis_over(analysis.recording, analysis.all_ranks)
        whom = f"all {len(lost)} gradients" if len(lost) == len(trainable) else listed(lost)
        sentence = f"step {analysis.step}: {whom}: backward made them, but none has reached .grad: nothing was reduced"
        yield Finding(BUG, "nosync-missing", sentence, tensors=lost, axis=axis)
    without = tuple(n for n in trainable if not any(i.gradient for i in infos[n]))
    if without and not lost and len(without) < len(trainable) and not any(True for _ in graph_cuts(analysis)):
        sentence = f"step {analysis.step}: {listed(without)} got no gradient on any rank"
        yield Finding(NOTE, "", sentence, tensors=without)
    orphans = tuple(n for n in trainable if any(i.gradient for i in infos[n]) and not any(i.owned for i in infos[n]))
    if orphans and stepped and not analysis.stepped_elsewhere:
        sentence = f"step {analysis.step}: {listed(orphans)} get gradients but no optimizer owns them"
        yield Finding(BUG, "unowned", sentence, tensors=orphans)


def alive(analysis: Analysis) -> Iterator[Finding]:
    """Some matrix of the model has a gradient that is not zero, in some watched step."""
    ranks, steps = analysis.recording.ranks, analysis.recording.steps
    if analysis.step != steps[0]:
        return
    names = tuple(n for n in analysis.names if analysis.info(n).trainable and len(analysis.info(n).whole) > 1)
    sums = [r.group(step, "sum") for r in ranks for step in steps]
    losses = [loss for record in ranks for loss in record.of(Loss, analysis.step)]
    without_labels = bool(losses) and not any(loss.count for loss in losses)
    if not names or without_labels or any(name not in analysis.sums[analysis.holders(name)[0]] for name in names):
        return
    if any(bool(one[name].any()) for one in sums for name in names if name in one):
        return
    sentence = f"the gradients of all {len(names)} matrices are zero in {len(steps)} watched steps"
    far = [(abs(loss.value / math.log(loss.classes) - 1), loss) for loss in losses if loss.classes > 1]
    chance = [loss for error, loss in far if error <= tolerances.CHANCE]
    if chance:
        sentence += f", and the loss is {chance[0].value:.4f}, the logarithm of its {chance[0].classes} classes: "
        sentence += "the model gives every class the same probability and learns nothing"
    else:
        sentence += ": nothing can be learnt from them, and runs that are compared would be equal"
    yield Finding(BUG if chance else INCONCLUSIVE, "dead-model", sentence, tensors=names)
