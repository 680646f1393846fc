"""Check of autograd Functions that communicate: backward is the adjoint of forward, over the ranks of a group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.events import Function
from isograd_verify.tell.findings import BUG, Finding
from isograd_verify.tell.wording import axis_over

Calls = dict[int, Function]  # by rank


def adjoints(analysis: Analysis) -> Iterator[Finding]:
    """The backward of a function that gathers, sums or exchanges tensors is its adjoint."""
    told: set[str] = set()
    later: Finding | None = None
    for calls in _together(analysis):
        first, axis = next(iter(calls.values())), axis_over(analysis.recording, tuple(calls))
        parts = {rank: _parts(analysis, rank, call) for rank, call in calls.items()}
        made, given = (sum(getattr(call, what) for call in calls.values()) for what in ("made", "given"))
        size = sum(call.size for call in calls.values())
        rounding = tolerances.ADJOINT.get(first.dtype, tolerances.ADJOINT_HALF) * size
        several = float(len(calls))
        allowed = [made]
        allowed += [made / several] if _alike([p["came"] for p in parts.values()]) else []
        allowed += [made * several] if _alike([p["in"] for p in parts.values()]) else []
        right = any(abs(given - one) <= rounding for one in allowed)
        if first.site not in told and (left := _shifted([*parts.values()])):
            told.add(first.site)
            sentence = (
                f"step {analysis.step}: {first.name} at {first.site} is the cross-entropy of logits that are cut over "
                f"{axis}, and the gradient of a row, which sums to zero, sums to {left:.4g} for a label that weighs 1"
            )
            yield Finding(BUG, "wrong-adjoint", sentence, tensors=analysis.learning, axis=axis, site=first.site)
        overflow = not math.isfinite(made + given + size)
        if right or overflow or first.site in told or not _linear(calls, parts):
            continue
        if _passes_copies(analysis, parts):
            sentence = (
                f"step {analysis.step}: what {first.name} at {first.site} makes is one tensor on {axis}, which were "
                "given the same data, and each rank sends back another gradient to it: a later layer does not sum that "
                "of its input"
            )
            later = Finding(BUG, "input-unreduced", sentence, tensors=analysis.learning, axis=axis, site=first.site)
            continue
        told.add(first.site)
        sentence = (
            f"step {analysis.step}: {first.name} at {first.site}: its backward is not the adjoint of its forward: what "
            f"it made times what came back is {made:.6g} over the ranks, what it was given times what it sent back "
            f"{given:.6g}"
        )
        yield Finding(BUG, "wrong-adjoint", sentence, tensors=analysis.learning, axis=axis, site=first.site)
    if later is not None:
        yield later


def unjudged(analysis: Analysis) -> list[Function]:
    """The calls of functions that contents do not show to be linear: a loss over a cut vocabulary, say."""
    together = [*_together(analysis)]
    parts = [{rank: _parts(analysis, rank, call) for rank, call in calls.items()} for calls in together]
    return [next(iter(calls.values())) for calls, of in zip(together, parts, strict=True) if not _linear(calls, of)]


def _together(analysis: Analysis) -> Iterator[Calls]:
    """The calls of one function on all ranks of its group: the first of a line on each, the second, ..."""
    found: dict[tuple[object, ...], Calls] = defaultdict(dict)
    for record in analysis.recording.ranks:
        count: dict[tuple[object, ...], int] = defaultdict(int)
        for call in sorted(record.of(Function, analysis.step), key=lambda c: (c.micro, c.number)):
            key = (call.micro, call.site, call.name, call.group)
            if record.rank in call.group:
                found[(*key, count[key])][record.rank] = call
                count[key] += 1
    for (_, _, _, group, _), calls in found.items():
        if set(calls) == set(group):  # type: ignore[call-overload]
            yield calls


def _parts(analysis: Analysis, rank: int, call: Function) -> dict[str, Tensor]:
    return analysis.recording.ranks[rank].group(analysis.step, f"function/{call.number}")


def _shifted(groups: list[dict[str, Tensor]]) -> float:
    """To what the gradient of a row of logits sums that are cut over the ranks, where the forward is a cross-entropy,
    which does not see what is added to all logits of a row; 0.0 of anything else."""
    if not all("rows" in group for group in groups):
        return 0.0
    rows = torch.stack([group["rows"] for group in groups])  # [ranks, 5, rows]
    total, picked, (made, came), sent = rows[:, 0].logsumexp(0), rows[:, 1].sum(0), rows[0, 2:4], rows[:, 4].sum(0)
    if not bool(came.all()) or float((total - picked - made).norm()) > tolerances.FIT["float32"] * float(made.norm()):
        return 0.0
    each = sent / came
    worst = float(each[each.abs().argmax()])
    return worst if abs(worst) > tolerances.FACTOR else 0.0


def _passes_copies(analysis: Analysis, parts: dict[int, dict[str, Tensor]]) -> bool:
    """Whether ranks with the same data get back what they made in common, each its own gradient, which is passed on."""
    given, each = analysis.data_of(parts), [*parts.values()]
    same = all(given) and all(one == given[0] for one in given) and _alike([p["out"] for p in each])
    return same and not _alike([p["in"] for p in each]) and all(_close(p["sent"], p["came"]) for p in each)


def _alike(sketches: list[Tensor]) -> bool:
    return all(_close(one, sketches[0]) for one in sketches[1:])


def _close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= tolerances.FIT["float32"] * float(other.norm())


def _linear(calls: Calls, parts: dict[int, dict[str, Tensor]]) -> bool:
    """Whether what was made is what was given, in other places, or its sum over the ranks, times one number."""
    given = [int(call.contents[0]) for call in calls.values()]
    made = [int(call.contents[1]) for call in calls.values()]
    everything = sum(given) % 2**64
    if all(one == everything for one in made) or sum(made) % 2**64 == everything or given == made:
        return True  # a gather; an exchange; nothing in forward
    if len(set(given)) == 1 and sum(made) % 2**64 == given[0]:
        return True  # parts of what all ranks have
    inputs, outputs = ([p[what] for p in parts.values()] for what in ("in", "out"))
    total = sum(inputs[1:], inputs[0])
    factor = float(outputs[0] @ total) / max(float(total @ total), 1e-300)
    return factor != 0 and all(_close(one, factor * total) for one in outputs)
