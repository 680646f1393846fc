"""What flips do not excuse: a factor that tensors share, far above what their flips leave of them.

A flipped token takes from one expert what it adds to another, and a gradient G becomes G + E. Of E nothing is known.
But if all of several tensors are one and the same multiple of G, by the size of a group or the number of micro-batches,
and little else is left of them, then E would have to be nearly a multiple of G in each of them: flips do not do that.
Where much is left, as after many flips, nothing is said.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from isograd_verify import tolerances
from isograd_verify.compare.classes import Fitted
from isograd_verify.judge import patterns
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.naming import bug_of, class_of, classes_of
from isograd_verify.judge.patterns import Symptom
from isograd_verify.tell.findings import BUG, Finding, listed
from isograd_verify.tell.wording import axis_over, group_sizes, meanings


def factors(analysis: Analysis, fitted: Fitted, flipped: int) -> list[Finding]:
    """One finding for all gradients, else one for each kind of parameter. `fitted`: each tensor's factor, and what is
    left of it."""
    usable = [
        n for n in fitted if math.prod(analysis.info(n).whole) >= tolerances.FLIP_ELEMENTS and not analysis.null(n)
    ]
    everything = _finding(analysis, fitted, usable, flipped, True)
    if everything is not None:
        return [everything]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in usable:
        kinds[class_of(name)].append(name)
    found = (_finding(analysis, fitted, names, flipped, False) for names in kinds.values())
    return [one for one in found if one is not None]


def _finding(
    analysis: Analysis, fitted: Fitted, names: Collection[str], flipped: int, everything: bool
) -> Finding | None:
    if len(names) < tolerances.FLIP_TENSORS:
        return None
    sizes = {*group_sizes(analysis.recording), analysis.micros} - {0, 1}
    for value in (v for size in sorted(sizes) for v in (float(size), 1 / size)):
        rests = [math.hypot(fitted[n][1], fitted[n][0] - value) / value for n in names]  # of the factor's tensor
        if max(rests) * tolerances.FLIP_SURE <= abs(value - 1) / max(value, 1.0):
            break
    else:
        return None
    of = meanings(analysis.recording, analysis.micros, value)
    bug = bug_of(Symptom(patterns.SCALED, value), names, everything, group_sizes(analysis.recording), of)
    whom = f"all {len(names)} gradients" if everything else f"{classes_of(names)} ({listed(list(names))})"
    sentence = (
        f"step {analysis.step}: {whom}: {value:.4g} times what they should be ({' or '.join(of.values())}); up to "
        f"{max(rests):.1%} of a tensor is left, which {flipped} flipped choices may explain, as they do not the factor"
    )
    bars = (("reference", 1.0), ("here", value))
    axis = " or ".join(of) or axis_over(analysis.recording, analysis.all_ranks)
    return Finding(BUG, bug, sentence, tensors=tuple(sorted(names)), axis=axis, coefficients=bars)
