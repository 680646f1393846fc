"""Check of the data: ranks whose gradients are summed as data ranks' are were given data of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.traffic import reductions
from isograd_verify.record.events import Collective, Draw, ForwardInputs
from isograd_verify.record.recording import RankRecord
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding
from isograd_verify.tell.wording import axis_over, spell


def own_data(analysis: Analysis) -> Iterator[Finding]:
    """No two data ranks compute the same: with equal inputs in every step they add nothing to each other."""
    if analysis.step != analysis.recording.steps[0]:
        return
    steps = analysis.recording.steps
    seen = [_seen(record, steps) for record in analysis.recording.ranks]
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, batches in enumerate(seen):
        if batches:
            alike[repr(batches)].append(rank)
    for members in alike.values():
        doubles = [members[0], *(r for r in members[1:] if _double(analysis, members[0], r))]
        if len(doubles) < 2:
            continue
        batches = seen[doubles[0]]
        several = len(set(batches)) > 1
        sentence = f"{spell(doubles)} were given the same data in all {len(batches)} watched micro-batches, "
        if several:
            sentence += "and their gradients are summed: they train as one rank would"
        else:
            sentence += "always the same batch: it is there to try something out, or by mistake"
        verdict = BUG if several else INCONCLUSIVE
        yield Finding(verdict, "same-data", sentence, axis=axis_over(analysis.recording, tuple(doubles)))
        return


def _seen(record: RankRecord, steps: list[int]) -> list[str]:
    """What a rank was given, call by call, in all steps that were seen whole; empty when some of it is not known."""
    found = []
    for event in record.of(ForwardInputs):
        if event.step in steps:
            if not event.tensors:
                return []
            found.append(", ".join(f"{name} {one.hash} {one.shape}" for name, one in event.tensors.items()))
    return found


def _double(analysis: Analysis, one: int, other: int) -> bool:
    """Whether two ranks with equal data are data ranks: they hold the same part of everything, their gradients are
    summed with each other, and each computes the whole of its batch: equal gradients, but for random masks."""
    names = [n for n in analysis.names if one in analysis.holders(n) or other in analysis.holders(n)]
    if not all(other in analysis.replicas_of(n, one) or analysis.covered(n) for n in names):
        return False
    if not any({one, other} <= set(event.group) for event in reductions(analysis)):
        return False
    mine, others = (_parts(analysis, rank) for rank in (one, other))
    if not mine or mine.keys() != others.keys():
        return False
    if not any(part.any() for part in mine.values()):
        return False  # neither adds anything: members of a cp group whose rows have no labels
    if all(float((mine[k] - others[k]).norm()) <= tolerances.SAME * float(mine[k].norm()) for k in mine):
        return True
    return bool(analysis.recording.ranks[one].of(Draw)) and not _talk(analysis, one, other)


def _parts(analysis: Analysis, rank: int) -> dict[tuple[str, int], Tensor]:
    """What each backward added on a rank, by name and micro-batch."""
    return {(name, m): part for name, parts in analysis.parts.items() for (r, m), part in parts.items() if r == rank}


def _talk(analysis: Analysis, one: int, other: int) -> bool:
    """Whether two ranks exchange anything in forward but parameters: each may have computed a part of the batch."""
    gathers = any(analysis.covered(name) for name in analysis.names)
    events = [e for e in analysis.recording.ranks[one].of(Collective) if e.phase == "forward"]
    return any(other in e.group and not (gathers and e.op == "all_gather") for e in events)
