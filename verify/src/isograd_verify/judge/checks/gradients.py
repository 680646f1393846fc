"""Checks of the gradient itself: every contribution counts equally, in every tensor."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from isograd_verify import tolerances
from isograd_verify.judge import patterns
from isograd_verify.judge.analysis import ELSEWHERE, Analysis, Observed
from isograd_verify.judge.checks.copies import exchange
from isograd_verify.judge.checks.norms import clipped_apart, clipped_early
from isograd_verify.judge.checks.traffic import reduced_in_half, reductions
from isograd_verify.judge.contributions import Fit, fit
from isograd_verify.judge.patterns import Symptom, bug_of, class_of, classes_of
from isograd_verify.record.axes import DATA
from isograd_verify.record.events import REDUCING, Collective, Key, Rewritten
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, listed
from isograd_verify.tell.wording import axis_over, group_sizes, labelled, meanings, spell, spread


@dataclass
class _Read:
    """What the coefficients of all tensors say, before it is put into sentences."""

    # (bug if already known, kind, value, axis) -> tensors with their coefficients
    patterned: dict[tuple[str, str, float, str], dict[str, dict[Key, float]]] = field(default_factory=dict)
    # tensors whose contributions all have one coefficient -> that coefficient on each rank that tells it
    scales: dict[str, dict[int, float]] = field(default_factory=dict)
    # the same tensors -> the coefficients that one contribution may have: several where contributions are equal
    possible: dict[str, tuple[float, ...]] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)  # tensors whose contributions are equal on several ranks, every one
    undetermined: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    where: dict[str, set[int]] = field(default_factory=dict)  # tensors with a pattern -> ranks that hold such a part

    def add(self, bug: str, kind: str, value: float, axis: str, name: str, found: dict[Key, float]) -> None:
        """A tensor is told once for each pattern, as the first rank sees it: other ranks miss other ranks' parts."""
        known = [key for key, tensors in self.patterned.items() if key[:3] == (bug, kind, value) and name in tensors]
        if not known:
            self.patterned.setdefault((bug, kind, value, axis), {})[name] = found


def coefficients(analysis: Analysis) -> Iterator[Finding]:
    """Every contribution counts equally, on all ranks: each owed axis reduced once, no micro-batch lost."""
    read = _read(analysis)
    yield from _patterned(analysis, read)
    if not read.patterned:
        apart = _uneven(analysis, read)
        if apart:
            yield _per_rank(analysis, read.scales, apart)
        for name in read.undetermined:  # else other tensors of the same run tell which pattern it is
            sentence = (
                f"step {analysis.step}: {name} is too small to tell its contributions apart, and they do not all "
                "count equally"
            )
            yield Finding(INCONCLUSIVE, "", sentence, tensors=(name,))
    if read.unexplained:
        yield from _unexplained(analysis, list(dict.fromkeys(read.unexplained)))


def scales(analysis: Analysis) -> Iterator[Finding]:
    """No class of tensors counts more often than the others."""
    read = _read(analysis)
    if not read.patterned and not _uneven(analysis, read):
        yield from _per_class(analysis, read)


def summed_inside(analysis: Analysis) -> Iterator[Finding]:
    """Gradients are summed in the model's parameters, before an optimizer gets them."""
    for known in (True, False):
        inside = {n: e for n, e in analysis.summed_inside.items() if (n in analysis.added_inside) is known}
        if not inside:
            continue
        event = next(iter(inside.values()))
        sentence = f"{_whom(analysis, inside)}: the optimizer sums them inside its step ({event.op} at {event.site})"
        if known:
            sentence += ": the mean of what the ranks brought to the step is judged, and not what the sum is divided by"
        else:
            sentence += (
                ", from memory that is not theirs: what becomes of them there is not read; copies are equal behind "
                "the step although each rank came with its own"
            )
        verdict, axis = NOTE if known else INCONCLUSIVE, axis_over(analysis.recording, event.group)
        yield Finding(verdict, "", sentence, tensors=tuple(inside), axis=axis)
    elsewhere = [name for name, why in analysis.unread.items() if why == ELSEWHERE]
    if elsewhere:
        sentence = (
            f"{_whom(analysis, elsewhere)}: each rank has its own, no optimizer owns the parameters, and yet all ranks "
            f"give them the same new values: {ELSEWHERE}"
        )
        yield Finding(INCONCLUSIVE, "", sentence, tensors=tuple(elsewhere))


