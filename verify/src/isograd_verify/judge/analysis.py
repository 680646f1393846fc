"""One step of a recording, read as gradients: who holds which part of each parameter, and what it is made of.

Holders of the same part are replicas; they are told apart by the box that a DTensor or contract declares, else by their
bytes before the step (`unsure`: constant ones, which may be either). Holders of row shards of one tensor (FSDP) form a
cover; its gradient is put together before it is explained, for what each rank contributed was whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.judge.clips import clipped
from isograd_verify.judge.contributions import Fit, fit
from isograd_verify.record import events
from isograd_verify.record.recording import Kind, Recording
from isograd_verify.tell.wording import axis_over, equal, meanings

INSIDE = "the optimizer sums them inside its step, where they are not read"
ELSEWHERE = "they are copied out of the model, and an optimizer steps copies of the parameters: those are not read"


@dataclass(frozen=True)
class Observed:
    """A gradient as some ranks hold it: one rank's own, or the pieces of a cover."""

    name: str
    ranks: tuple[int, ...]  # of a cover: all its members; else the replicas that hold these very bytes
    sketch: Tensor = field(compare=False)

    @property
    def own(self) -> int:
        """The first of the ranks."""
        return self.ranks[0]


class Analysis:
    """One step of a recording: which ranks hold which part of each parameter, what each backward added, the data."""

    def __init__(self, recording: Recording, step: int) -> None:
        self.recording, self.step, self.world = recording, step, recording.world
        self.all_ranks = tuple(range(recording.world))
        self.about: list[dict[str, events.Parameter]] = []  # per rank: name -> what the step event says
        self.sums: list[dict[str, Tensor]] = []
        self.parts: dict[str, dict[events.Key, Tensor]] = defaultdict(dict)
        self._fits: dict[Observed, Fit | None] = {}
        self._steps_told: dict[int, list[dict[str, events.Parameter]]] = {}
        for record in recording.ranks:
            event = next(iter(record.of(events.Step, step)), None)
            self.about.append(dict(event.parameters) if event else {})
            self.sums.append(record.group(step, "sum"))
            for key, part in record.group(step, "part").items():
                micro, _, name = key.partition("/")
                self.parts[name][record.rank, int(micro)] = part
        self._drop_overflows()
        self.owners_step: dict[str, set[int]] = self._leave_to_owners()
        self.put_back = put_back(self)  # names of gradients that the program changed itself, judged as they were before

    @cached_property
    def first(self) -> list[dict[str, events.Parameter]]:
        """What the ranks told at their first step."""
        steps = [record.of(events.Step) for record in self.recording.ranks]
        return [told[0].parameters if told else {} for told in steps]

    def _leave_to_owners(self) -> dict[str, set[int]]:
        """Name -> ranks that do not step their copy (ZeRO 1): what is left of its gradient there is not looked at."""
        found: dict[str, set[int]] = {}
        for name in self.names:
            for ranks in self.replica_sets(name):
                copies = {rank: self.about[rank][name] for rank in ranks}
                owners = [rank for rank, copy in copies.items() if copy.owned and copy.gradient]
                idle = {rank for rank, copy in copies.items() if not copy.owned}
                if self.made_equal(name, ranks):
                    idle |= {rank for rank, copy in copies.items() if not copy.gradient}
                for rank in idle if owners else ():
                    found.setdefault(name, set()).add(rank)
                    self.sums[rank].pop(name, None)
                    self.about[rank][name] = replace(copies[rank], gradient=False, gradient_hash="", squares=None)
        return found

    def made_equal(self, name: str, ranks: tuple[int, ...]) -> bool:
        """Whether copies are equal before the next step; of the last one, if they were made so a step before."""
        later, earlier = self.parameters_at(self.step + 1), self.parameters_at(self.step - 1)
        if all(name in later[rank] for rank in ranks):
            return len({later[rank][name].before for rank in ranks}) == 1
        apart = len({earlier[rank][name].hash for rank in ranks if name in earlier[rank]}) > 1
        brought = apart and len({self.about[rank][name].before for rank in ranks}) == 1
        return brought or len({self.about[rank][name].hash for rank in ranks}) == 1

    def parameters_at(self, step: int) -> list[dict[str, events.Parameter]]:
        """By rank: what was told of the parameters at a step, where they were looked at before it."""
        if step not in self._steps_told:
            told = [next(iter(record.of(events.Step, step)), None) for record in self.recording.ranks]
            self._steps_told[step] = [
                {n: p for n, p in (event.parameters if event else {}).items() if p.before} for event in told
            ]
        return self._steps_told[step]

    def _drop_overflows(self) -> None:
        """A micro-batch with an Inf or NaN anywhere belonged to a step that was skipped."""
        gone = {m for parts in self.parts.values() for (_, m), p in parts.items() if not bool(p.isfinite().all())}
        if gone != {m for parts in self.parts.values() for _, m in parts}:
            for name, parts in self.parts.items():
                self.parts[name] = {k: p for k, p in parts.items() if k[1] not in gone}

    def of(self, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
        """(rank, event) of each event of a kind in this step."""
        return ((record.rank, event) for record in self.recording.ranks for event in record.of(kind, self.step))

    @cached_property
    def learning(self) -> tuple[str, ...]:
        """Parameters with a gradient."""
        return tuple(name for name in self.names if self.info(name).gradient)

    @cached_property
    def names(self) -> list[str]:
        """Every parameter that some rank holds, in the order of the first rank's."""
        return list(dict.fromkeys(name for about in self.about for name in about))

    @cached_property
    def micros(self) -> int:
        """The number of micro-batches that added something."""
        return len({events.micro_of(m) for parts in self.parts.values() for _, m in parts})

    def negligible(self, name: str) -> bool:
        """Whether a gradient is rounding and nothing else: a key bias's is zero but for it. fp16 makes it zero."""
        nonzero = any(bool(sums[name].any()) for sums in self.sums if name in sums)
        return self.null(name) and (nonzero or (self.summed_in_fp16 and self.faint(name, {"float16"})))

    def faint(self, name: str, kinds: set[str] | None = None) -> bool:
        """Whether what backwards added is rounding alone. `kinds`: the dtypes whose rounding is meant."""
        added = max((float(part.norm()) for part in self.parts[name].values()), default=0.0)
        return added <= self._rounding(kinds or self._kinds(name)) * self.largest_added

    def null(self, name: str) -> bool:
        """Whether a gradient is zero, or zero but for rounding."""
        mine = max((float(sums[name].norm()) for sums in self.sums if name in sums), default=0.0)
        return mine <= self._rounding(self._kinds(name)) * self.largest

    def _kinds(self, name: str) -> set[str]:
        return {self.about[r][name].gradient_dtype for r in self.holders(name)}

    def _rounding(self, kinds: set[str]) -> float:
        return max((tolerances.ROUNDING.get(kind, tolerances.ROUNDING_OTHER) for kind in kinds), default=0.0)

    @cached_property
    def summed_in_fp16(self) -> bool:
        """Whether backward reduced something in fp16, which has no numbers as small as a gradient's may be."""
        calls = self.of(events.Collective)
        return any(e.dtype == "float16" and e.phase == "backward" and e.op in events.REDUCING for _, e in calls)

    @cached_property
    def largest_added(self) -> float:
        """The largest norm of the sketch of a contribution."""
        return max((float(part.norm()) for parts in self.parts.values() for part in parts.values()), default=0.0)

    @cached_property
    def largest(self) -> float:
        """The largest norm of a gradient's sketch in this step."""
        return max((float(t.norm()) for sums in self.sums for t in sums.values()), default=0.0)

    def holders(self, name: str) -> list[int]:
        """The ranks that hold a part of a parameter."""
        return [rank for rank, about in enumerate(self.about) if name in about]

    def info(self, name: str) -> events.Parameter:
        """What the first holder's step event says of a parameter."""
        return self.about[self.holders(name)[0]][name]

    @cached_property
    def unsure(self) -> set[str]:
        """Constant at first, different after, and nothing says whether they are replicas."""
        found = set()
        for name in self.names:
            holders = self.holders(name)
            infos = [self.about[r][name] for r in holders]
            began = [self.first[r].get(name, self.about[r][name]) for r in holders]
            one = len(self.replica_sets(name)) == len({tuple(i.shape) for i in infos}) == 1
            constant = all(i.constant for i in began) and not any(i.box is not None for i in infos)
            if one and constant and len({i.hash for i in infos}) > 1:
                siblings = [n for n in self.names if n.rpartition(".")[0] == name.rpartition(".")[0] and n != name]
                if any(len(self.replica_sets(n)) > 1 for n in siblings if not self.info(n).constant):
                    found.add(name)
        return found

    def replica_sets(self, name: str) -> list[tuple[int, ...]]:
        """Ranks that hold the same part of a parameter: as it was before the first step, when copies were equal."""
        sets: dict[str, list[int]] = defaultdict(list)
        for rank in self.holders(name):
            info = self.first[rank].get(name, self.about[rank][name])
            same = repr(info.box) if info.box is not None else info.before
            while any(self.stages.get(frozenset((rank, r))) in {True, not info.constant} for r in sets[same]):
                same += "'"
            sets[same].append(rank)
        return [tuple(ranks) for ranks in sets.values()]

    @cached_property
    def stages(self) -> dict[frozenset[int], bool]:
        """Pairs of ranks that hold two stages, as one sends to the other before its backward: did they begin alike."""
        pairs, summed = list[set[int]](), list[tuple[int, set[int]]]()
        for record in self.recording.ranks:
            sent, called = list[set[int]](), False
            for event in record.of(events.Event, self.step):
                called |= isinstance(event, events.Input)
                if isinstance(event, events.Backward):
                    pairs += [pair for pair in sent if pair not in pairs]
                elif isinstance(event, events.Collective) and event.op in events.REDUCING:
                    summed.append((event.numel, set(event.group)))  # one number: a norm
                elif isinstance(event, events.Collective) and event.op == "send" and event.phase == "other" and called:
                    sent.append({record.rank, event.peer})
        if self.recording.about.get("layout"):  # at ZeRO 3 data ranks of isograd send each other notes
            pairs = [pair for pair in pairs if axis_over(self.recording, (*pair,)) == "pp"]
        begins = [repr({n: t.before for n, t in of.items() if not t.constant}) for of in self.first]
        alike = {frozenset(pair): len({begins[r] for r in pair}) == 1 for pair in pairs}
        tied = {p for p in alike if len({frozenset(self.about[r]) for r in p}) > 1}  # one has layers of its own
        least = {p: 1 if one else math.inf if p in tied else 2 for p, one in alike.items()}
        return {p: one for p, one in alike.items() if not any(p <= g and n >= least[p] for n, g in summed)}

    def replicas_of(self, name: str, rank: int) -> set[int]:
        """The ranks that hold the same part of a parameter as this one."""
        return next((set(ranks) for ranks in self.replica_sets(name) if rank in ranks), {rank})

    @cached_property
    def summed_inside(self) -> dict[str, events.Collective]:
        """Tensors that the optimizer sums inside its step: copies are equal behind it, their gradients were not."""
        kinds, calls = (*events.REDUCING, "all_to_all"), [e for _, e in self.of(events.Collective) if e.numel > 1]
        calls = [e for e in calls if e.phase == "step" and e.op in kinds]
        found: dict[str, events.Collective] = {}
        for name in self.names if calls else ():
            sets = [[self.about[rank][name] for rank in ranks] for ranks in self.replica_sets(name)]
            own = all(len({i.gradient_hash for i in copies}) > 1 for copies in sets)
            kept = all(len({i.hash for i in copies}) == len({i.before for i in copies}) == 1 for copies in sets)
            if own and kept and any(i.hash != i.before for copies in sets for i in copies):
                found[name] = next((event for event in calls if name in event.covers), calls[0])
        return found

    @cached_property
    def stepped_elsewhere(self) -> bool:
        """Whether optimizers step tensors of their own in place of the model's, which change all the same, alike."""
        pairs = [p for p in pairwise(self.recording.steps) if self.step in p][:1]
        learn = [n for n in self.names if self.info(n).trainable and self.info(n).gradient]
        owned = any(self.about[r][n].owned for n in learn for r in self.holders(n))
        if any(event.by_hand for _, event in self.of(events.Step)):
            sets = [[self.about[r][n] for r in ranks] for n in learn for ranks in self.replica_sets(n)]
            moved = any(one.before != one.hash for copies in sets for one in copies)
            return moved and all(len({one.hash for one in copies}) == 1 for copies in sets)
        if not pairs or not learn or owned:
            return False
        now, then = (
            [record.of(events.Step, step)[0].parameters for record in self.recording.ranks] for step in pairs[0]
        )
        changed = any(b[n].before != a[n].hash for a, b in zip(now, then, strict=True) for n in learn if n in b)
        held = [{then[rank][n].before for rank in ranks} for n in learn for ranks in self.replica_sets(n)]
        return changed and all(len(copies) == 1 for copies in held)

    @cached_property
    def unread(self) -> dict[str, str]:
        """Tensors whose gradients are summed where they are not read, with the reason."""
        found = dict.fromkeys(self.summed_inside.keys() - self.added_inside, INSIDE)
        for name in self.names if self.stepped_elsewhere else ():
            sets = [{self.about[rank][name].gradient_hash for rank in ranks} for ranks in self.replica_sets(name)]
            if any(len(hashes) > 1 for hashes in sets):
                found[name] = ELSEWHERE
        return found

    @cached_property
    def added_inside(self) -> set[str]:
        """Those of `summed_inside` whose sum is known: a reduction on the gradient itself, over its copies."""
        told = [
            {(name, event.group) for event in record.of(events.Collective, self.step) if event.phase == "step"
             and event.op in ("all_reduce", "reduce_scatter") for name in event.covers}
            for record in self.recording.ranks
        ]  # fmt: skip
        return {
            name
            for name in self.summed_inside
            if all((name, ranks) in told[rank] for ranks in self.replica_sets(name) for rank in ranks)
        }

    def tolerance(self, name: str) -> float:
        """The relative error that rounding leaves in a parameter's gradient, by the widest dtype of its holders."""
        kinds = {self.about[r][name].gradient_dtype or self.about[r][name].dtype for r in self.holders(name)}
        return max(tolerances.FIT.get(kind, tolerances.FIT_OTHER) for kind in kinds)

    def observed(self, name: str, sums: list[dict[str, Tensor]] | None = None) -> list[Observed]:
        """The gradient of a parameter, once per distinct value; covers put together. `sums`: in place of the step's."""
        sums = self.sums if sums is None else sums
        holders = [r for r in self.holders(name) if name in sums[r]]
        if not holders:
            return []
        if self.covered(name):
            return self._covers(name, holders, sums)
        if name in self.added_inside:
            parts = [(r, [sums[rank][name] for rank in r if name in sums[rank]]) for r in self.replica_sets(name)]
            return [Observed(name, ranks, torch.stack(of).mean(0)) for ranks, of in parts if of]
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        part_of = {rank: repr(ranks) for ranks in self.replica_sets(name) for rank in ranks}
        for rank in holders:
            about = self.about[rank][name]
            found[part_of[rank], about.gradient_hash or f"rank {rank}"].append(rank)
        return [Observed(name, tuple(ranks), sums[ranks[0]][name]) for ranks in found.values()]

    def covered(self, name: str) -> bool:
        """Whether ranks hold shards of a tensor to which each contributed as a whole (FSDP)."""
        infos = [self.about[r][name] for r in self.holders(name)]
        return any(i.declared and math.prod(i.part_shape) > math.prod(i.shape) for i in infos)

    def _covers(self, name: str, holders: list[int], sums: list[dict[str, Tensor]]) -> list[Observed]:
        """Ranks with different boxes, in order, make up one whole; equal boxes begin another."""
        covers: dict[str, list[dict[str, int]]] = defaultdict(list)
        for rank in [r for r in holders if math.prod(self.about[r][name].shape)] or holders[:1]:
            box, of = repr(self.about[rank][name].box), covers[repr(self.about[rank][name].part_box)]
            cover = next((c for c in of if box not in c), None)
            if cover is None:
                of.append({box: rank})
            else:
                cover[box] = rank
        found = []
        for of in covers.values():
            held = [sorted(c.values()) for c in of]
            whole = [Observed(name, tuple(ranks), torch.stack([sums[r][name] for r in ranks]).sum(0)) for ranks in held]
            found += whole[:1] if len(whole) > 1 and torch.equal(whole[0].sketch, whole[-1].sketch) else whole
        return found

    def contributions(self, name: str, rank: int | None = None) -> dict[events.Key, Tensor]:
        """Of every rank whose contribution has the shape and place of `rank`'s, or of the first holder's."""
        own = self.about[self.holders(name)[0] if rank is None else rank][name]
        placed = {r: (self.about[r][name].part_shape, self.about[r][name].part_box) for r in self.holders(name)}
        return {k: p for k, p in self.parts[name].items() if placed.get(k[0]) == (own.part_shape, own.part_box)}

    def fit(self, seen: Observed) -> Fit | None:
        """What an observed gradient is made of; several checks ask, it is found once."""
        if seen not in self._fits:
            self._fits[seen] = self.explain(seen)
        return self._fits[seen]

    def explain(self, seen: Observed) -> Fit | None:
        """`fit`, found anew."""
        parts = self.contributions(seen.name, seen.own)
        if seen.name not in self.same_part:
            mine = self.replicas_of(seen.name, seen.own)
            others = {k: p for k, p in parts.items() if k[0] not in mine}
            replicas = {k: p for k, p in parts.items() if k[0] in mine}
            found = fit(seen.sketch, replicas, self.tolerance(seen.name), seen.own)
            untouched = found is None and float(seen.sketch.norm()) == 0  # a vocabulary shard without its tokens, say
            loose = tolerances.LOOSE * self.tolerance(seen.name)
            known = found is not None and (found.uniform or (found.determined and found.residual <= loose))
            if known or untouched or not others:
                return found  # shards of other parts have no say in it
        return fit(seen.sketch, parts, self.tolerance(seen.name), seen.own)

    @cached_property
    def same_part(self) -> set[str]:
        """Names whose contributions are all to one and the same tensor."""
        return {n for n in self.names if len(self.replica_sets(n)) == 1 or self.covered(n)}

    @cached_property
    def losses(self) -> dict[str, dict[events.Key, list[events.LabelWeight]]]:
        """By the place of its call, the one with the most labels first: every call of a cross-entropy. A schedule of
        torch's pipelining calls the loss once more on its first micro-batch, for shapes."""
        found: dict[str, dict[events.Key, list[events.LabelWeight]]] = defaultdict(lambda: defaultdict(list))
        seen: set[tuple[object, ...]] = set()
        for rank, event in self.of(events.LabelWeight):
            one = (rank, event.micro, event.site, event.labels, event.low, event.high)
            if event.count and not (event.labels and one in seen):
                seen.add(one)
                found[event.site][rank, event.micro].append(event)
        return dict(sorted(found.items(), key=lambda item: -sum(w.count for calls in item[1].values() for w in calls)))

    @cached_property
    def counts(self) -> dict[events.Key, float]:
        """Labels that counted in the main loss, per rank and micro-batch."""
        main = next(iter(self.losses.values()), {})
        return {key: sum(w.count for w in calls) for key, calls in main.items()}

    def same_data(self, group: Iterable[int]) -> bool:
        """Whether some ranks were given the same data, or it is not known what they were given."""
        given = self.data_of(group)
        return not all(given) or any(one == other for one, other in combinations(given, 2))

    def data_of(self, group: Iterable[int]) -> list[dict[int, str]]:
        """Of each of some ranks: by micro-batch, what it was given."""
        return [{m: h for (k, m), h in self.data.items() if k == rank} for rank in group]

    @cached_property
    def data(self) -> dict[events.Key, str]:
        """What each rank was given in each micro-batch, as a hash of its contents."""
        found: dict[events.Key, str] = defaultdict(str)
        for rank, event in self.of(events.ForwardInputs):  # before the backward that numbers it
            hashes = (f"{name} {one.hash}" for name, one in event.tensors.items())
            found[rank, event.forward] += ",".join(hashes)
        return dict(found)


def put_back(analysis: Analysis) -> tuple[str, ...]:
    """Puts gradients as they were before the program changed them itself in the place of what reached the optimizer,
    where every one was the same multiple of a sum before, and is no longer; the names of those. A change that is a
    factor with a meaning is no clip, and stays. A clip by hand is taken back without a word."""
    early = [record.group(analysis.step, "early") for record in analysis.recording.ranks]
    scaled = any(e.factor for _, e in analysis.of(events.Rewritten))
    if not any(early) or (scaled and not clipped(analysis.recording, analysis.step)):
        return ()
    sums = [{**late, **before} for late, before in zip(analysis.sums, early, strict=True)]
    before, after = _coefficients(analysis, sums), _coefficients(analysis, analysis.sums)
    known = [c for c in before.values() if c is not None]
    even = bool(known) and len(known) == len(before) and equal(known)
    groups = [(name, ranks) for name in analysis.names for ranks in analysis.replica_sets(name)]
    held = [[[of[r].get(name) for r in ranks] for of in (sums, analysis.sums)] for name, ranks in groups]
    parted = any(_equal(earlier) and not _equal(later) for earlier, later in held)  # copies, by the change
    if not even or (not scaled and _factors(analysis, known[0], after)) or parted:
        return ()
    analysis.sums = sums
    for record in analysis.recording.ranks:
        tensors = record.tensors(analysis.step)
        for name, whole in record.group(analysis.step, "whole").items():
            tensors[f"final/{name}"] = whole
    return () if scaled else tuple(dict.fromkeys(name for one in early for name in one))


def _coefficients(analysis: Analysis, sums: list[dict[str, Tensor]]) -> dict[str, float | None]:
    """By name: with which one coefficient all contributions are in a gradient; None where there is no such one."""
    found: dict[str, float | None] = {}
    for name in analysis.names:
        if not analysis.contributions(name) or analysis.faint(name):
            continue
        fits = [analysis.explain(seen) for seen in analysis.observed(name, sums)]
        values = [f.each[0] if f is not None and f.uniform and f.each else None for f in fits]
        same = values and None not in values and equal(v for v in values if v is not None)
        found[name] = values[0] if same else None
    return found


def _equal(copies: list[Tensor | None]) -> bool:
    return all(one is not None and copies[0] is not None and torch.equal(one, copies[0]) for one in copies)


def _factors(analysis: Analysis, before: float, after: dict[str, float | None]) -> bool:
    """Whether the change was one factor for each tensor: one for all, or else with a meaning."""
    if None in after.values():
        return False
    factors = [c / before for c in after.values() if c is not None]
    usual = max(factors, key=lambda f: sum(abs(f - g) <= tolerances.FACTOR * abs(f) for g in factors))
    odd = {f for f in factors if abs(f - usual) > tolerances.FACTOR * abs(usual)}
    return all(usual and (f == 0 or meanings(analysis.recording, analysis.micros, f / usual)) for f in odd)
