"""isograd-verify run --beside-one: the same program once more as a world of one, on the data of all ranks
(docs/verify.md, watch it beside one device). All of it is kept beside the recording: `alone-0` and so on, the runs in a
world of one (watch/feed.py), and `one`, the reference that compare/combined.py puts together.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from safetensors.torch import save_file

from isograd_verify.compare import combined
from isograd_verify.compare.chained import chained, piped
from isograd_verify.compare.compare import compare
from isograd_verify.compare.loss_terms import own_rows
from isograd_verify.compare.shares import SAME_DATA, Again, Mixed, NoReference, steady
from isograd_verify.compare.states import carried, local, moved, moving, step_of
from isograd_verify.errors import VerifyError
from isograd_verify.judge.clips import bound
from isograd_verify.judge.consequences import row
from isograd_verify.record.events import Backward, Collective, Lost, Step
from isograd_verify.record.recording import WEIGHTS, RankWriter, Recording, describe, write_json
from isograd_verify.run.attach import STDERR, begin, facts, plain_facts
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS, Finding, Subject, listed
from isograd_verify.watch.calls import CACHE, GRAPH

MOST_STARTS = 16
SHORTEST = 15.0  # seconds of silence in a world of one that are a hang, where the first run was quick
RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|nnodes|num[-_]machines)(=.*)?")
MPI = re.compile(r"(?:--?np?|-N|--ntasks|--ntasks-per-node|--nodes)(=.*)?")
TOGETHER = (
    "one device was given the rows of all ranks in one batch, because each rank's loss depends on other ranks' rows"
)
OWN_TERM = (
    "step 1: given the rows of all ranks in one batch, one device has another term of the loss at {}: it is no mean "
    "over rows (a balance loss, a statistic of a batch), each rank takes it over its own rows, and it is judged so"
)
CHAINED = (
    "one device computed each stage of the pipeline by itself, from what the stage was given: what stages send one "
    "another is what one device makes"
)
MORE_STEPS = "let the program take more steps, or record a run on one device with the same data and compare the two"


def single_rank(command: list[str]) -> list[str]:
    """The command with one rank, as far as it says how many it starts. Other ranks leave by themselves (watched.py)."""
    words = list(command)
    program = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    by_mpi = any(Path(word).name in ("mpirun", "mpiexec", "srun") for word in words[:program])
    for i, word in enumerate(words[:program]):
        option = RANKS.fullmatch(word) or (MPI.fullmatch(word) if by_mpi else None)
        if option and option[1]:
            words[i] = f"{word.partition('=')[0]}=1"
        elif option and i + 1 < program:
            words[i + 1] = "1"
    return words


def judged(directory: Path, command: list[str], subject: Subject, stall: float, replay: bool = False) -> Subject:
    """What a run shows beside one device. `subject`: by itself. `replay`: one device takes its experts."""
    try:
        candidate = Recording(directory)
        one = WorldOfOne(candidate, single_rank(command), stall, replay)
        candidate, reference, again = _pair(one)
        chain = candidate is not one.candidate
        together = bool(reference.about.get("together"))  # then labels may be numbers of rows, and data are known
        beside = compare(reference, candidate, ignore_data=together or chain)
        beside.findings += [Finding(NOTE, "", TOGETHER)] if together else []
        beside.findings += [Finding(NOTE, "", CHAINED)] if chain else []
        if beside.verdict != BUG:
            beside.findings += _carried(one, again, beside.errors)
        if beside.verdict == PASS and "1" in reference.about.get("again", {}):
            micros = [fed.micro for fed in again if fed.of == 1 and fed.rank == 0]
            beside.findings += _at_once(one, reference, micros, beside.errors)
        beside.findings = own_rows(candidate, reference, beside.findings)
        last, why = max(reference.steps), reference.about.get("why")
        if why and last < max(candidate.steps):
            beside.findings.append(Finding(NOTE, "", f"not compared with one device behind step {last}: {why}"))
            named = {f.bug for f in beside.findings if f.verdict == BUG and f.bug}
            later = [f for f in subject.findings if f.verdict != NOTE and step_of(f) > last and f.bug not in named]
            beside.findings += [carried(candidate, again, f) for f in later]
        if beside.verdict == PASS:  # each rank's rows were given with what the rank had carried
            own = [f for f in subject.findings if f.verdict == INCONCLUSIVE and f.bug == "statistic-unreduced"]
            beside.findings += [f for f in own if step_of(f) <= last]
        for site, times in reference.about.get("scale", {}).items():
            beside.findings = [_open(found, site, times) for found in beside.findings]
    except NoReference as error:
        found = Finding(BUG, error.bug, error.why) if error.bug else None
        if row(error.bug).on_purpose:
            found = Finding(INCONCLUSIVE, error.bug, error.why, look=error.fix)
        return _not_compared(subject, error.why, error.fix, found)
    except VerifyError as error:
        fix = "make inputs and labels before the model is called, as local variables of the functions around the call"
        return _not_compared(subject, error.what, fix if error.code == "IG722" else str(error.fix or ""))
    beside.name, beside.facts = subject.name, facts(candidate) | beside.facts
    beside.findings += plain_facts(candidate)
    return beside


def _open(found: Finding, site: str, times: float) -> Finding:
    """A factor of all gradients is no verdict where a mean has one on one device, too."""
    if found.verdict != BUG or not re.search(r"all \d+ gradients: \S+ times what they should be", found.sentence):
        return found
    why = f"the mean at {site} counts {times:.4g} times there: by a coefficient, or by a number meant for all ranks"
    return replace(found, verdict=INCONCLUSIVE, sentence=f"{found.sentence}, as one device computes it; {why}")


def _not_compared(subject: Subject, why: str, fix: str, found: Finding | None = None) -> Subject:
    said = Finding(INCONCLUSIVE, "", f"not compared with one device: {why}", look=fix)
    subject.findings = [found or said, *subject.findings]
    return subject


Fed = tuple[list[int], int, int]  # ranks, whose rows go together; micro-batch; step


@dataclass(frozen=True)
class WorldOfOne:
    """Starts the program as a world of one and gives it calls of the first run."""

    candidate: Recording
    command: list[str]
    stall: float
    replay: bool

    @cached_property
    def turns(self) -> int:
        """How many steps make one round."""
        return combined.turns(self.candidate)

    def again(self, name: str, queue: list[Fed], natural: bool, means: str = "") -> tuple[Recording, list[Again]]:
        """(the recording, the backwards that were done again). `natural`: its first round is the program's own.
        `means`: a file of what modules carry, in place of what they carried."""
        home, own = self.candidate.path, self.turns if natural else 0
        steps = {event.step: event.parameters for event in self.candidate.ranks[0].of(Step)[::-1]}
        about = {
            "backwards": queue,
            "natural": own,
            "moving": moving(self.candidate),
            "means": means,
            "learn": {of: {n: p.trainable for n, p in steps[of].items()} for of in {step for *_, step in queue}},
            "turns": self.turns,
        }
        write_json(home / "feed.json", about)
        one = self._start(home / name)
        taken = [e.step for e in one.ranks[0].of(Step) if not e.note]
        if len(taken) < own:
            raise NoReference("in a world of one no optimizer steps", MORE_STEPS)
        done = zip(queue, taken[own:], strict=False)
        return one, [Again(ranks[0], micro, one.ranks[0], step, of) for (ranks, micro, of), step in done]

    def _start(self, place: Path) -> Recording:
        place.mkdir()
        home = self.candidate.path
        more = {"ISOGRAD_VERIFY_FEED": str((home / "feed.json").resolve()), "ISOGRAD_VERIFY_PARAMETERS": "1"}
        more |= {"ISOGRAD_VERIFY_REPLAY": str(home.resolve())} if self.replay else {}
        first = self.candidate.ranks[0].about
        patience = max(SHORTEST, 4 * float(first.get("watched_seconds") or first.get("seconds") or self.stall))
        hang, code = begin(self.command, place, min(self.stall, patience), more, {"replay": self.replay})
        if hang is not None and hang.verdict == INCONCLUSIVE:
            raise VerifyError("IG729", hang.sentence, fix="start it again, with more time")
        if hang is not None:
            raise NoReference(
                f"the program hung in a world of one: {hang.sentence}", "start it with one rank by itself"
            )
        try:
            found = Recording(place)
            found.about["bound"] = bound(self.candidate)
        except VerifyError as error:
            why = f"the program does not train in a world of one (exit code {code}): {error.what}"
            sys.stderr.write((place / STDERR).read_text(errors="replace"))
            raise NoReference(why, "see its own output; start it with one rank by itself") from error
        died = found.ranks[0].about.get("died")
        if died and not any(not e.note for e in found.ranks[0].of(Step)):
            given = "" if place.name == "alone-0" else " that is given the data of other calls"
            raise NoReference(f"the program does not train in a world of one{given}: {died}", SAME_DATA)
        failed = found.ranks[0].about.get("failed")
        if failed and not any(not e.note for e in found.ranks[0].of(Step)[1:]):
            why = re.sub(r"^RuntimeError: | \(feed\.py:\d+\)$", "", str(failed))
            raise NoReference(why, "see docs/verify.md, beside one device")
        return found


def _pair(alone: WorldOfOne) -> tuple[Recording, Recording, list[Again]]:
    """(what is compared, one device's steps, the backwards that were done again for them)."""
    candidate = alone.candidate
    if not piped(candidate):
        return candidate, *_reference(alone)
    try:
        reference, renamed = chained(candidate)
        return renamed, reference, []
    except NoReference as error:
        if error.bug:
            raise
        try:
            return candidate, *_reference(alone)
        except NoReference as other:
            raise NoReference(f"{error.why}; and in a world of one: {other.why}", error.fix) from other


def _reference(alone: WorldOfOne) -> tuple[Recording, list[Again]]:
    """(one device's steps, the backwards that were done again for them)."""
    candidate = alone.candidate
    if candidate.world == 1:
        raise NoReference("the run itself is a world of one", "start it with several ranks")
    if not all(e.note == "" for r in candidate.ranks for e in r.of(Step, 1)) or not candidate.steps:
        raise NoReference("no optimizer was seen to step", SAME_DATA)
    queue, cannot = _queue(candidate)
    first: Recording | None = None
    again: list[Again] = []
    natural = False
    for start in range(MOST_STARTS):
        try:
            one, more = alone.again(f"alone-{start}", queue[len(again) :], first is None)
        except NoReference as error:
            if first is None or any(fed[2] == 1 for fed in queue[len(again) :]):
                raise
            cannot = error
            break
        again += more
        n, size = len(again), alone.turns
        while size > 1 and 0 < n < len(queue) and _round(queue[n], size) == _round(queue[n - 1], size):
            n -= 1
        again = again[:n]
        if first is None:
            if piped(candidate) and (sent := next((e for e in one.ranks[0].of(Collective, 1) if e.op == "send"), None)):
                raise NoReference(f"at {sent.site} a stage of the program sends something to itself", SAME_DATA)
            combined.one_model(one, candidate)
            first, natural = one, alone.turns == 1 and combined.saw_the_same(one, candidate)
            if not natural and not any(step == 1 for *_, step in queue):
                raise cannot
        if natural:  # what is left of the first step is known already
            queue = queue[: len(again)] + [fed for fed in queue[len(again) :] if fed[2] > 1]
        if len(again) == len(queue) or (start and not more):
            break
    assert first is not None
    return _combined(alone, first, natural, queue, again, cannot.why), again


def _combined(
    alone: WorldOfOne, first: Recording, natural: bool, queue: list[Fed], again: list[Again], why: str,
    together: bool = False,
) -> Recording:  # fmt: skip
    """The reference: the first step, and each later one up to the first that cannot be had."""
    home = alone.candidate.path / "one"
    scale, fed = dict[str, float](), dict[int, list[tuple[int, int, float]]]()
    writer = RankWriter(home, 0, 1)
    for step in sorted({1, *(step for *_, step in queue)}):
        of_step, needed = [one for one in again if one.of == step], sum(fed[2] == step for fed in queue)
        try:
            if step == 1 and natural:  # as the program took it there by itself
                for event in (event for event in first.ranks[0].events if event.step <= 1):
                    writer.event(event)
                writer.tensors(1, first.ranks[0].tensors(1))
                continue
            begin = 1 + (step - 1) % alone.turns
            if step > 1 and not steady(alone.candidate, step, begin):
                raise NoReference("coefficients of the loss change from step to step", SAME_DATA)
            if len(of_step) < needed:
                short = f"{needed} backwards are to be done again, and the program did {len(of_step)} of them"
                raise NoReference(why or f"{short} in a world of one", MORE_STEPS)
            factors = combined.combine(alone.candidate, combined.turn(first, begin), of_step, writer, scale, together)
            fed[step] = [(one.rank, one.micro, factor) for one, factor in zip(of_step, factors, strict=True)]
        except NoReference as error:
            if step > 1:
                why = error.why
                break
            if together or not isinstance(error, Mixed):
                raise
            return _together(alone, error, queue)
    writer.close()
    describe(
        home, layout="1", replay=alone.replay, together=together, scale=scale, why=why, bound=first.about["bound"],
        again={} if together else fed,
    )  # fmt: skip
    return Recording(home)


def _together(alone: WorldOfOne, why: Mixed, queue: list[Fed]) -> Recording:
    """The reference of a program whose ranks see one another's rows: one device is given them all in one batch."""
    of = {step: combined.distinct(alone.candidate, step) for *_, step in queue}
    queue = [(of[step], micro, step) for ranks, micro, step in queue if ranks[0] == of[step][0]]
    try:
        one, again = replace(alone, replay=False).again("together", queue, True)
        return _combined(alone, one, False, queue, again, why.why, together=True)
    except NoReference as error:
        raise NoReference(f"{why.why}; given the rows of all ranks together: {error.why}", why.fix) from error


def _at_once(alone: WorldOfOne, reference: Recording, micros: list[int], errors: dict[str, float]) -> list[Finding]:
    """Whether one device has other gradients of all ranks' rows in one batch than one by one. `errors`: to add to."""
    ranks = combined.distinct(alone.candidate)
    try:
        first, whole = replace(alone, replay=False).again("together", [(ranks, micro, 1) for micro in micros], True)
        if len(whole) == len(micros) and (sites := combined.other_terms(alone.candidate, whole)):
            return [Finding(NOTE, "", OWN_TERM.format(" and ".join(sites)))]
        apart = combined.at_once(alone.candidate, first, whole, reference) if len(whole) == len(micros) else {}
    except NoReference:  # it has another loss, or calls that cannot be joined
        return []
    if not apart:
        return []
    errors |= apart
    names = tuple(sorted(apart, key=lambda name: -apart[name]))
    sentence = (
        f"step 1: given the rows of all ranks in one batch, one device has the same loss and other gradients of "
        f"{listed(names)} (by up to {apart[names[0]]:.1e}): between backward and the reduction something is not "
        "linear in the gradient, such as a clamp or a clip on each rank"
    )
    look = "hooks on tensors and parameters, and functions with a backward of their own: change the sum, not its parts"
    return [Finding(INCONCLUSIVE, "", sentence, tensors=names, look=look)]


def _carried(alone: WorldOfOne, again: list[Again], errors: dict[str, float]) -> list[Finding]:
    """What each rank makes of its own rows and carries to the next step, where that matters. `errors`: to add to."""
    step, means = local(alone.candidate, again)
    own = next((one for one in again if one.of == step), None)
    if own is None or alone.turns > 1:
        return []
    save_file(means, alone.candidate.path / "means.safetensors")
    try:
        _, others = alone.again("carried", [([own.rank], own.micro, own.of)], False, "means.safetensors")
    except NoReference:
        return []
    return [told for other in others for told in moved(alone.candidate, means, own, other, errors)]


def _queue(candidate: Recording) -> tuple[list[Fed], NoReference]:
    """(every backward of the watched steps up to one that cannot be done again; why). Writes weights of later steps."""
    queue: list[Fed] = []
    for step in [step for number, step in enumerate(candidate.steps, 1) if step == number]:
        try:
            found = _backwards(candidate, step)
            held = combined.weights_before(candidate, step) if step > 1 else {}
        except NoReference as error:
            return queue, error
        if held:
            save_file(held, candidate.path / WEIGHTS.format(step))
        queue += found
    size, why = combined.turns(candidate), "" if queue else "no backward was seen"
    if size > 1 and queue:  # the world of one goes through whole rounds, too, each of them one rank's
        whole = max(step for *_, step in queue) // size * size
        queue = sorted((fed for fed in queue if fed[2] <= whole), key=lambda fed: (_round(fed, size), fed[2], fed[1]))
        why = f"optimizers step in turn, and rounds of {size} steps are compared"
    return queue, NoReference(why, SAME_DATA)


def _round(fed: Fed, size: int) -> tuple[int, list[int]]:
    """Which round of steps something belongs to, and whose."""
    return (fed[2] - 1) // size, fed[0]


def _backwards(candidate: Recording, step: int) -> list[Fed]:
    """Every backward of a step whose data are not another rank's, too."""
    found = []
    for rank in combined.distinct(candidate, step):
        record = candidate.ranks[rank]
        if any(e.sense == "calls" for e in record.of(Lost)):
            raise NoReference(f"the calls of the model on rank {rank} could not be kept", "see the findings below")
        micros = [e.micro for e in record.of(Backward, step)]
        kept = (path for kind in (GRAPH, CACHE) for path in record.path.glob(f"{kind}-{step:04d}-*.safetensors"))
        called = {int(path.name.split("-")[2]) for path in kept}
        if not set(micros) <= called:
            lost = next(e for e in record.of(Backward, step) if e.micro not in called)
            raise NoReference(
                f"rank {rank} calls backward at {lost.site} without a call of the whole model before it (a pipeline, "
                "or two backwards through one graph)",
                SAME_DATA,
            )
        found += [([rank], micro, step) for micro in micros]
    return found