def rewritten(analysis: Analysis) -> Iterator[Finding]:
    """Gradients that the program changes itself, other than by a factor, are judged as they were before."""
    if analysis.put_back:
        site = next(event.site for _, event in analysis.of(Rewritten))
        sentence = (
            f"step {analysis.step}: {listed(analysis.put_back)} were changed by the program itself before the step, "
            f"and not by one factor ({site}): they are judged as they were before"
        )
        yield Finding(NOTE, "", sentence, tensors=analysis.put_back)


def _whom(analysis: Analysis, names: Collection[str]) -> str:
    whole = len(names) == len(analysis.names)
    return f"step {analysis.step}: {f'all {len(names)} gradients' if whole else listed(tuple(names))}"


def _uneven(analysis: Analysis, read: _Read) -> list[str]:
    loose = tolerances.LOOSE
    return [n for n, found in read.scales.items() if spread(found.values()) > loose * analysis.tolerance(n)]


def _read(analysis: Analysis) -> _Read:
    read = _Read()
    for name in analysis.names:
        known = name not in analysis.unsure and name not in analysis.unread
        if known and analysis.contributions(name) and not analysis.negligible(name):
            _read_tensor(analysis, name, read)
    for name in _mixed(analysis, read.unexplained):
        axis = axis_over(analysis.recording, analysis.all_ranks)
        read.add("parameters-mixed", patterns.MIXED, 1.0, axis, name, {})
        read.unexplained = [other for other in read.unexplained if other != name]
    return read


def _read_tensor(analysis: Analysis, name: str, read: _Read) -> None:
    loose = tolerances.LOOSE * analysis.tolerance(name)
    for seen in analysis.observed(name):
        found = analysis.fit(seen)
        if found is None:
            continue
        mixed = _other_shards(analysis, name, seen.own, found.coefficients)
        if mixed and found.residual <= loose and (found.uniform or found.determined):
            axis = axis_of(analysis, patterns.MIXED, (seen.own, *mixed), seen.own)
            read.add("wrong-group", patterns.MIXED, 1.0, axis, name, found.coefficients)
        elif found.uniform:
            possible = found.each
            if all(len(members) > 1 for members in found.classes.values()):  # equal to one of another rank
                read.alike.add(name)
                if _summed_in_backward(analysis, name, found):
                    possible = possible[:1]
            read.possible[name] = possible
            read.scales.setdefault(name, {}).update(dict.fromkeys(seen.ranks, possible[0]))
        elif found.residual > loose:
            read.unexplained.append(name)
        elif not found.determined:
            read.undetermined.append(name)
        else:
            _read_pattern(analysis, seen, found, loose, read)


def _read_pattern(analysis: Analysis, seen: Observed, found: Fit, loose: float, read: _Read) -> None:
    symptom = patterns.read(found.coefficients, seen.own, analysis.counts, loose)
    if symptom.kind == patterns.MIXED:  # equal contributions may all count, and then have one coefficient together
        shared = {k: c / len(found.classes[k]) for k, c in found.coefficients.items()}
        symptom = patterns.read(shared, seen.own, analysis.counts, loose)
    if symptom.kind == patterns.MIXED and clipped_apart(analysis, found.coefficients):
        symptom = Symptom(patterns.CLIPPED)
    if symptom.kind == patterns.MIXED and clipped_early(analysis, found.coefficients):
        symptom = Symptom(patterns.CLIPPED_EARLY)
    if symptom.kind == patterns.SCALED:  # equal, but for rounding
        read.possible[seen.name] = (symptom.value,)
        read.scales.setdefault(seen.name, {}).update(dict.fromkeys(seen.ranks, symptom.value))
        return
    value = round(symptom.value, 3) if symptom.kind in (patterns.REREDUCED, patterns.REDIVIDED) else 1.0
    across = symptom.kind in (patterns.UNREDUCED, patterns.OTHER_CUTS)
    gone = {r for first, alike in found.classes.items() if first[0] in symptom.missing for r, _ in alike}
    axis = axis_of(analysis, symptom.kind, (seen.own, *sorted(gone)) if across else (), seen.own)
    read.add("", symptom.kind, value, axis, seen.name, found.coefficients)
    read.where.setdefault(seen.name, set()).update(analysis.replicas_of(seen.name, seen.own), seen.ranks)


