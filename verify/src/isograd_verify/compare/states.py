"""What modules carry from step to step beside weights (a loss's running mean): is it what one device makes of all rows?

Each rank's calls are done again on one device from what the rank had. Where that leaves what the rank has before its
next step, the rank has seen its own rows only; whether that matters, the gradient of the next step tells.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.compare.shares import Again
from isograd_verify.compare.tensorwise import block_error
from isograd_verify.record.events import ForwardInputs, LabelWeight, MeanWeight
from isograd_verify.record.recording import BEHIND, RankRecord, Recording, load
from isograd_verify.record.sketch import dtype_name, row_sizes
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding, listed
from isograd_verify.tell.wording import axis_over, equal, spell

STATE = "state/"


def moving(candidate: Recording) -> list[str]:
    """What modules carry that has changed within the watched steps."""
    files = [path for record in candidate.ranks for path in record.path.glob("call-*.safetensors")]
    return sorted({name.removeprefix(STATE) for path in files for name in load(path) if name.startswith(STATE)})


def local(candidate: Recording, again: list[Again]) -> tuple[int, dict[str, Tensor]]:
    """(the first step before which something has seen one rank's rows only, the means over ranks by name), else 0."""
    given = [t for record in candidate.ranks for e in record.of(ForwardInputs) for t in e.tensors.values()]
    rows = {size for one in given for size in row_sizes(one.shape, one.dtype)}  # a recurrent state belongs to its rows
    for step in sorted({one.of for one in again}):
        last = {one.rank: one for one in again if one.of == step}  # of each rank the last micro-batch
        paths = {rank: one.record.path / BEHIND.format(one.step) for rank, one in last.items()}
        calls = {rank: candidate.ranks[rank].path / f"call-{step + 1:04d}-0000-0000.safetensors" for rank in last}
        if len(last) < 2 or not all(path.exists() for path in (*paths.values(), *calls.values())):
            continue
        made, held = ({rank: load(path) for rank, path in of.items()} for of in (paths, calls))
        means = {}
        for name in set.intersection(*map(set, made.values())):
            own = [made[rank][name].double() for rank in last]
            theirs = [t.double() for rank in last if (t := held[rank].get(STATE + name)) is not None]
            followed = made[min(last)][name].is_floating_point() and not rows & {*own[0].shape}
            if not followed or [t.shape for t in theirs] != [t.shape for t in own]:
                continue
            limit = tolerances.START * max(float(t.norm()) for t in own)
            near = [[float((t - o).norm()) <= limit for o in own] for t in theirs]
            one = any(all(column) for column in zip(*near, strict=True))
            apart = max(float((o - own[0]).norm()) for o in own) > limit
            if apart and (one or all(near[i][i] for i in range(len(own)))):
                means[STATE + name] = torch.stack(own).mean(0).to(made[min(last)][name].dtype)
        if means:
            return step + 1, means
    return 0, {}


def moved(
    candidate: Recording, means: dict[str, Tensor], with_own: Again, with_mean: Again, errors: dict[str, float]
) -> list[Finding]:
    """A finding where the mean over all ranks gives other gradients; `errors` gets by how much."""
    ours, theirs = (one.record.group(one.step, "final") for one in (with_own, with_mean))
    whole = math.hypot(*(float(t.double().norm()) for t in theirs.values()))
    by = {name: block_error(ours[name], theirs[name], whole).error for name in ours.keys() & theirs.keys()}
    by = {name: error for name, error in by.items() if error > tolerances.LIMITS.get(dtype_name(ours[name]), (0, 0))[1]}
    if not by:
        return []
    errors |= by
    names, everyone = listed(sorted(n.rpartition("/")[2] for n in means)), tuple(range(candidate.world))
    sentence = (
        f"step {with_own.of}: {names} changes from step to step: on each of {spell(everyone)} it is made from the rows "
        f"of one rank, on one device from all rows; {len(by)} gradients differ for it (by up to {max(by.values()):.1e})"
    )
    tensors, axis = tuple(sorted(by)), axis_over(candidate, everyone)
    return [Finding(BUG, "statistic-unreduced", sentence, tensors=tensors, axis=axis)]


def carried(candidate: Recording, again: list[Again], found: Finding) -> Finding:
    """What ranks weigh unequally from some step on (judge/checks/losses.py) is decided: on the same rows one device
    weighs otherwise than the ranks, so the weight is not made of these rows, but of what each rank has carried."""
    step = step_of(found)
    here = [one for one in again if one.of == step and found.bug == "statistic-unreduced"]
    ours = [_weight(one.record, one.step, 0, found.site) for one in here]
    theirs = [_weight(candidate.ranks[one.rank], step, one.micro, found.site) for one in here]
    if found.verdict != INCONCLUSIVE or equal(a / b for a, b in zip(theirs, ours, strict=True) if b):
        return found
    told = found.sentence.removesuffix(", or weighs its rows on purpose")
    return replace(found, verdict=BUG, sentence=f"{told}, for one device weighs these rows otherwise")


def _weight(record: RankRecord, step: int, micro: int, site: str) -> float:
    labels = [e.low for e in record.of(LabelWeight, step) if (e.site, e.micro) == (site, micro)]
    means = [e.weight for e in record.of(MeanWeight, step) if (e.site, e.micro) == (site, micro)]
    return next(filter(None, [*labels, *means]), 0.0)


def step_of(found: Finding) -> int:
    """The step that a finding is about; 0: it does not say."""
    step = re.match(r"step (\d+): ", found.sentence)
    return int(step[1]) if step else 0
