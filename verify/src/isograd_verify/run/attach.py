"""isograd-verify run: start a command, watch every Python process in it that trains, report when it ends or stalls.

The program is not edited and its output is not touched. Its own exit code is returned when it is not zero.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd_verify.errors import VerifyError
from isograd_verify.judge.checks import check
from isograd_verify.record.events import Backward, Collective, Lost, OtherWorld, Step
from isograd_verify.record.recording import Recording, describe
from isograd_verify.run.hang import crash, wait, watching
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, Finding, Subject
from isograd_verify.tell.report import Report, timeline
from isograd_verify.tell.wording import left_out, spell

# What is lost when watching it raises an error (Life.lose), in words.
SENSES = {
    "activations": "activations", "calls": "the calls of the model", "collectives": "collectives",
    "data": "the data that models were given",
    "flows": "collectives that cut the graph", "labels": "the labels of losses", "logits": "the gradient of logits",
    "means": "means in the loss", "losses": "the line of the loss",
    "functions": "functions that communicate",
    "choices": "the choice of experts", "averages": "averages of parameters", "norms": "the norms that clip",
}  # fmt: skip

# Names behind which a secret stands: HF_TOKEN, --api-key, db.password; not --tokenizer, --max-tokens.
SECRET = r"(?:token(?!iz|s\b)|key(?!s\b|board)|secret|passw|credential)"
_NAMED = re.compile(rf"-{{0,2}}[\w.-]*{SECRET}[\w.-]*", re.IGNORECASE)
_INSIDE = (
    (re.compile(r"(\w://)[^/@\s]+@"), r"\1***@"),  # user and password of an address
    (re.compile(rf"([\w.-]*{SECRET}[\w.-]*[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&}}]+", re.IGNORECASE), r"\1***"),
    (re.compile(rf"((?:^|\s)-{{1,2}}[\w.-]*{SECRET}[\w.-]*\s+)(?!-)\S+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\b(?:bearer|basic)\s+)\S+", re.IGNORECASE), r"\1***"),
)
STARTUP = Path(__file__).parents[1] / "watch" / "startup"
STDERR = "stderr.txt"  # of a world of one, in its recording


def run(
    command: list[str],
    directory: Path,
    steps: int | str = 3,
    stall: float = 300.0,
    layout: str = "",
    activations: bool = False,
    parameters: bool = True,
    calls: bool = False,
    replay: Path | None = None,
    sketch: bool = False,
) -> tuple[Report, int]:
    """(report, the program's own exit code; 0 when it was stopped because it hung). `parameters`: record them, too.
    `calls`: and what the calls of the model were made with. `replay`: a recording whose choices of experts are
    taken. `sketch`: large tensors by sketches alone."""
    if not command:
        raise VerifyError(
            "IG701", "no command to watch", fix="isograd-verify run -- torchrun --nproc-per-node 2 train.py"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise VerifyError(
            "IG702", f"{str(directory)!r} is not empty", expected="a new directory for the recording",
            fix="name another one with --record, or remove it",
        )  # fmt: skip
    if replay is not None:
        Recording(replay)  # refused before anything runs
    new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    about = {"layout": layout, "steps": steps, "replay": replay is not None}
    switches = {"ACTIVATIONS": activations, "PARAMETERS": parameters, "CALLS": calls, "SKETCH": sketch}
    more = {f"ISOGRAD_VERIFY_{name}": str(int(on)) for name, on in switches.items()}
    more["ISOGRAD_VERIFY_STEPS"] = str(steps)
    more |= {"ISOGRAD_VERIFY_REPLAY": str(replay.resolve())} if replay is not None else {}
    try:
        hang, own = begin(command, directory, stall, more, about)
    except OSError as error:
        (directory / "recording.json").unlink()
        if new:
            directory.rmdir()
        raise VerifyError(
            "IG703", f"cannot start {command[0]!r}", seen=error, fix="check the command behind '--'"
        ) from error
    shown = masked(command)
    subject = inspect(directory, hang, shown, failed=own)
    hung = hang is not None and hang.verdict == BUG
    return Report(f"isograd-verify run -- {' '.join(shown)}", [subject]), 0 if hung else own


def masked(command: list[str]) -> list[str]:
    """A command as reports and recordings show it: without the values that its names call secret, or an address has."""
    shown, hides = list[str](), False
    for word in command:
        name, equals, _ = word.partition("=")
        if hides and not word.startswith("-"):
            shown.append("***")
        elif equals and _NAMED.fullmatch(name):
            shown.append(f"{name}=***")
        else:
            for pattern, instead in _INSIDE:
                word = pattern.sub(instead, word)  # noqa: PLW2901
            shown.append(word)
        hides = word.startswith("-") and not equals and _NAMED.fullmatch(word) is not None
    return shown


def begin(
    command: list[str], directory: Path, stall: float, more: dict[str, str], about: dict[str, Any]
) -> tuple[Finding | None, int]:
    """Starts a command under watch and waits for its end: (what hung, or who ended it; its exit code)."""
    about = {"command": masked(command), **about}
    describe(directory, **about)
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH", "")]))
    more = {"ISOGRAD_VERIFY": str(directory.resolve()), "PYTHONPATH": path, **more}
    again = "ISOGRAD_VERIFY_FEED" in more  # what its end says counts only if nothing can be compared
    with (directory / STDERR).open("wb") if again else nullcontext() as errors:
        process = subprocess.Popen(command, env=os.environ | more, stderr=errors)
    with _passed_on(process) as asked:
        hang = wait(process, directory, stall)
    own = process.returncode if process.returncode >= 0 else 128 - process.returncode  # as a shell tells a signal
    describe(directory, **about, exit_code=own, stalled=hang is not None)
    if asked:
        told = f"{asked[0].name} was sent to isograd-verify, which passed it on: the run is not whole"
        hang, own = Finding(INCONCLUSIVE, "", told), own or 128 + asked[0]
    return hang, own


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[signal.Signals]]:
    """Whoever asks us to end asks the program; our report comes all the same. The signals that came."""
    kept, asked = {}, list[signal.Signals]()

    def received(number: int, frame: Any) -> None:
        asked.append(signal.Signals(number))
        process.send_signal(number)

    with suppress(ValueError):  # not in the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            kept[number] = signal.signal(number, received)
    try:
        yield asked
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def inspect(directory: Path, hang: Finding | None = None, command: list[str] | None = None, failed: int = 0) -> Subject:
    """What a recording shows without any reference. `failed`: the program's exit code, where it is not zero."""
    words = command or [str(directory)]
    program = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    name = " ".join(Path(word).name for word in words[: max(6, program + 1)])
    ranks = len(list(directory.glob("rank-*")))
    if hang is not None and (not ranks or watching(directory)):
        return Subject(name, ranks, findings=[hang])
    if not ranks:
        sentence = (
            "nothing to check: no process of the command joined a process group or made an optimizer "
            "(or its Python does not see PYTHONPATH)"
        )
        return Subject(name, 0, findings=[Finding(INCONCLUSIVE, "", sentence)])
    try:
        recording = Recording(directory)
        subject = Subject(name, recording.world, timeline=timeline(recording))
        subject.findings = [*filter(None, [hang]), *plain_facts(recording), *check(recording)]
        ended = hang is not None and hang.verdict == INCONCLUSIVE  # by someone else
        named = ended or any(f.bug == "order" for f in subject.findings)
        why = crash(recording) if failed and not named else None
        subject.findings += [why] if why is not None else []
        if failed and hang is None:  # it never passes: what it did up to then is all that was seen
            seen = f"{len(recording.steps)} of the steps to watch ({recording.about.get('steps') or 'all'}) were seen"
            sentence = f"the program failed with exit code {failed}: {seen} to their end"
            subject.findings.append(Finding(INCONCLUSIVE, "", sentence))
        subject.facts = facts(recording)
        _drift(recording, subject)
    except VerifyError as error:  # killed in the middle of a line, say
        sentence = f"{error.what} ({error.seen})" if error.seen is not None else error.what
        subject = Subject(name, ranks, findings=[Finding(INCONCLUSIVE, "", f"{error.code}: {sentence}")])
    return subject


def plain_facts(recording: Recording) -> list[Finding]:
    """What stands in the way of a verdict, said plainly."""
    said = [*((INCONCLUSIVE, sentence) for sentence in _obstacles(recording)), *_remarks(recording)]
    return [*(Finding(verdict, "", sentence) for verdict, sentence in said), *left_out(recording)]


def _remarks(recording: Recording) -> Iterator[tuple[str, str]]:
    unfinished = [r.rank for r in recording.ranks if not r.about.get("finished")]
    if unfinished:
        yield NOTE, f"{spell(unfinished)} ended without closing the recording (killed, or left through os._exit)"
    for path in sorted(recording.path.glob("second-*")):
        rank = int(path.name.rpartition("-")[2])
        yield NOTE, f"a second process called itself rank {rank} while the first was running, and was not watched"
    again = sorted({int(path.name.rpartition("-")[2]) for path in recording.path.glob("earlier-*")})
    if again:
        yield NOTE, f"{spell(again)} started more than once: only the last start was checked"
    nameless = {r.rank: most for r in recording.ranks if (most := max((e.nameless for e in r.of(Step)), default=0))}
    if nameless:
        count = next(iter(nameless.values()))
        where = f"{spell([*nameless])} and that belong to no module that was called in a watched step"
        yield NOTE, f"not judged: {count} parameters that optimizers step on {where}"
    lost = {e.sense: (e.why, r.rank) for r in recording.ranks[::-1] for e in r.of(Lost)}
    for sense, (why, rank) in lost.items():
        what = f"not judged: {SENSES.get(sense, sense)}"
        yield INCONCLUSIVE, f"{what}: watching them raised an error on rank {rank}: {why}"
    if any(r.about.get("compiled") for r in recording.ranks):
        yield NOTE, "torch.compile waited: the watched steps ran as if it were not there"


def _obstacles(recording: Recording) -> Iterator[str]:
    failed = [(r.rank, r.about["failed"]) for r in recording.ranks if r.about.get("failed")]
    if failed:
        yield f"watching ended early on {spell([rank for rank, _ in failed])}, not the program: {failed[0][1]}"
    worlds = {int(r.about["world"]) for r in recording.ranks}
    worlds |= {e.world for r in recording.ranks for e in r.of(OtherWorld)}
    if len(worlds) > 1:
        sizes = ", ".join(map(str, sorted(worlds, reverse=True)))
        yield f"the world changed its size during the run ({sizes} ranks): only what was before was checked"
    if failed or len(worlds) > 1:
        return
    steps = [e for r in recording.ranks for e in r.of(Step)]
    taken = [e for e in steps if not e.note]
    ended = [r.rank for r in recording.ranks if not r.about.get("finished") or (r.of(Backward) and not r.of(Step))]
    functional = any(r.about.get("functional") for r in recording.ranks)
    if functional:
        yield (
            "the program takes gradients by torch.func, which returns them and calls no backward: they are not "
            "watched; call backward in the watched steps, or prove the step as a case (docs/verify.md)"
        )
    elif not any(r.of(Backward) for r in recording.ranks):
        yield "the program never called backward: there are no gradients to check"
    elif not taken and ended:
        yield f"{spell(ended)} ended before the first optimizer step: there is no whole step to check"
    elif not taken:
        yield "no optimizer stepped: gradients were checked as the last backward left them"
    elif not recording.steps:
        yield "no step was seen whole on all ranks: there is nothing to check"
    if taken and not functional and not any(p.gradient for e in taken for p in e.parameters.values()):
        yield "no parameter of a called module had a gradient at the optimizer's step"


def facts(recording: Recording) -> dict[str, str]:
    """Numbers about a run for the report's head: steps, collectives, gradients, and the cost of watching."""
    first = recording.ranks[0]
    count = sum(len(r.of(Collective)) for r in recording.ranks)
    told = {"steps": str(len(recording.steps)), "collectives": str(count)}
    learn = {n for r in recording.ranks for e in r.of(Step) for n, p in e.parameters.items() if p.gradient}
    told["gradients"] = f"{len(learn)} by name"
    own, seconds = float(first.about.get("own_seconds", 0)), float(first.about.get("watched_seconds", 0))
    if seconds:
        told["overhead"] = f"{own:.2f} s of the {seconds:.2f} s watched on rank 0"
    gaps = [b - a for a, b in pairwise(float(t) for t in first.about.get("step_times", []))]
    watched = sum(step == number for number, step in enumerate(recording.steps, 1)) - 1
    later = gaps[watched + 1 :] or gaps[watched:]  # the very first one after the watching may still clean up
    if watched >= 1 and later:
        with_it, without = statistics.median(gaps[:watched]), statistics.median(later)
        told["overhead"] = (
            f"a watched step took {with_it / without:.1f} x an unwatched one ({with_it:.3f} s, {without:.3f} s)"
        )
    return told


def _drift(recording: Recording, subject: Subject) -> None:
    """Heat map without a reference: how far each rank's gradient is from a multiple of what all copies have added."""
    from isograd_verify.judge.analysis import Analysis

    for step in recording.steps[:1]:
        analysis = Analysis(recording, step)
        for name in analysis.names:
            row: list[float | None] = [None] * recording.world
            for ranks in analysis.replica_sets(name):
                held = {rank: analysis.sums[rank][name] for rank in ranks if name in analysis.sums[rank]}
                parts = [p for (rank, _), p in analysis.contributions(name, ranks[0]).items() if rank in ranks]
                for rank, error in _deviations(held, parts).items():
                    row[rank] = error
            known = [v for v in row if v is not None]
            if known:
                subject.by_rank[name], subject.errors[name] = row, max(known)


def _deviations(held: dict[int, Tensor], parts: list[Tensor]) -> dict[int, float]:
    first = next(iter(held.values()), None)
    if first is None or all(bool((one == first).all()) for one in held.values()):
        return dict.fromkeys(held, 0.0)
    truth = torch.stack(parts).sum(0) if parts else torch.stack([*held.values()]).mean(0)
    square = max(float(truth @ truth), 1e-300)
    return {
        rank: float((one - (float(one @ truth) / square) * truth).norm()) / max(float(one.norm()), 1e-300)
        for rank, one in held.items()
    }
