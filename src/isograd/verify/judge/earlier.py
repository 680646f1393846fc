"""Gradients that the program itself has changed between its last backward and the step: which of the two is judged?

What reached the optimizer, as a rule. But adaptive clipping scales row by row, a mask takes elements out, noise adds
some: then nothing is left of the sum of what backwards added, and nothing is wrong with that sum. So if every gradient
was the same multiple of that sum before the change, and is no longer, the earlier ones are judged, and a note says so.
A change that is a factor with a meaning (the size of a group, the number of micro-batches) is no clip: it stays and is
told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isograd.verify import tolerances
from isograd.verify.record.events import Rewritten
from isograd.verify.tell.findings import NOTE, Finding, listed
from isograd.verify.tell.wording import finding, meanings, spread

if TYPE_CHECKING:
    from torch import Tensor

    from isograd.verify.judge.analysis import Analysis


def put_back(analysis: Analysis) -> tuple[str, ...]:
    """Puts earlier gradients in the place of later ones where these are to be judged; the names of those."""
    early = [record.group(analysis.step, "early") for record in analysis.recording.ranks]
    if not any(early):
        return ()
    sums = [{**late, **before} for late, before in zip(analysis.sums, early, strict=True)]
    before, after = _coefficients(analysis, sums), _coefficients(analysis, analysis.sums)
    known = [c for c in before.values() if c is not None]
    if (
        len(known) < len(before)
        or not known
        or spread(known) > tolerances.FACTOR
        or _factors(analysis, known[0], after)
    ):
        return ()
    analysis.sums = sums
    for record in analysis.recording.ranks:
        tensors = record.tensors(analysis.step)
        for name, whole in record.group(analysis.step, "whole").items():
            tensors[f"final/{name}"] = whole
    return tuple(dict.fromkeys(name for one in early for name in one))


def _coefficients(analysis: Analysis, sums: list[dict[str, Tensor]]) -> dict[str, float | None]:
    """By name: with which one coefficient all contributions are in a gradient; None where there is no such one."""
    found: dict[str, float | None] = {}
    for name in analysis.names:
        if not analysis.contributions(name) or analysis.faint(name):
            continue
        fits = [analysis.explain(seen) for seen in analysis.observed(name, sums)]
        values = [f.each[0] if f is not None and f.uniform and f.each else None for f in fits]
        same = values and None not in values and spread(v for v in values if v is not None) <= tolerances.FACTOR
        found[name] = values[0] if same else None
    return found


def _factors(analysis: Analysis, before: float, after: dict[str, float | None]) -> bool:
    """Whether the change was one factor for each tensor: one for all, or else with a meaning."""
    if None in after.values():
        return False
    factors = [c / before for c in after.values() if c is not None]
    usual = max(factors, key=lambda f: sum(abs(f - g) <= tolerances.FACTOR * abs(f) for g in factors))
    odd = {f for f in factors if abs(f - usual) > tolerances.FACTOR * abs(usual)}
    return all(usual and (f == 0 or meanings(analysis.recording, analysis.micros, f / usual)) for f in odd)


def rewritten(analysis: Analysis) -> Iterator[Finding]:
    """Gradients that the program changes itself, other than by a factor, are judged as they were before."""
    if analysis.put_back:
        events = [e for record in analysis.recording.ranks for e in record.of(Rewritten, analysis.step)]
        sentence = (
            f"step {analysis.step}: {listed(analysis.put_back)} were changed by the program itself before the step, "
            f"and not by one factor ({events[0].site}): they are judged as they were before"
        )
        yield finding(NOTE, "", sentence, tensors=analysis.put_back)
