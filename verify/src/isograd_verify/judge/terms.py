"""Terms of the loss: how much each counts in the loss that is optimised, and what a wrong amount is called."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.contributions import Fit
from isograd_verify.record.events import REDUCING, Collective, Key, LossTerm
from isograd_verify.tell.wording import meanings, spread


def shares(analysis: Analysis, found: Fit) -> dict[Key, float]:
    """How often what each micro-batch computed counts in the gradient."""
    told: dict[Key, float] = {}
    for first, c in found.coefficients.items():
        for key in found.classes[first]:  # those that computed the very same data carry one coefficient together
            mine = analysis.data.get(key)
            same = [m for m in found.classes[first] if mine is None or analysis.data.get(m) == mine]
            told[key] = c / (len(same) or 1)
    return told


def reference_tensor(analysis: Analysis, of: Collection[Key] = ()) -> tuple[str, Fit] | None:
    """The first tensor whose coefficients are known and belong to the usual pattern; best one whose contributions all
    differ. `of`: one that some of these micro-batches add to; in a pipeline only the last stage's see the loss."""
    second = None
    for name in analysis.names:
        if len(analysis.replica_sets(name)) > 1 and not analysis.info(name).declared:
            continue
        for seen in analysis.observed(name)[:1]:
            found = analysis.fit(seen)
            own = {key for members in found.classes.values() for key in members} if found is not None else set()
            if found is None or not found.uniform or (of and not own & set(of)):
                continue
            if all(len(members) == 1 for members in found.classes.values()):
                return name, found
            second = second or (name, found)
    return second


def step_shares(analysis: Analysis) -> dict[Key, float]:
    """How often what each micro-batch computed counts in the gradient; empty when it cannot be told."""
    chosen = reference_tensor(analysis)
    return shares(analysis, chosen[1]) if chosen is not None else {}


def narrowed(analysis: Analysis, of: dict[str, str]) -> dict[str, str]:
    """Meanings of a factor in all gradients, if labels show where it is from: micro-batches where each takes a mean of
    its own, which ranks average and nobody divides; ranks where micro-batches are divided, and ranks not averaged."""
    if "micro-batches" not in of or len(of) < 2:
        return of
    share, calls = step_shares(analysis), next(iter(analysis.losses.values()), {})
    keys = [key for key in calls if key in share]
    weights = [sum(w.low * w.count for w in calls[key]) for key in keys]
    often = [share[key] for key in keys]
    if not keys or spread(weights) > tolerances.FACTOR or spread(often) > tolerances.FACTOR:
        return of
    ranks = len({analysis.data.get(key, str(key)) for key in keys if key[1] == keys[0][1]})
    averaged, divided = abs(often[0] * ranks - 1), abs(weights[0] * analysis.micros - 1)
    if averaged <= tolerances.FACTOR and abs(weights[0] - 1) <= tolerances.FACTOR:
        return {"micro-batches": of["micro-batches"]}
    from_ranks = divided <= tolerances.FACTOR and averaged > tolerances.FACTOR
    return {axis: words for axis, words in of.items() if axis != "micro-batches"} if from_ranks else of


def reduced_twice(analysis: Analysis) -> bool:
    """Whether some gradient that is reduced behind backward was reduced already."""
    record = analysis.recording.ranks[0]
    events = [e for e in record.of(Collective, analysis.step) if e.op in REDUCING and len(e.group) > 1]
    last = max((e.passed for e in events), default=0)
    behind = Counter(name for e in events if e.phase == "other" and e.passed == last for name in e.covers)
    inside = sum(e.numel for e in events if e.phase == "backward")
    size = sum(math.prod(about.shape) for about in analysis.about[0].values() if about.gradient)
    return bool(behind) and (inside >= size or max(behind.values()) > 1)


def terms(analysis: Analysis) -> dict[str, list[tuple[float, LossTerm]]]:
    """By its place in the program: (how often its micro-batch counts in the gradient, the term)."""
    share = step_shares(analysis)
    found: dict[str, list[tuple[float, LossTerm]]] = defaultdict(list)
    for rank, event in analysis.of(LossTerm):
        if (rank, event.micro) in share:
            found[event.site].append((share[rank, event.micro], event))
    return dict(found)


def amounts(analysis: Analysis) -> dict[str, float]:
    """What each term adds to the loss that is optimised."""
    return {site: sum(share * term.share for share, term in calls) for site, calls in terms(analysis).items()}


def too_often(analysis: Analysis, factor: float) -> tuple[str, str, str]:
    """(id, axis, words) of a term that counts so many times where another one counts once; '': none."""
    of = ((size, meanings(analysis.recording, 1, float(size))) for size in range(2, analysis.world + 1))
    groups = {axis: (size, words) for size, found in of for axis, words in found.items()}  # each once
    known = {**groups, "micro-batches": (analysis.micros, "the number of micro-batches")}
    for axis, (size, words) in groups.items():
        if analysis.micros > 1:
            known[f"{axis} x micro-batches"] = (size * analysis.micros, f"{words} x the number of micro-batches")
    near = {axis: words for axis, (size, words) in known.items() if size > 1 and _same(factor, size)}
    if near:
        bug = "aux-times-micro" if set(near) == {"micro-batches"} else "aux-times-world"
        words = " or ".join(near.values())
        if "micro-batches" in near and len(near) > 1:
            words += "; that is aux-times-micro or aux-times-world, which equal numbers do not tell apart"
        return bug, " or ".join(near), words
    below = {axis: f"1 / {words}" for axis, (size, words) in groups.items() if size > 1 and _same(factor * size, 1)}
    return ("aux-over-dp", " or ".join(below), " or ".join(below.values())) if below else ("", "", "")


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= tolerances.TERM * abs(b)