def _summed_in_backward(analysis: Analysis, name: str, found: Fit) -> bool:
    """Whether backward summed a gradient of this size over ranks that add the same: they are copies of one sum."""
    together = [{rank for rank, _ in members} for members in found.classes.values()]
    size = math.prod(analysis.info(name).part_shape)
    sums = [e for e in reductions(analysis, size) if e.op == "all_reduce" and e.phase == "backward" and not e.covers]
    return any(event.numel == size and all(set(event.group) <= ranks for ranks in together) for event in sums)


def _other_shards(analysis: Analysis, name: str, own: int, found: dict[Key, float]) -> tuple[int, ...]:
    """Ranks that hold another part of the parameter and yet entered this gradient."""
    if name in analysis.same_part:
        return ()
    mine = analysis.replicas_of(name, own)
    top = max(map(abs, found.values()))
    return tuple(sorted({k for (k, _), c in found.items() if k not in mine and abs(c) > tolerances.COUNTS * top}))


def _patterned(analysis: Analysis, read: _Read) -> Iterator[Finding]:
    telling = {n for n in analysis.names if analysis.info(n).gradient and not analysis.null(n)}
    sizes = group_sizes(analysis.recording)
    telling -= read.alike | set(read.undetermined)  # neither tells which contributions are missing
    for (known, kind, value, axis), tensors in read.patterned.items():
        names = tuple(sorted(tensors))
        everything = set(names) >= telling
        bug = known or bug_of(Symptom(kind, value), names, everything, sizes, ())
        if not bug and kind == patterns.UNREDUCED:
            names += tuple(name for name in sorted(read.undetermined) if own_only(analysis, name))
            bug = never_summed(analysis, names)
        parts = other_data(analysis) if kind == patterns.UNREDUCED else None
        if parts is not None:
            ranks, cut = parts
            sentence = (
                f"step {analysis.step}: {spell(ranks)} hold parts of one model ({listed(cut)}), whose outputs are "
                f"summed in forward, and were given different data: {listed(names)} get a gradient of their own on each"
            )
            along, bars = axis_over(analysis.recording, ranks), labelled(tensors[names[0]])
            yield Finding(BUG, "inputs-differ", sentence, tensors=names, axis=along, coefficients=bars)
            continue
        here = {rank for name in names for rank in read.where.get(name, analysis.holders(name))}
        held = {rank for name in names for rank in analysis.holders(name)}
        apart = not (analysis.same_data(held) or exchange(analysis, tuple(held)))
        if bug == "wrong-group" and (axis in DATA.split() or apart):
            bug = "replicas-differ"  # no parameter is cut over data ranks: these were to be copies
        where = f" on {spell(sorted(here))}" if here < held else ""  # stages may share their names
        whom = f"all {len(names)} gradients" if everything and not where else f"{classes_of(names)} ({listed(names)})"
        of_bugs = {
            "replicas-differ": f"summed over {axis} as copies are, but the copies began with different values",
            "parameters-mixed": "ranks bring gradients of different parameters to one reduction, which adds them up by "
            "their places",
            "outside-wrapper": f"never summed over {axis}: each rank trains a network of its own",
        }
        said = of_bugs.get(bug) or patterns.said(patterns.SHARDS if bug == "wrong-group" else kind, value, axis)
        sentence = f"step {analysis.step}: {whom}{where}: {said}"
        yield Finding(BUG, bug, sentence, tensors=names, axis=axis, coefficients=labelled(tensors[names[0]]))


def other_data(analysis: Analysis) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """(ranks that hold parts of one model, sum activations in forward and were given different data; what is cut over
    them). Ranks that exchange tokens of experts, or gather parts of sequences, have data of their own."""
    forward = [e for _, e in analysis.of(Collective) if e.phase == "forward"]
    own = {e.group for e in forward if e.op in ("all_to_all", "all_gather", "reduce_scatter")}
    for group in {e.group for e in forward if e.op == "all_reduce" and e.numel > 1} - own:
        given = analysis.data_of(group)
        if len(group) < 2 or not all(given) or all(one == given[0] for one in given):
            continue
        cut = [
            name for name in analysis.names
            if class_of(name) != "experts" and not analysis.covered(name)
            and sum(bool(set(group) & set(ranks)) for ranks in analysis.replica_sets(name)) == len(group)
        ]  # fmt: skip
        if cut:
            return group, tuple(cut)
    return None


