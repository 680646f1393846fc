"""Clips by hand: a program multiplies all gradients by one number, so that their norm is a bound (docs/verify.md,
rewritten). Gradients are judged as they were before.
"""

from __future__ import annotations

import math
from itertools import combinations

from isograd_verify import tolerances
from isograd_verify.record.events import Rewritten, Step
from isograd_verify.record.recording import Recording
from isograd_verify.tell.wording import equal


def bound(recording: Recording) -> float:
    """The norm behind each clip by hand; 0: none is seen. A world of one is told that of the other run."""
    if "bound" in recording.about:
        return float(recording.about["bound"])
    found = [one for step in recording.steps if (one := _scaled(recording, step))]
    for (low, first), (norm, factor) in combinations(sorted(found), 2):
        again = norm <= low * (1 + tolerances.NORM) and not equal((first, factor))
        if factor < 1 and (first == 1 or again):
            return norm
    return 0.0


def clipped(recording: Recording, step: int) -> bool:
    """Whether what the program did last to the gradients of a step is a clip by hand. Where each rank clips its shards
    by their own norm, that of all is larger than one device's by the root of a whole number."""
    found = _scaled(recording, step)
    times = (bound(recording) / found[0]) ** 2 if found and found[1] < 1 else 0.0
    return round(times) >= 1 and abs(times - round(times)) <= 4 * tolerances.NORM * times


def _scaled(recording: Recording, step: int) -> tuple[float, float] | None:
    """(norm behind it, factor; 1: none) of a step in which each rank last multiplied its gradients by one number."""
    events = [event for record in recording.ranks for event in record.of(Rewritten, step)]
    factors = [event.factor for event in events if event.factor] if events else [1.0] * recording.world
    held = [one for r in recording.ranks for e in r.of(Step, step)[:1] for one in e.parameters.items()]
    stepped = {name for name, about in held if about.owned and about.gradient}
    held = [(name, about) for name, about in held if about.gradient and (about.owned or name not in stepped)]
    parts = {(name, repr(about.box or about.before), about.squares or 0.0) for name, about in held}
    norm = math.sqrt(sum(square for *_, square in parts))  # copies once
    return (norm, factors[0]) if norm and len(factors) == recording.world else None
