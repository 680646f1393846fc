"""Checks that need no reference: properties that every right program has, whatever it computes (docs/verify.md).

Each is a function of an Analysis (one step of a recording) that yields findings; `check` runs them, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from isograd_verify.errors import VerifyError
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks import adjoints, balance, copies, gradients, graphs, losses, norms, state, traffic
from isograd_verify.judge.consequences import without_consequences
from isograd_verify.record.events import REDUCING, Backward, Collective
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding

Check = Callable[[Analysis], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    state.steps_together, gradients.coefficients, gradients.scales, losses.token_weights, losses.mean_weights,
    graphs.graph_cuts, graphs.logit_gradients, state.continuity, state.replicas, state.missing, norms.norms,
    norms.scaled_clips, traffic.dtypes, traffic.order, traffic.groups, traffic.mixed_groups, copies.own_data,
    traffic.random_draws, traffic.replayed_draws, state.alive, copies.copies, copies.carried, copies.rates,
    copies.averages, traffic.shared_draws, losses.counted, gradients.rewritten, balance.computed_again,
    gradients.summed_inside, traffic.row_sums, balance.balance_counts, balance.whole_terms,
    balance.coefficients_unjudged, losses.undivided, adjoints.adjoints, balance.choice_bias, balance.counted_once,
    balance.same_choice, norms.scaled_apart,
)  # fmt: skip


def check(recording: Recording, leave_out: tuple[Check, ...] = ()) -> list[Finding]:
    """All findings, step by step, up to the first with a bug: later steps start from weights that it has spoilt."""
    found: list[Finding] = []
    for step in recording.steps:
        analysis = Analysis(recording, step)
        apart = traffic.local_steps(analysis)
        if apart is not None:
            found.append(apart)
            break
        for run in (c for c in CHECKS if c not in leave_out):
            found += [f for f in _judged(run, analysis) if not any(_again(f, told) for told in found)]
        if any(f.verdict == BUG for f in found):
            break
    return [placed(f, recording) for f in without_consequences(found)]


def placed(found: Finding, recording: Recording) -> Finding:
    """A finding with a line: its own, else that of the last reduction of its tensors, else of the first backward."""
    events = [e for e in recording.ranks[0].of(Collective) if e.op in REDUCING and e.phase == "other"]
    sites = [e.site for e in events if set(found.tensors) & set(e.covers)][-1:]
    sites += [e.site for e in recording.ranks[0].of(Backward)][:1]
    site = found.site or next((site for site in sites if site), "")
    return replace(found, site=site) if found.verdict != NOTE or found.site else found


def _judged(run: Check, analysis: Analysis) -> list[Finding]:
    """What a check finds. An error inside it is the verifier's own: it is said."""
    try:
        return list(run(analysis))
    except VerifyError:  # the recording itself is damaged
        raise
    except Exception as error:
        what = (run.__doc__ or run.__name__).partition("\n")[0].rstrip(".")
        sentence = (
            f"step {analysis.step}: not judged: {what}: an error of the verifier in its check '{run.__name__}', please "
            f"report it: {type(error).__name__}: {error}"
        )
        return [Finding(INCONCLUSIVE if run is gradients.coefficients else NOTE, "", sentence)]


def _again(found: Finding, told: Finding) -> bool:
    """Whether a finding is told already: the same bug on some of the same tensors, or in a later step."""
    if (found.verdict, found.bug) != (told.verdict, told.bug):
        return False
    if not found.bug:
        return found.tensors == told.tensors and (bool(found.tensors) or found.sentence == told.sentence)
    return not found.tensors or not told.tensors or bool(set(found.tensors) & set(told.tensors))
