"""One loss that several micro-batches compute: each from all rows of the step, with a graph for its own.

Contrastive losses accumulate so: features of all micro-batches are kept without a graph, and every micro-batch computes
the whole loss again with its own features in their place. What belongs to a row adds up to one gradient. What belongs
to the loss itself (its temperature) is added whole every time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.naming import class_of
from isograd_verify.record.events import LossTerm, micro_of
from isograd_verify.tell.findings import BUG, Finding, listed
from isograd_verify.tell.wording import spread


def computed_again(analysis: Analysis) -> Iterator[Finding]:
    """What every micro-batch of one loss adds as a whole counts once, and not once for each of them."""
    if not _one_loss(analysis):
        return
    whole: dict[str, float] = {}
    parts: dict[str, float] = {}
    for name in analysis.names:
        found = next((f for seen in analysis.observed(name) if (f := analysis.fit(seen)) is not None), None)
        if analysis.null(name) or found is None or not found.uniform:
            continue
        kind = _kind(analysis, name)
        if kind:
            (whole if kind == "whole" else parts)[name] = found.each[0]
    if not whole or not parts or spread(parts.values()) > tolerances.FACTOR:
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
