"""Check of groups: what sums a tensor does not reach beyond the ranks that hold the same part of its module."""

from __future__ import annotations

from collections.abc import Iterator

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.traffic import reductions
from isograd_verify.tell.findings import INCONCLUSIVE, Finding, listed
from isograd_verify.tell.wording import axis_over, spell

Group = tuple[int, ...]


def mixed_groups(analysis: Analysis) -> Iterator[Finding]:
    """A tensor that began constant may be a shard as its module's weights are: it is summed over their group only.

    Tensors with values of their own are told apart by them, and the check of coefficients says what sums them.
    """
    found: dict[tuple[Group, Group], list[str]] = {}
    for name in analysis.names:
        mixed = _mixed(analysis, name)
        if mixed is not None:
            found.setdefault(mixed, []).append(name)
    for (wide, narrow), names in found.items():
        sentence = (
            f"step {analysis.step}: {listed(names)} began constant and is summed over {spell(wide)}, the weights of "
            f"its module, which are cut, over {spell(narrow)} alone: right for a copy of whose gradient each rank has "
            "a part, wrong for a shard; compare with one device"
        )
        others = (narrow[0], *(r for r in wide if r not in narrow))
        axis = axis_over(analysis.recording, others)
        yield Finding(INCONCLUSIVE, "wrong-group", sentence, tensors=tuple(names), axis=axis)


def _mixed(analysis: Analysis, name: str) -> tuple[Group, Group] | None:
    """(the group over which it is summed, the smaller one of its module's weights), if that may be wrong."""
    if not analysis.info(name).constant or analysis.info(name).box is not None:
        return None
    module = name.rpartition(".")[0]
    siblings = [n for n in analysis.names if n != name and n.rpartition(".")[0] == module]
    for sibling in siblings:
        parts = [set(ranks) for ranks in analysis.replica_sets(sibling)]
        if len(parts) < 2 or analysis.covered(sibling):
            continue
        wide, narrow = _groups(analysis, name), _groups(analysis, sibling)
        for one in narrow:
            part = next((p for p in parts if set(one) <= p), None)
            over = next((g for g in wide if set(g) > set(one)), None)
            beyond = part is not None and over is not None and not set(over) <= part
            if over is not None and beyond and len(one) > 1 and not _copied(analysis, name, one, over):
                return over, one
    return None


def _groups(analysis: Analysis, name: str) -> list[Group]:
    return sorted({event.group for event in reductions(analysis) if name in event.covers})


def _copied(analysis: Analysis, name: str, inside: Group, over: Group) -> bool:
    """Whether ranks outside add the very same as ranks inside: then it is a copy, and its sum is too large."""
    parts = analysis.contributions(name)
    mine = [p for (rank, _), p in parts.items() if rank in inside]
    others = [p for (rank, _), p in parts.items() if rank in over and rank not in inside]
    return any(float((a - b).norm()) <= tolerances.SAME * float(a.norm()) for a in mine for b in others)
