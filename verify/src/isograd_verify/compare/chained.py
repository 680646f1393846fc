"""One device's step of a pipeline, put together from its stages, each computed once more by itself (watch/stages.py).

A stage gets what another one has made, by contents, and what comes back to that one is what the stage sends back: then
the stages of all ranks are one model, and the sum of their gradients over all calls is that of one device, but for the
weight of a label, which the calls of the last stage tell.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.compare.shares import SAME_DATA, NoReference, in_every_call
from isograd_verify.record.events import Collective, Event, Input, LabelWeight, MeanWeight, Parameter, Staged, Step
from isograd_verify.record.recording import VERSION, RankRecord, RankWriter, Recording, write_json
from isograd_verify.record.sketch import sketch

BETWEEN = ("send", "recv", "barrier")
Call = tuple[int, int]  # rank, and which call of a stage there


class _Chain:
    """The calls of one step, and which of them got what another has made."""

    def __init__(self, candidate: Recording, step: int) -> None:
        self.candidate, self.step = candidate, step
        told = [(record, event) for record in candidate.ranks for event in record.of(Staged, step)]
        self.calls: dict[Call, Staged] = {(record.rank, event.call): event for record, event in told if not event.why}
        if stopped := next((event.why for _, event in told if event.why), ""):
            raise NoReference(stopped, SAME_DATA)
        self.makers: dict[str, list[Call]] = defaultdict(list)
        self.takers: dict[str, list[tuple[Call, int]]] = defaultdict(list)
        for call, event in self.calls.items():
            for digest in event.made:
                self.makers[digest].append(call)
            for i, digest in enumerate(event.given):
                self.takers[digest].append((call, i))
        self.depths: dict[Call, int] = {}
        for call in self.calls:
            self._check(call)
        if not any(map(self.depth, self.calls)):
            raise NoReference("no stage is given what another one has made", SAME_DATA)

    @property
    def last(self) -> list[Call]:
        """The calls whose outputs no stage is given."""
        return [call for call, event in self.calls.items() if not any(made in self.takers for made in event.made)]

    def depth(self, call: Call) -> int:
        """How many stages stand before a call's."""
        if call not in self.depths:
            before = [maker for given in self.calls[call].given for maker in self.makers.get(given, ())]
            self.depths[call] = 1 + max(map(self.depth, before), default=-1)
        return self.depths[call]

    def _tensors(self, call: Call, kind: str) -> dict[int, Tensor]:
        record = self.candidate.ranks[call[0]]
        return {int(i): t for i, t in record.group(self.step, f"stage/{call[1]}/{kind}").items()}

    def _check(self, call: Call) -> None:
        """A call makes once more what it made, was given what another made, and got back what the next one sends."""
        event, (rank, number) = self.calls[call], call
        own = self.candidate.ranks[rank]
        where = f"the stage that is called at {event.site} on rank {rank}, call {number + 1} of its step,"
        kinds = {about.dtype for about in own.of(Step, self.step)[0].parameters.values()}
        limit = max((tolerances.LIMITS.get(kind, (0.0, 0.0))[1] for kind in kinds), default=0.0)
        error = own.tensors(self.step).get(f"stage/{number}/error")
        if error is None or float(error.max()) > limit:
            raise NoReference(f"{where} makes something else when it is computed once more", SAME_DATA)
        sent = self._tensors(call, "in")
        if alien := [i for i in sent if event.given[i] not in self.makers]:
            raise NoReference(f"{where} is given as argument {alien[0]} what no stage has made", SAME_DATA)
        for i, came in self._tensors(call, "out").items():
            takers = self.takers.get(event.made[i], [])
            if not takers:
                continue
            parts = [back[j] for taker, j in takers if j in (back := self._tensors(taker, "in"))]
            whole = torch.stack(parts).sum(0) / len(self.makers[event.made[i]]) if parts else torch.zeros_like(came)
            if float((whole - came).norm()) > limit * max(float(whole.norm()), float(came.norm())):
                raise NoReference(
                    f"{where} got back another gradient than the next stage's backward makes on one device", SAME_DATA
                )


def piped(candidate: Recording) -> bool:
    """Whether a part of a model is given on one rank what another rank's part has made."""
    made = [{digest for event in record.of(Staged) for digest in event.made} for record in candidate.ranks]
    given = [{digest for event in record.of(Staged) for digest in event.given} for record in candidate.ranks]
    return any((given[one] - made[one]) & made[other] for one in range(len(given)) for other in range(len(made)))


