"""Compares the loss with the reference's: how much each of its terms adds to it, and whether it is the same where
gradients are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.adjoints import unjudged
from isograd_verify.judge.terms import amounts, too_often
from isograd_verify.record.events import Backward, Collective, Draw, Event
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, Finding, listed

# Of a function that communicates, where the loss is another one, too.
OTHER = "forward or its backward is not that of one device"
CAUSE = "a custom function takes something (a sum, a size) over each rank's part of a tensor, as if it were the whole"
LOOK = "its forward first, then its backward: every sum, and every length, over the dimension that is cut"


def other_amounts(analysis: Analysis, reference: Analysis, wrong: tuple[str, ...]) -> list[Finding]:
    """Terms, by their place or order, that count otherwise than in the reference, while another one does not."""
    ours, theirs = amounts(analysis), amounts(reference)
    moved = [site for site in ours if site not in theirs], [site for site in theirs if site not in ours]
    of = {site: site for site in ours if site in theirs}
    of |= dict(zip(*moved, strict=True)) if len(moved[0]) == len(moved[1]) else {}
    factors = {site: ours[site] / theirs[there] for site, there in of.items() if theirs[there]}
    if not any(abs(factor - 1) <= tolerances.FACTOR for factor in factors.values()):
        return []
    found = []
    for site, factor in factors.items():
        bug, axis, words = too_often(analysis, factor)
        if bug:
            sentence = (
                f"step {analysis.step}: the term of the loss at {site} counts {factor:.4g} times what it should "
                f"({words}), other terms count once"
            )
            bars = (("reference", 1.0), ("here", factor))
            found.append(Finding(BUG, bug, sentence, tensors=wrong, axis=axis, coefficients=bars))
    return found


def same_loss(ours: float, theirs: list[float], limit: float) -> bool:
    """Whether one device has the loss that ranks have: their mean, their sum, or the mean of parts of the mean."""
    size = max(map(abs, (ours, *theirs)))
    return min(abs(sum(theirs) / len(theirs) ** power - ours) for power in (0, 1, 2)) <= limit * size


def backward_alone(analysis: Analysis, reference: Recording, wrong: tuple[str, ...], limit: float) -> list[Finding]:
    """One device has the same loss and other gradients: something that communicates has a wrong backward, or none."""
    step, records = analysis.step, analysis.recording.ranks
    ours, *theirs = (record.group(step, "root") for record in (reference.ranks[0], *records))
    if not ours or not all(theirs) or not same_loss(_sum(ours), [*map(_sum, theirs)], limit):
        return []
    functions = unjudged(analysis)
    if functions:
        names = " and ".join(dict.fromkeys(f"{call.name} at {call.site}" for call in functions))
        same = limit > tolerances.LIMITS["float32"][1] or same_loss(_sum(ours), [*map(_sum, theirs)], limit / 100)
        loss, its = ("the same", "backward is not that of its forward") if same else ("another", OTHER)
        sentence = f"step {step}: one device has {loss} loss and other gradients, and {names} communicates: its {its}"
        found = Finding(BUG, "wrong-adjoint", sentence, tensors=wrong, site=functions[0].site)
        return [found if same else replace(found, cause=CAUSE, look=LOOK)]
    early = takewhile(lambda event: not isinstance(event, Backward), records[0].of(Event, step))
    moved = [
        e for e in early
        if isinstance(e, Collective) and e.phase in ("forward", "other") and e.numel > 1 and not e.inside
        and e.op in ("send", "recv", "all_gather", "all_to_all", "all_reduce")
    ]  # fmt: skip
    if not moved:
        return []
    sites = " and ".join(dict.fromkeys(f"{e.op} at {e.site}" for e in moved))
    sentence = f"step {step}: one device has the same loss and other gradients: nothing comes back through {sites}"
    return [Finding(BUG, "cut-graph", sentence, tensors=wrong, site=moved[0].site)]


def _sum(roots: dict[str, Tensor]) -> float:
    return sum(map(float, roots.values()))


def own_rows(candidate: Recording, reference: Recording, found: list[Finding]) -> list[Finding]:
    """Gradients of the program's own step on one device that are no sum of what ranks have added, although each rank
    begins backward as one device does with its rows alone: something over rows was taken over each rank's own."""
    strange = [f for f in found if f.verdict == BUG]
    fed = reference.about.get("again", {})
    several = any(len({rank for rank, *_ in of}) > 1 for of in fed.values())
    if not strange or not several or "1" in fed or any(f.bug for f in strange):
        return found
    parts, truth = Analysis(candidate, 1).parts, reference.ranks[0].group(1, "sum")
    names = tuple(sorted({name for f in strange for name in f.tensors if name in truth and parts[name]}))
    sums = {name: torch.stack([*parts[name].values()]).sum(0) for name in names}
    close = [n for n in names if float(torch.cosine_similarity(sums[n], truth[n], 0)) > 1 - tolerances.FACTOR]
    if not names or close or any(record.of(Draw, 1) for record in candidate.ranks):
        return found
    site = next((e.loss or e.site for e in candidate.ranks[0].of(Backward, 1)), "")
    sentence = (
        f"step 1: {listed(names)}: one device has other gradients for all rows together, and begins backward as a rank "
        f"does where it is given the rows of that rank alone: what the loss at {site} takes over rows (a mean, a "
        "deviation), each rank takes over its own"
    )
    told = Finding(BUG, "statistic-unreduced", sentence, tensors=names, axis="ranks", site=site)
    return [told, *(f for f in found if f not in strange)]
