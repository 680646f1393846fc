"""One device's step of a pipeline, put together from its stages, each computed once more by itself (watch/stages.py).

A stage gets what another one has made, by contents, and what comes back to that one is what the stage sends back: then
the sum of the stages' gradients over all calls is that of one device, but for the weight of a label.
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
from isograd_verify.record.recording import RankRecord, RankWriter, Recording, describe
from isograd_verify.record.sketch import sketch

SEND_BACK = "send back the gradient of every output of a stage that was sent, or detach it inside the stage"
BETWEEN = ("send", "recv", "barrier")
Call = tuple[int, int]  # rank, and which call of a stage there


class _Chain:
    """The calls of one step, and which of them got what another has made."""

    def __init__(self, candidate: Recording, step: int) -> None:
        self.candidate, self.step = candidate, step
        told = [(record.rank, event) for record in candidate.ranks for event in record.of(Staged, step)]
        if stopped := next((event.why for _, event in told if event.why), ""):
            raise NoReference(stopped, SAME_DATA)
        self.calls: dict[Call, Staged] = {(rank, event.call): event for rank, event in told}
        self.makers: dict[str, list[Call]] = defaultdict(list)
        self.takers: dict[str, list[tuple[Call, int]]] = defaultdict(list)
        for call, event in self.calls.items():
            for digest in event.made:
                self.makers[digest].append(call)
            for i, digest in enumerate(event.given):
                self.takers[digest].append((call, i))
        self.last = [call for call, event in self.calls.items() if not any(made in self.takers for made in event.made)]
        for call in self.calls:
            self._check(call)

    def depth(self, call: Call) -> int:
        """How many stages stand before a call's."""
        makers = [maker for given in self.calls[call].given for maker in self.makers.get(given, [])[:1]]
        return 1 + max(map(self.depth, makers), default=-1)

    def _tensors(self, call: Call, kind: str) -> dict[int, Tensor]:
        found = self.candidate.ranks[call[0]].group(self.step, f"stage/{call[1]}/{kind}")
        return {int(number): tensor for number, tensor in found.items()}

    def _check(self, call: Call) -> None:
        """A call was given what another made, and got back what those send that were given what it made."""
        event, kinds = self.calls[call], self.candidate.ranks[call[0]].of(Step, self.step)[0].parameters.values()
        where = f"the stage that is called at {event.site} on rank {call[0]}, call {call[1] + 1} of its step,"
        limit = max((tolerances.LIMITS.get(about.dtype, (0.0, 0.0))[1] for about in kinds), default=0.0)
        if any(event.given[i] not in self.makers for i in self._tensors(call, "in")):
            raise NoReference(f"{where} is given what no stage has made", SAME_DATA)
        back = self._tensors(call, "out")
        for i, made in enumerate(event.made):
            takers, came = self.takers.get(made, []), back.get(i, torch.zeros(1))
            if not takers or self._is_sent(came, made, limit):
                still = [self.calls[taker] for taker, j in takers if j in self.calls[taker].still]
                if still and i not in back:
                    why = (
                        f"step {self.step}: {where} gets no gradient back for its output {i + 1}, which the stage at "
                        f"{still[0].site} is given: one device's graph goes on there, unless it is cut on purpose"
                    )
                    raise NoReference(why, SEND_BACK, "cut-graph")
                continue
            others = [made for (rank, _), e in self.calls.items() if rank == call[0] for made in e.made]
            if i in back and any(self._is_sent(came, made, limit) for made in others):
                why = f"step {self.step}: {where} got back the gradient of what another of its calls has made"
                raise NoReference(why, SAME_DATA, "micro-batches-swapped")
            raise NoReference(
                f"{where} got back another gradient than the next stage's backward makes on one device", SAME_DATA
            )

    def _is_sent(self, came: Tensor, made: str, limit: float) -> bool:
        """Whether this is what stages send back that were given what a call has made."""
        takers = self.takers.get(made, [])
        sent = sum((self._tensors(taker, "in").get(j, torch.zeros(1)) for taker, j in takers), torch.zeros(1))
        return float((sent / len(self.makers[made]) - came).norm()) <= limit * float(came.norm())


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
    describe(place, layout="1", again={}, scale=scale)
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
        split = {
            step: [(*path.rpartition("/"), t) for path, t in record.tensors(step).items()] for step in record.steps
        }
        steps = {step: {head + bar + own.get(n, n): t for head, bar, n, t in of} for step, of in split.items()}
        ranks.append(replace(record, events=[_event(event, own) for event in record.events], _steps=steps))
    found = Recording(candidate.path)
    found.ranks = ranks
    return found


def _event(event: Any, names: dict[str, str]) -> Any:
    held = {key: value for key in ("parameters", "hashes", "covers", "names") if (value := vars(event).get(key))}
    renamed = {
        key: {names.get(n, n): v for n, v in of.items()} if isinstance(of, dict) else tuple(names.get(n, n) for n in of)
        for key, of in held.items()
    }
    return replace(event, **renamed) if renamed else event


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
    tied = defaultdict(set)  # of several stages: one tensor at first, and one gradient
    for record in candidate.ranks:
        own = record.tensors(chain.step)
        kept = {path: value for path, value in own.items() if path.startswith(("parameter/", "along/parameter/"))}
        tensors = kept | tensors
        for name, told in record.of(Step, chain.step)[0].parameters.items():
            if (one := own.get(f"one/{name}")) is not None:
                totals[name] = totals.get(name, 0) + factor * one
                about.setdefault(name, replace(told, gradient_hash="", gradient=True, finite=True))
                tied[name if told.constant else told.before + told.gradient_hash].add(name)
    for names in tied.values():
        totals |= dict.fromkeys(names, torch.stack([totals[name] for name in sorted(names)]).sum(0))
    for name, total in totals.items():
        tensors |= {f"final/{name}": total.clone(), f"sum/{name}": sketch(total)}
    writer.event(Step(chain.step, 0, parameters=about, backwards=1))
    writer.tensors(chain.step, tensors)
