"""isograd-verify run --beside-one: the same program once more as a world of one, on the data of all ranks.

    isograd-verify run --beside-one -- torchrun --nproc-per-node 2 train.py

The first run keeps what the calls of its model were made with. The second run is the same command with one rank. Where
its own first step saw the same data, that step is the reference. Else the calls of all ranks are replayed through the
program's own loop, one after the other (watch/feed.py), and their gradients put together (compare/combined.py). A
program that is too short for that is started again until all calls are done. All of it is kept beside the recording:
`alone-0` and so on, and `one`, the reference.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from isograd_verify.compare.combined import combine, distinct, one_model, saw_the_same
from isograd_verify.compare.compare import compare
from isograd_verify.compare.shares import SAME_DATA, Again, Mixed, NoReference
from isograd_verify.errors import VerifyError
from isograd_verify.record.events import Backward, Lost, Step
from isograd_verify.record.recording import VERSION, Recording, write_json
from isograd_verify.run.attach import begin, facts, plain_facts
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject
from isograd_verify.watch.calls import CACHE, GRAPH

MOST_STARTS = 16
SHORTEST = 15.0  # seconds of silence in a world of one that are a hang, where the first run was quick
RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|nnodes|num[-_]machines)(=.*)?")
MPI = re.compile(r"(?:--?np?|-N|--ntasks|--ntasks-per-node|--nodes)(=.*)?")
TOGETHER = (
    "one device was given the rows of all ranks in one batch, because each rank's loss depends on other ranks' rows"
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
    """What the first run's recording shows beside one device. `subject`: what it shows by itself. `replay`: on one
    device tokens go to the experts to which the first run sent them."""
    try:
        candidate = Recording(directory)
        reference = _reference(candidate, single_rank(command), stall, replay)
        together = bool(reference.about.get("together"))  # then labels may be numbers of rows, and data are known
        beside = compare(reference, candidate, ignore_data=together)
        beside.findings += [Finding(NOTE, "", TOGETHER)] if together else []
        for site, times in reference.about.get("scale", {}).items():
            beside.findings = [_open(found, site, times) for found in beside.findings]
    except NoReference as error:
        return _not_compared(subject, error.why, error.fix)
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


def _not_compared(subject: Subject, why: str, fix: str) -> Subject:
    said = Finding(INCONCLUSIVE, "", f"not compared with one device: {why}", look=fix)
    subject.findings = [said, *subject.findings]
    return subject


def _reference(candidate: Recording, command: list[str], stall: float, replay: bool) -> Recording:
    if candidate.world == 1:
        raise NoReference("the run itself is a world of one", "start it with several ranks")
    if not all(e.note == "" for r in candidate.ranks for e in r.of(Step, 1)) or not candidate.steps:
        raise NoReference("no optimizer was seen to step", SAME_DATA)
    cannot: NoReference | None = None
    try:
        queue = _backwards(candidate)
    except NoReference as error:  # it matters only where a world of one has other data of its own
        queue, cannot = [], error
    first: Recording | None = None
    again: list[Again] = []
    for start in range(MOST_STARTS):
        left = queue[len(again) :]
        one = _start(candidate.path, f"alone-{start}", command, left, first is None, stall, replay)
        own = one.ranks[0]
        steps = [e.step for e in own.of(Step) if not e.note]
        if first is None:
            if not steps or steps[0] != 1:
                raise NoReference("in a world of one no optimizer steps", MORE_STEPS)
            one_model(one, candidate)
            if saw_the_same(one, candidate):
                for path in own.path.glob("step-*"):  # what was fed after the first step is no step of one device
                    if path.name != "step-0001.safetensors":
                        path.unlink()
                return one
            if cannot is not None:
                raise cannot
            first, steps = one, steps[1:]
        again += [Again(rank, micro, own, step) for ((rank,), micro), step in zip(left, steps, strict=False)]
        if len(again) == len(queue):
            return _combined(candidate, first, again, command, stall, replay)
        if start and not steps:
            break
    needed = f"{len(queue)} backwards are to be done again, and the program did {len(again)} of them in a world of one"
    raise NoReference(needed, MORE_STEPS)


def _combined(
    candidate: Recording, first: Recording, again: list[Again], command: list[str], stall: float, replay: bool
) -> Recording:
    together, scale = False, dict[str, float]()
    try:
        scale = combine(candidate, first, again, candidate.path / "one")
    except Mixed as error:
        _together(candidate, command, stall, error)
        together = True
    about = {"version": VERSION, "layout": "1", "replay": replay, "together": together, "scale": scale}
    write_json(candidate.path / "one" / "recording.json", about)
    return Recording(candidate.path / "one")


def _together(candidate: Recording, command: list[str], stall: float, why: Mixed) -> None:
    """The reference of a program whose ranks see one another's rows: one device is given them all in one batch."""
    ranks, micros = distinct(candidate), [e.micro for e in candidate.ranks[0].of(Backward, 1)]
    queue = [(ranks, micro) for micro in micros]
    try:
        one = _start(candidate.path, "together", command, queue, True, stall, False)
        own = one.ranks[0]
        steps = [e.step for e in own.of(Step) if not e.note][1:]
        again = [Again(ranks[0], micro, own, step) for micro, step in zip(micros, steps, strict=False)]
        if len(again) < len(queue):
            raise NoReference(f"the program did {len(again)} of {len(queue)} backwards", MORE_STEPS)
        combine(candidate, one, again, candidate.path / "one", together=True)
    except NoReference as error:
        raise NoReference(f"{why.why}; given the rows of all ranks together: {error.why}", why.fix) from error