def own_only(analysis: Analysis, name: str) -> bool:
    """Whether what a rank added explains its gradient, of a tensor with too few numbers to tell all contributions."""
    for seen in analysis.observed(name):
        every = analysis.contributions(name, seen.own)
        if math.prod(analysis.info(name).whole) > len(every):
            return False
        parts = {key: part for key, part in every.items() if key[0] in seen.ranks}
        found = fit(seen.sketch, parts, analysis.tolerance(name), seen.own)
        if found is None or not found.uniform:
            return False
    return True


def never_summed(analysis: Analysis, names: Collection[str]) -> str:
    """`outside-wrapper` where tensors that nobody sums are all that their modules have, while a wrapper sums others
    inside backward and ranks have data of their own; `tie-unreduced` where they are all that their ranks share."""
    holders = [analysis.about[rank] for rank in analysis.holders(min(names))]
    if len(holders) > 1 and set(names) == set.intersection(*map(set, holders)) and min(map(len, holders)) > len(names):
        return "tie-unreduced"
    modules = {name.rpartition(".")[0] for name in names}
    whole = all(
        name in names or analysis.info(name).whole in ((), (1,))
        for name in analysis.names
        if name.rpartition(".")[0] in modules and analysis.info(name).gradient and not analysis.null(name)
    )
    reduced = any(event.phase == "backward" and event.op in REDUCING for event in reductions(analysis))
    return "outside-wrapper" if whole and reduced and not analysis.same_data(analysis.holders(min(names))) else ""


def axis_of(analysis: Analysis, kind: str, ranks: tuple[int, ...], own: int) -> str:
    """The axis over which a pattern runs; `ranks`: those whose part is missing, or that are told apart."""
    if kind == patterns.PER_TOKEN:
        return "ranks and micro-batches"
    if kind in (patterns.USE_LOST, patterns.CLIPPED):
        return axis_over(analysis.recording, analysis.all_ranks)
    return axis_over(analysis.recording, ranks, own) if ranks else "micro-batches"


def _per_rank(analysis: Analysis, scales: dict[str, dict[int, float]], apart: list[str]) -> Finding:
    """A norm of each rank's own gives each rank one factor; what changes tensor by tensor may be meant to."""
    axis = axis_over(analysis.recording, tuple(sorted({rank for name in apart for rank in scales[name]})))
    on: dict[int, list[float]] = defaultdict(list)
    for by_rank in scales.values():
        for rank, c in by_rank.items():
            on[rank].append(c)
    loose = max(tolerances.LOOSE * analysis.tolerance(name) for name in apart)
    bars = tuple((f"rank {rank}", values[0]) for rank, values in sorted(on.items()))
    whom = f"all {len(scales)} gradients" if len(apart) == len(scales) else f"{classes_of(apart)} ({listed(apart)})"
    sentence = f"step {analysis.step}: {whom}: scaled differently on {axis}"
    if all(spread(values) <= loose for values in on.values()):
        factors = ", ".join(f"{name} by {value:.4g}" for name, value in bars)
        sentence += f", as by a clip that takes each rank's own norm: {factors}"
        return Finding(BUG, "clip-per-rank", sentence, tensors=tuple(sorted(apart)), axis=axis, coefficients=bars)
    sentence += ", tensor by tensor: adaptive clipping does so on purpose; a run on one device would decide"
    return Finding(INCONCLUSIVE, "", sentence, tensors=tuple(sorted(apart)), axis=axis)