def chained(candidate: Recording) -> tuple[Recording, Recording]:
    """(one device's steps, the candidate's with names of which each is one parameter's)."""
    place = candidate.path / "one"
    chains = {step: _Chain(candidate, step) for step in candidate.steps}
    renamed = _by_stage(candidate, chains)
    writer = RankWriter(place, 0, 1)
    scale: dict[str, float] = {}
    for step, chain in chains.items():
        _write(renamed, chain, in_every_call(*_loss(chain), step, scale), writer)
    writer.close()
    about = {"version": VERSION, "layout": "1", "again": {}, "scale": scale}
    write_json(place / "recording.json", about)
    return Recording(place), renamed


def _by_stage(candidate: Recording, chains: dict[int, _Chain]) -> Recording:
    """A name that parameters of several stages have is told with the number of the stage."""
    stages: dict[tuple[int, str], int] = {}
    for chain in chains.values():
        for call, event in chain.calls.items():
            stages |= {(call[0], name): chain.depth(call) for name in event.names}
    several = defaultdict(set)
    for (_, name), stage in stages.items():
        several[name].add(stage)
    ranks = []
    for record in candidate.ranks:
        own = {n: f"stage{stage}.{n}" for (r, n), stage in stages.items() if r == record.rank and len(several[n]) > 1}
        steps = {step: {_renamed(path, own): t for path, t in record.tensors(step).items()} for step in record.steps}
        ranks.append(replace(record, events=[_event(event, own) for event in record.events], _steps=steps))
    found = Recording(candidate.path)
    found.ranks = ranks
    return found


def _renamed(path: str, names: dict[str, str]) -> str:
    head, _, name = path.rpartition("/")
    return f"{head}/{names[name]}" if head and name in names else path


def _event(event: Any, names: dict[str, str]) -> Any:
    """An event that speaks of parameters, with other names."""
    changed: dict[str, Any] = {}
    for key in ("parameters", "hashes"):
        if hasattr(event, key):
            changed[key] = {names.get(name, name): value for name, value in getattr(event, key).items()}
    for key in ("covers", "names"):
        if hasattr(event, key):
            changed[key] = tuple(names.get(name, name) for name in getattr(event, key))
    return replace(event, **changed) if changed else event


def _loss(chain: _Chain) -> tuple[RankRecord, list[RankRecord]]:
    """Weights of a loss's labels or means, as records: of all micro-batches of the first rank that has a loss, and of
    each micro-batch of every rank. They are told before what comes back to the last stage is."""
    found: dict[Call, RankRecord] = {}
    for record in chain.candidate.ranks:
        held: list[Event] = []
        called, joined = False, ""
        for event in record.of(Event, chain.step):
            called |= isinstance(event, Input)
            if isinstance(event, LabelWeight | MeanWeight):
                held.append(replace(event, micro=len(found)))
            elif isinstance(event, Collective) and event.op not in BETWEEN and called and event.phase != "backward":
                joined = event.site
            elif isinstance(event, Staged):
                call = record.rank, event.call
                if joined:
                    raise NoReference(f"what {joined} exchanges may be a part of the loss", SAME_DATA)
                if held and call not in chain.last:
                    raise NoReference(f"the stage at {event.site} adds a term of its own to the loss", SAME_DATA)
                if call in chain.last:
                    found[call] = replace(record, events=held)
                held = []
    first = next(iter(found), (0, 0))[0]
    own = [event for call, record in found.items() if call[0] == first for event in record.events]
    return replace(chain.candidate.ranks[first], events=own), list(found.values())


def _write(candidate: Recording, chain: _Chain, factor: float, writer: RankWriter) -> None:
    tensors: dict[str, Tensor] = {}
    totals: dict[str, Tensor] = {}
    about: dict[str, Parameter] = {}
    for record in candidate.ranks:
        for name, told in record.of(Step, chain.step)[0].parameters.items():
            if (one := record.tensors(chain.step).get(f"one/{name}")) is not None:
                totals[name] = totals[name] + factor * one if name in totals else factor * one
                about.setdefault(name, replace(told, gradient_hash="", gradient=True, finite=True, box=None))
        for path, value in record.tensors(chain.step).items():
            if path.startswith(("parameter/", "along/parameter/")):
                tensors.setdefault(path, value)
    tied = defaultdict(set)  # of several stages: one tensor at first, and one gradient
    for record in candidate.ranks:
        for name, told in record.of(Step, chain.step)[0].parameters.items():
            if name in totals and not told.constant:
                tied[told.before, told.gradient_hash].add(name)
    for names in tied.values():
        totals |= dict.fromkeys(names, torch.stack([totals[name] for name in sorted(names)]).sum(0))
    for name, total in totals.items():
        tensors |= {f"final/{name}": total.clone(), f"sum/{name}": sketch(total)}
    writer.event(Step(chain.step, 0, parameters=about, backwards=1))
    writer.tensors(chain.step, tensors)