def _backwards(candidate: Recording) -> list[tuple[list[int], int]]:
    """([rank], micro-batch) of every backward of the first step whose data are not another rank's, too."""
    found = []
    for rank in distinct(candidate):
        record = candidate.ranks[rank]
        if any(e.sense == "calls" for e in record.of(Lost)):
            raise NoReference(f"the calls of the model on rank {rank} could not be kept", "see the findings below")
        micros = [e.micro for e in record.of(Backward, 1)]
        kept = (path for kind in (GRAPH, CACHE) for path in record.path.glob(f"{kind}-*.safetensors"))
        called = {int(path.name.split("-")[1]) for path in kept}
        if not set(micros) <= called:
            lost = next(e for e in record.of(Backward, 1) if e.micro not in called)
            raise NoReference(
                f"rank {rank} calls backward at {lost.site} without a call of the whole model before it (a pipeline, "
                "or two backwards through one graph)",
                SAME_DATA,
            )
        found += [([rank], micro) for micro in micros]
    return found


def _start(
    home: Path,
    name: str,
    command: list[str],
    backwards: list[tuple[list[int], int]],
    natural: bool,
    stall: float,
    replay: bool,
) -> Recording:
    write_json(home / "feed.json", {"backwards": backwards, "natural": natural})
    place = home / name
    place.mkdir()
    more = {"ISOGRAD_VERIFY_FEED": str((home / "feed.json").resolve()), "ISOGRAD_VERIFY_PARAMETERS": "1"}
    more |= {"ISOGRAD_VERIFY_REPLAY": str(home.resolve())} if replay else {}
    first = Recording(home).ranks[0].about
    patience = max(SHORTEST, 4 * float(first.get("watched_seconds") or first.get("seconds") or stall))
    hang, code = begin(command, place, min(stall, patience), more, {"replay": replay})
    if hang is not None:
        raise NoReference(f"the program hung in a world of one: {hang.sentence}", "start it with one rank by itself")
    try:
        found = Recording(place)
    except VerifyError as error:
        why = f"the program does not train in a world of one (exit code {code}): {error.what}"
        raise NoReference(why, "see its own output; start it with one rank by itself") from error
    died = found.ranks[0].about.get("died")
    if died and not any(not e.note for e in found.ranks[0].of(Step)):
        raise NoReference(f"the program does not train in a world of one: {died}", SAME_DATA)
    failed = found.ranks[0].about.get("failed")
    if failed:
        why = re.sub(r"^RuntimeError: | \(feed\.py:\d+\)$", "", str(failed))
        raise NoReference(why, "see docs/verify.md, beside one device")
    return found
