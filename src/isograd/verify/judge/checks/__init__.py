"""Checks that need no reference: properties that every right program has, whatever it computes.

Each check is a function of an Analysis (one step of a recording) that yields findings; `check` runs them all, step by
step. docs/verify.md shows each with the bug it caught; `isograd verify bugs` shows each fire and stay silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from isograd.errors import VerifyError
from isograd.verify.judge.analysis import Analysis
from isograd.verify.judge.checks.again import computed_again
from isograd.verify.judge.checks.balance import balance_counts
from isograd.verify.judge.checks.copies import averages, copies, rates
from isograd.verify.judge.checks.data import own_data
from isograd.verify.judge.checks.dead import alive
from isograd.verify.judge.checks.gradients import coefficients, scales, summed_inside
from isograd.verify.judge.checks.graphs import graph_cuts, logit_gradients
from isograd.verify.judge.checks.losses import counted, token_weights
from isograd.verify.judge.checks.means import mean_weights
from isograd.verify.judge.checks.mixed import mixed_groups
from isograd.verify.judge.checks.norms import norms
from isograd.verify.judge.checks.routing import choice_bias, counted_once, same_choice
from isograd.verify.judge.checks.state import continuity, missing, replicas, steps_together
from isograd.verify.judge.checks.traffic import (
    dtypes,
    groups,
    local_steps,
    order,
    random_draws,
    replayed_draws,
    shared_draws,
)
from isograd.verify.judge.consequences import without_consequences
from isograd.verify.judge.earlier import rewritten
from isograd.verify.record.recording import Recording
from isograd.verify.tell.findings import BUG, INCONCLUSIVE, Finding

Check = Callable[[Analysis], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    steps_together, coefficients, scales, token_weights, mean_weights, graph_cuts, logit_gradients, continuity,
    replicas, missing, norms, dtypes, order, groups, mixed_groups, own_data, random_draws, replayed_draws, alive,
    copies, rates, averages, shared_draws, counted, rewritten, computed_again, summed_inside,
    balance_counts, choice_bias, counted_once, same_choice,
)  # fmt: skip


def check(recording: Recording, leave_out: tuple[Check, ...] = ()) -> list[Finding]:
    """All findings, step by step, up to the first with a bug: later steps start from weights that it has spoilt."""
    found: list[Finding] = []
    for step in recording.steps:
        analysis = Analysis(recording, step)
        apart = local_steps(analysis)
        if apart is not None:
            found.append(apart)
            break
        for run in (c for c in CHECKS if c not in leave_out):
            found += [f for f in _judged(run, analysis) if not any(_again(f, told) for told in found)]
        if any(f.verdict == BUG for f in found):
            break
    return without_consequences(found)


def _judged(run: Check, analysis: Analysis) -> list[Finding]:
    """What a check finds. An error inside it costs its own judgement only, and is said."""
    try:
        return list(run(analysis))
    except VerifyError:  # the recording itself is damaged
        raise
    except Exception as error:
        what = (run.__doc__ or run.__name__).partition("\n")[0].rstrip(".")
        sentence = f"step {analysis.step}: not judged: {what}: {type(error).__name__}: {error}"
        return [Finding(INCONCLUSIVE, "", sentence)]


def _again(found: Finding, told: Finding) -> bool:
    """Whether a finding is one that is told already: of the same bug on some of the same tensors, or in a later step. A
    bug on other tensors, or on another axis, is another finding."""
    if (found.verdict, found.bug) != (told.verdict, told.bug):
        return False
    if not found.bug:
        return found.tensors == told.tensors and (bool(found.tensors) or found.sentence == told.sentence)
    return not found.tensors or not told.tensors or bool(set(found.tensors) & set(told.tensors))
