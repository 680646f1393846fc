"""Checks of copies: ranks that exchange nothing but gradients are copies of one model, step as one, and are given data
of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from isograd_verify import tolerances
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.traffic import reductions
from isograd_verify.record.axes import DATA, Axes
from isograd_verify.record.events import Average, Carried, Collective, Draw, ForwardInputs
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding, listed
from isograd_verify.tell.wording import axis_over, spell


def rates(analysis: Analysis) -> Iterator[Finding]:
    """All ranks step a parameter with one learning rate."""
    apart: dict[str, dict[int, float]] = {}
    for name in analysis.names:
        known = {rank: rate for rank in analysis.holders(name) if (rate := analysis.about[rank][name].rate) is not None}
        if len(set(known.values())) > 1:
            apart[name] = known
    if apart:
        names = tuple(apart)
        known = apart[names[0]]
        by_rate = {rate: [rank for rank in known if known[rank] == rate] for rate in known.values()}
        told = ", ".join(f"{rate:.6g} on {spell(ranks)}" for rate, ranks in by_rate.items())
        whom = f"all {len(names)} parameters" if len(names) == len(analysis.names) else listed(names)
        sentence = f"step {analysis.step}: the learning rate of {whom} differs between ranks: {told}"
        axis = axis_over(analysis.recording, tuple(sorted(ranks[0] for ranks in by_rate.values())))
        bars = tuple((f"rank {rank}", rate) for rank, rate in known.items())
        yield Finding(BUG, "rates-differ", sentence, tensors=names, axis=axis, coefficients=bars)


def averages(analysis: Analysis) -> Iterator[Finding]:
    """Averages of copies are copies."""
    told = [record.of(Average, analysis.step) for record in analysis.recording.ranks]
    apart: dict[str, tuple[int, ...]] = {}
    for events in zip(*told, strict=False):  # the first update of each rank, the second, ...
        for name in analysis.names:
            for ranks in analysis.replica_sets(name):
                held = {events[rank].hashes[name] for rank in ranks if name in events[rank].hashes}
                before = {analysis.about[rank][name].before for rank in ranks}
                if len(held) > 1 and len(before) == 1:
                    apart[name] = ranks
    if apart:
        ranks = max(apart.values(), key=len)
        axis = axis_over(analysis.recording, ranks)
        sentence = (
            f"step {analysis.step}: the averages of {listed(tuple(apart))} differ between {axis}, where the parameters "
            "were copies before the step"
        )
        yield Finding(BUG, "averages-differ", sentence, tensors=tuple(apart), axis=axis)


def copies(analysis: Analysis) -> Iterator[Finding]:
    """Ranks that exchange nothing but gradients begin with one model: no tensor differs beside summed ones."""
    if analysis.step != analysis.recording.steps[0]:
        return
    apart: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in analysis.names:
        ranks = tuple(analysis.holders(name))
        infos = [analysis.about[rank][name] for rank in ranks]
        differ = len(analysis.replica_sets(name)) == len(ranks) > 1 and len({info.shape for info in infos}) == 1
        trainable = infos[0].trainable
        alike = all(info.trainable is trainable and info.box is None for info in infos)
        held = [analysis.sums[rank][name] for rank in ranks if name in analysis.sums[rank]]
        summed = len(held) < 2 or any(bool((one == held[0]).all()) for one in held[1:])
        if differ and alike and not (trainable and summed):
            apart.setdefault((ranks, trainable), []).append(name)
    for (ranks, trainable), names in apart.items():
        summed = any(set(ranks) <= set(event.group) for event in reductions(analysis))
        if not summed or not _data_ranks(analysis, ranks) or exchange(analysis, ranks):
            continue
        if not any(_shared(analysis, name, ranks) for name in analysis.names):
            continue
        axis = axis_over(analysis.recording, ranks)
        sentence = (
            f"step {analysis.step}: {listed(names)} began with other values on each of {spell(ranks)}, and "
            f"{'each gradient is its own' if trainable else 'no gradient reaches them'}, while other tensors are "
            "copies whose gradients are summed over them"
        )
        yield Finding(BUG, "copies-begin-apart", sentence, tensors=tuple(names), axis=axis)


def carried(analysis: Analysis) -> Iterator[Finding]:
    """What a program carries from step to step is one on all data ranks where a loss is made from it."""
    ranks, records = analysis.all_ranks, analysis.recording.ranks
    held = [record.group(analysis.step, "carried") for record in records]
    began, own = (
        [{e.name: vars(e)[k] for e in r.of(Carried, analysis.step)} for r in records] for k in ("began", "own")
    )
    whole = all(analysis.covered(name) or len(analysis.replica_sets(name)) == 1 for name in analysis.names)
    summed = any(set(ranks) <= set(event.group) for event in reductions(analysis))
    if not any(held) or not whole or not summed or not _data_ranks(analysis, ranks) or exchange(analysis, ranks):
        return
    alike = [name for name in held[0] if all(began[0][name] == of.get(name) for of in began)]
    apart = [
        name for name in alike
        if any(float((of[name] - held[0][name]).norm()) > tolerances.START * float(held[0][name].norm()) for of in held)
    ]  # fmt: skip
    taken = [] if apart else [name for name in alike if len({of[name] for of in own}) > 1]
    if apart or taken:
        how = "until all get that of one rank" if taken else "or each is to have its own"
        told = apart or taken
        first = "began equal" if any(began[0][name] for name in told) else "is made in the first step"
        site = next((e.site for e in records[0].of(Carried, analysis.step) if e.name in told), "")
        sentence = (
            f"step {analysis.step}: {listed(told)} {first}, changes from step to step and differs "
            f"between {spell(ranks)}, and the loss is made from it: each rank's is made from its own rows, one "
            f"device's from all rows; {how}"
        )
        axis = axis_over(analysis.recording, ranks)
        yield Finding(INCONCLUSIVE, "statistic-unreduced", sentence, tensors=analysis.learning, axis=axis, site=site)


def _data_ranks(analysis: Analysis, ranks: tuple[int, ...]) -> bool:
    text = str(analysis.recording.about.get("layout", ""))
    return not text or set(ranks) <= Axes.parse(text, analysis.recording.world).ranks(DATA, ranks[0])


def exchange(analysis: Analysis, ranks: tuple[int, ...]) -> bool:
    """Whether these ranks exchange activations: not by a broadcast (of buffers), nor a gather of shards."""
    events = [e for rank in ranks for e in analysis.recording.ranks[rank].of(Collective, analysis.step)]
    quiet = ("broadcast", "all_gather") if any(map(analysis.covered, analysis.names)) else ("broadcast",)
    return any(
        len(set(e.group) & set(ranks)) > 1
        and (e.op in ("send", "recv", "all_to_all") or (e.phase == "forward" and e.op not in quiet))
        for e in events
    )


def _shared(analysis: Analysis, name: str, ranks: tuple[int, ...]) -> bool:
    """Whether a tensor is one on these ranks, and its gradient is a sum of what all of them added."""
    if analysis.null(name) or not set(ranks) <= analysis.replicas_of(name, ranks[0]):
        return False
    fits = [analysis.fit(seen) for seen in analysis.observed(name)]
    return all(fit is not None and set(ranks) <= {rank for rank, _ in fit.coefficients} for fit in fits) and bool(fits)


def own_data(analysis: Analysis) -> Iterator[Finding]:
    """No two data ranks compute the same: with equal inputs in every step they add nothing to each other."""
    if analysis.step != analysis.recording.steps[0]:
        return
    steps = analysis.recording.steps
    seen: list[list[str]] = []  # what each rank was given, call by call, in all steps that were seen whole
    alike: dict[str, list[int]] = defaultdict(list)
    for record in analysis.recording.ranks:
        told = [event.tensors for event in record.of(ForwardInputs) if event.step in steps]
        seen.append([", ".join(f"{name} {one.hash} {one.shape}" for name, one in of.items()) for of in told])
        if seen[-1] and all(seen[-1]):  # else some of it is not known
            alike[repr(seen[-1])].append(record.rank)
    for members in alike.values():
        doubles = [members[0], *(r for r in members[1:] if _double(analysis, members[0], r))]
        if len(doubles) < 2:
            continue
        batches = seen[doubles[0]]
        several = len(set(batches)) > 1
        verdict, how = BUG, "and their gradients are summed: they train as one rank would"
        if not several:
            verdict, how = INCONCLUSIVE, "always the same batch: it is there to try something out, or by mistake"
        sentence = f"{spell(doubles)} were given the same data in all {len(batches)} watched micro-batches, {how}"
        yield Finding(verdict, "same-data", sentence, axis=axis_over(analysis.recording, tuple(doubles)))
        return


def _double(analysis: Analysis, one: int, other: int) -> bool:
    """Whether two ranks with equal data are data ranks: they hold the same part of everything, their gradients are
    summed with each other, and each computes the whole of its batch: equal gradients, but for random masks."""
    names = [n for n in analysis.names if one in analysis.holders(n) or other in analysis.holders(n)]
    if not all(other in analysis.replicas_of(n, one) or analysis.covered(n) for n in names):
        return False
    if not any({one, other} <= set(event.group) for event in reductions(analysis)):
        return False
    mine, others = (
        {(n, m): part for n, parts in analysis.parts.items() for (r, m), part in parts.items() if r == rank}
        for rank in (one, other)
    )
    if mine.keys() != others.keys() or not any(part.any() for part in mine.values()):
        return False  # neither adds anything: members of a cp group whose rows have no labels
    if all(float((mine[k] - others[k]).norm()) <= tolerances.SAME * float(mine[k].norm()) for k in mine):
        return True
    return bool(analysis.recording.ranks[one].of(Draw)) and not exchange(analysis, (one, other))
