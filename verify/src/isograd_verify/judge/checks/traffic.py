"""Checks of traffic: who calls which collective, over whom, in which dtype; what sums a tensor, and who draws which
random numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise, zip_longest

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.record.axes import DATA, Axes
from isograd_verify.record.events import REDUCING, Collective, Draw, RowSums, Step
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, listed
from isograd_verify.tell.wording import axis_over, spell

HALF = ("bfloat16", "float16")
FEWEST = 64  # elements of an activation: with fewer, two masks may be equal by chance


def served_ranks(analysis: Analysis) -> tuple[int, ...]:
    """Ranks that take no optimizer step, while others do, and are sent tensors: those of a parameter server."""
    records = analysis.recording.ranks
    never = [record for record in records if all(e.note for e in record.of(Step))]
    if len(never) == len(records):
        return ()
    calls = [[e for e in r.of(Collective) if e.op in ("broadcast", "scatter", "recv")] for r in never]
    sent = all(any(e.phase == "other" and e.numel > 1 and e.passed for e in own) for own in calls)
    return tuple(record.rank for record in never) if sent else ()


def order(analysis: Analysis) -> Iterator[Finding]:
    """Members of a group issue the same collectives in the same order."""
    if served_ranks(analysis):
        return
    for group, members in called(analysis.recording, analysis.step).items():
        first = members[group[0]]
        for rank in group[1:]:
            if any(_unseen(analysis, group, r, len(members[r])) for r in (group[0], rank)):
                continue
            for i, (a, b) in enumerate(zip_longest(first, members[rank])):
                if a is None or b is None or signature(a) != signature(b):
                    sentence = (
                        f"step {analysis.step}: collective {i + 1} over {spell(group)}: rank {group[0]} calls "
                        f"{a or 'none'}, rank {rank} calls {b or 'none'}"
                    )
                    yield Finding(BUG, "order", sentence, axis=spell(group))
                    return


def called(recording: Recording, step: int | None = None) -> dict[tuple[int, ...], dict[int, list[Collective]]]:
    """By group: the collectives that each of its members called, in a step or in all."""
    found: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    for record in recording.ranks:
        for event in record.of(Collective, step):
            if event.op not in ("send", "recv") and record.rank in event.group:
                found.setdefault(event.group, {rank: [] for rank in event.group})[record.rank].append(event)
    return found


def _unseen(analysis: Analysis, group: tuple[int, ...], rank: int, seen: int) -> bool:
    """Whether a rank issued more collectives than were seen, and all members as many: some ran in other threads."""
    key = ",".join(map(str, group))
    records = [analysis.recording.ranks[member] for member in group]
    counts = [{e.step: e.issued[key] for e in record.of(Step) if key in e.issued} for record in records]
    now = {told.get(analysis.step) for told in counts}
    before = counts[group.index(rank)].get(analysis.step - 1)
    (total,) = now if len(now) == 1 else (None,)
    return total is not None and before is not None and total - before > seen


def local_steps(analysis: Analysis) -> Finding | None:
    """Gradients are summed over fewer ranks than in the step before, by the same calls, as by local SGD."""
    groups: dict[tuple[int, ...], Collective] = {}
    for record in analysis.recording.ranks:
        now, before = (
            [e for e in record.of(Collective, step) if e.op in REDUCING and e.phase == "backward" and e.numel > 1]
            for step in (analysis.step, analysis.step - 1)
        )
        if not now or [(e.op, e.numel) for e in now] != [(e.op, e.numel) for e in before]:
            return None
        if not all(set(a.group) < set(b.group) for a, b in zip(now, before, strict=True)):
            return None
        groups |= {e.group: b for e, b in zip(now, before, strict=True)}
    if not groups:
        return None
    whole = next(iter(groups.values()))
    sentence = (
        f"step {analysis.step}: {whole.op} at {whole.site} runs over {' and '.join(spell(g) for g in groups)}, and ran "
        f"over {spell(whole.group)} in step {analysis.step - 1}: local SGD does so on purpose, and averages weights "
        "later; steps are judged up to here"
    )
    return Finding(INCONCLUSIVE, "", sentence, axis=spell(whole.group))


def signature(event: Collective) -> tuple[object, ...]:
    """What members of a group must have in common."""
    same_size = event.op in ("all_reduce", "broadcast", "reduce")
    return (event.op, event.dtype, event.numel if same_size else 0)


def groups(analysis: Analysis) -> Iterator[Finding]:
    """Groups that reduce gradients are axes of some mesh: ranks at equal distances."""
    odd = {}
    for _, event in analysis.of(Collective):
        g = event.group
        if len(g) > 2 and event.covers and len({b - a for a, b in pairwise(g)}) > 1:
            odd[tuple(g)] = event
    for group, event in odd.items():
        where = f"{event.op} at {event.site}"
        sentence = f"step {analysis.step}: {where} runs over {spell(group)}, which is no axis of a mesh"
        yield Finding(NOTE, "wrong-group", sentence, tensors=event.covers, axis=spell(group))


def reduced_in_half(analysis: Analysis) -> list[Collective]:
    """Reductions in half precision while gradients are kept in a wider one."""
    kinds = [{i.gradient_dtype, i.dtype} for about in analysis.about for i in about.values()]
    if not any(of <= {"float32", "float64"} for of in kinds):
        return []
    narrow = [{n for n, i in about.items() if i.gradient_dtype in HALF} for about in analysis.about]
    half = [(rank, e) for rank, e in analysis.of(Collective) if e.op in REDUCING and e.dtype in HALF and e.numel > 1]
    half = [(rank, e) for rank, e in half if e.phase != "forward"]
    return [e for rank, e in half if not (e.covers and narrow[rank].issuperset(e.covers))]


def reductions(analysis: Analysis, smallest: int = 2) -> list[Collective]:
    """Collectives of the step that may have summed gradients, of at least so many elements."""
    kinds = ("all_reduce", "reduce_scatter", "reduce", "all_to_all", "send", "recv")
    phases = ("backward", "other", "step")
    return [e for _, e in analysis.of(Collective) if e.op in kinds and e.phase in phases and e.numel >= smallest]


def dtypes(analysis: Analysis) -> Iterator[Finding]:
    """Gradients kept in single precision are summed in single precision."""
    half = reduced_in_half(analysis)
    if half:
        event = half[0]
        names = tuple(sorted({n for e in half for n in e.covers}))
        if not all(e.covers for e in half):  # packed buffers: which gradients were in them is not known
            names = analysis.learning
        sentence = (
            f"step {analysis.step}: {len(half)} reductions of fp32 gradients ran in {event.dtype}: "
            f"{event.op} at {event.site}"
        )
        axis = axis_over(analysis.recording, event.group)
        yield Finding(BUG, "bf16-reduction", sentence, tensors=names, axis=axis, site=event.site)


def row_sums(analysis: Analysis) -> Iterator[Finding]:
    """The rows of one token id are summed without losing what is added."""
    lost: dict[str, list[tuple[float, int, RowSums]]] = defaultdict(list)
    for rank, e in analysis.of(RowSums):
        lost[e.module].append((e.error, rank, e))
    for module, told in lost.items():
        worst = max(told, key=lambda one: one[:2])[2]
        names = tuple(n for n in analysis.names if n == f"{module}.weight".lstrip("."))
        sentence = (
            f"step {analysis.step}: the gradient of {listed(names) or 'an embedding'} is off by {worst.error:.2g}: "
            f"rows of a token id are added in {worst.dtype}; id {worst.token} occurs {worst.times} times in a backward"
        )
        axis = axis_over(analysis.recording, tuple({rank for _, rank, _ in told}))
        yield Finding(BUG, "bf16-accumulation", sentence, tensors=names, axis=axis)


def random_draws(analysis: Analysis) -> Iterator[Finding]:
    """Ranks that hold the same activation drop the same elements of it."""
    draws: dict[tuple[str, int, int], dict[int, Draw]] = defaultdict(dict)
    count: Counter[tuple[int, str, int]] = Counter()
    for rank, event in analysis.of(Draw):
        key = (rank, event.module, event.forward)
        draws[(event.module, event.forward, count[key])][rank] = event
        count[key] += 1
    apart: dict[str, tuple[int, ...]] = {}
    for (module, forward, _), by_rank in draws.items():
        for rank, event in by_rank.items():
            others = [r for r, e in by_rank.items() if e.into == event.into and e.out != event.out]
            twins = [r for r in others if not _data_ranks(analysis, rank, r, forward)]
            if twins:
                apart[module] = tuple(sorted({rank, *twins}))
    if apart:
        ranks = next(iter(apart.values()))
        sentence = (
            f"step {analysis.step}: {listed(tuple(apart))}: copies of one activation on "
            f"{spell(ranks)} were given different random masks"
        )
        axis = axis_over(analysis.recording, ranks)
        yield Finding(BUG, "norm-dropout-rng", sentence, tensors=tuple(apart), axis=axis)


def shared_draws(analysis: Analysis) -> Iterator[Finding]:
    """Ranks that hold different activations drop different elements of them."""
    masks: dict[tuple[str, int, str], dict[int, Draw]] = defaultdict(dict)
    for rank, event in analysis.of(Draw):
        if event.mask and math.prod(event.shape) >= FEWEST:
            masks[event.module, event.forward, event.mask].setdefault(rank, event)
    shared: dict[str, tuple[int, ...]] = {}
    for (module, _, _), by_rank in masks.items():
        if len({event.into for event in by_rank.values()}) > 1:
            shared.setdefault(module, tuple(sorted(by_rank)))
    if shared:
        ranks = next(iter(shared.values()))
        sentence = (
            f"step {analysis.step}: {listed(tuple(shared))}: {spell(ranks)} drop the same elements of different "
            "activations: their random states are equal, so the noise of dropout is not averaged over them"
        )
        axis = axis_over(analysis.recording, ranks)
        yield Finding(NOTE, "same-masks", sentence, tensors=tuple(shared), axis=axis)


def replayed_draws(analysis: Analysis) -> Iterator[Finding]:
    """What a module makes of an input without a graph, it makes of it again with one: representations were cached."""
    apart: dict[str, int] = {}
    cached: dict[tuple[int, str, str], set[str]] = defaultdict(set)
    for rank, event in analysis.of(Draw):
        key = (rank, event.module, event.into)
        if not event.graph:
            cached[key].add(event.out)
        elif key in cached and event.out not in cached[key]:
            apart.setdefault(event.module, rank)
    if apart:
        names, rank = tuple(sorted(apart)), next(iter(apart.values()))
        sentence = (
            f"step {analysis.step}: {listed(names)}: the same input was encoded without a graph and then with one, and "
            f"drew other random numbers (rank {rank} first): cached gradients belong to other representations"
        )
        yield Finding(BUG, "cache-rng", sentence, tensors=names)


def _data_ranks(analysis: Analysis, one: int, other: int, forward: int) -> bool:
    """Whether two ranks work on different data, and drop what they like: by the layout, else by their data; ranks that
    were given the same data are data ranks if what each of them adds to the parameters that both hold is summed."""
    text = str(analysis.recording.about.get("layout", ""))
    if text:
        here, there = (Axes.parse(text, analysis.recording.world).coordinates(rank) for rank in (one, other))
        return any(here[axis] != there[axis] for axis in DATA.split())
    mine, theirs = (analysis.data.get((rank, forward)) for rank in (one, other))
    if mine != theirs:
        return True
    shared = [n for n in analysis.names if analysis.contributions(n) and other in analysis.replicas_of(n, one)]
    fits = [analysis.fit(seen) for n in shared for seen in analysis.observed(n) if one in seen.ranks]
    telling = [f for f in fits if f is not None and {one, other} <= {rank for rank, _ in f.coefficients}]
    counting = [{rank for (rank, _), c in f.coefficients.items() if c} for f in telling]
    return bool(telling) and all({one, other} <= ranks for ranks in counting)


Group = tuple[int, ...]


def mixed_groups(analysis: Analysis) -> Iterator[Finding]:
    """A tensor that began constant may be a shard as its module's weights are: it is summed over their group only."""
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