def _per_class(analysis: Analysis, read: _Read) -> Iterator[Finding]:
    """All tensors of a step share one coefficient; a class with another one was divided or reduced apart."""
    scales = {name: next(iter(by_rank.values())) for name, by_rank in read.scales.items()}
    before = {name: c for name, c in scales.items() if name not in analysis.summed_inside}
    scales = before or scales  # what a sum inside the step is divided by there is not known
    counted = Counter(round(math.log(abs(c)) * 200) for name in scales for c in read.possible[name] if c)
    if not counted or len(scales) < 2:
        return
    usual_key = counted.most_common(1)[0][0]
    every = [c for name in scales for c in read.possible[name]]
    usual = next(c for c in every if c and round(math.log(abs(c)) * 200) == usual_key)
    odd: dict[float, list[str]] = defaultdict(list)
    for name, c in scales.items():
        far = max(tolerances.LOOSE * analysis.tolerance(name), tolerances.FACTOR) * abs(usual)
        if all(abs(possible - usual) > far for possible in read.possible[name]):
            times = c / usual  # rounded, so that tensors with one factor are told together; a small one is not zero
            odd[round(times, 3) or (times if abs(times) > tolerances.ROUNDING_OTHER else 0.0)].append(name)
    unclear: dict[str, float] = {}
    for factor, names in odd.items():
        of = meanings(analysis.recording, analysis.micros, factor)
        bug = bug_of(Symptom(patterns.SCALED, factor), names, False, group_sizes(analysis.recording), of)
        if not bug and not of:
            unclear |= dict.fromkeys(names, factor)
            continue
        meant = f" ({' or '.join(of.values())})" if of else ""
        sentence = (
            f"step {analysis.step}: {classes_of(names)} ({listed(names)}) count {factor:g} times{meant} where the "
            "other tensors count once"
        )
        bars = (("most tensors", usual), *((n, scales[n]) for n in names[:8]))
        yield Finding(BUG, bug, sentence, tensors=tuple(names), axis=spell(analysis.all_ranks), coefficients=bars)
    if unclear:
        names = list(unclear)
        low, high = min(unclear.values()), max(unclear.values())
        sentence = (
            f"step {analysis.step}: {listed(names)} count {low:g} to {high:g} times where the other tensors count "
            "once, which is the size of no group: adaptive clipping does so on purpose; one device would decide"
        )
        bars = (("most tensors", usual), *((n, scales[n]) for n in names[:8]))
        yield Finding(INCONCLUSIVE, "", sentence, tensors=tuple(names), coefficients=bars)


def _mixed(analysis: Analysis, names: Collection[str]) -> tuple[str, ...]:
    """Tensors of one shape, each without a gradient on some rank, that are a sum of contributions together alone."""
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in analysis.names if names else ():
        if analysis.parts[name] and {rank for rank, _ in analysis.parts[name]} < set(analysis.holders(name)):
            alike[analysis.info(name).whole].append(name)
    found: list[str] = []
    for tensors in alike.values():
        parts = [part for name in tensors for part in analysis.parts[name].values()]
        seen = [sums[name] for sums in analysis.sums for name in tensors if name in sums]
        if seen and parts and set(tensors) & set(names):
            whole, added = (sum(of[1:], of[0]) for of in (seen, parts))
            left = whole - added * (whole @ added / (added @ added))
            found += tensors if left.norm() <= tolerances.LOOSE * analysis.tolerance(tensors[0]) * whole.norm() else []
    return tuple(found)


def _unexplained(analysis: Analysis, names: list[str]) -> Iterator[Finding]:
    """What is no sum of contributions at all: half-precision reductions leave about 2**-9 of each."""
    half = reduced_in_half(analysis)
    fits = (analysis.fit(seen) for name in names for seen in analysis.observed(name))
    worst = max((found.residual for found in fits if found), default=0.0)
    if half and worst < tolerances.HALF_SUM:
        return  # the check of dtypes says it
    narrow = next((event for event in reductions(analysis, len(names)) if event.narrow), None)
    if narrow is not None and analysis.micros > 1 and worst < tolerances.HALF_SUM:
        sentence = (
            f"step {analysis.step}: {listed(names)}: what {analysis.micros} micro-batches added was added up in bf16 "
            f"(every number that {narrow.op} at {narrow.site} is given is one of bf16; left over: {worst:.1e})"
        )
        yield Finding(BUG, "bf16-accumulation", sentence, tensors=tuple(names), site=narrow.site)
        return
    sentence = (
        f"step {analysis.step}: {listed(names)}: what reached the optimizer is no sum of what backward added "
        f"(left over: {worst:.1e} of it)"
    )
    yield Finding(NOTE if worst < tolerances.CHANGED else INCONCLUSIVE, "", sentence, tensors=tuple(names))
