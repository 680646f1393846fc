"""isograd verify run: start a command, watch every Python process in it that trains, report when it ends or stalls.

    isograd verify run -- torchrun --nproc-per-node 4 train.py --its own --arguments

The program is not edited and its output is not touched. Its own exit code is returned when it is not zero.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

from isograd.errors import VerifyError
from isograd.verify.checks import check
from isograd.verify.findings import BUG, INCONCLUSIVE, NOTE, Finding, Report, Subject
from isograd.verify.recording import Recording, write_json
from isograd.verify.report import timeline
from isograd.verify.wording import finding, spell

STARTUP = Path(__file__).with_name("startup")


def run(
    command: list[str],
    directory: Path,
    steps: int = 3,
    stall: float = 300.0,
    layout: str = "",
    activations: bool = False,
) -> tuple[Report, int]:
    """(report, the program's own exit code)."""
    if not command:
        raise VerifyError(
            "IG701", "no command to watch", fix="isograd verify run -- torchrun --nproc-per-node 2 train.py"
        )
    if directory.exists() and any(directory.iterdir()):
        raise VerifyError(
            "IG702", f"{str(directory)!r} is not empty", expected="a new directory for the recording",
            fix="name another one with --record, or remove it",
        )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    about = {"version": 1, "command": command, "layout": layout, "steps": steps}
    write_json(directory / "recording.json", about)
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH", ""), package]))
    more = {"ISOGRAD_VERIFY": str(directory.resolve()), "ISOGRAD_VERIFY_STEPS": str(steps), "PYTHONPATH": path}
    more["ISOGRAD_VERIFY_ACTIVATIONS"] = "1" if activations else "0"
    try:
        process = subprocess.Popen(command, env=os.environ | more)
    except OSError as error:
        raise VerifyError(
            "IG703", f"cannot start {command[0]!r}", seen=error, fix="check the command behind '--'"
        ) from error
    hang = _wait(process, directory, stall)
    write_json(directory / "recording.json", about | {"exit_code": process.returncode, "stalled": hang is not None})
    return Report(f"isograd verify run -- {' '.join(command)}", [inspect(directory, hang, command)]), process.returncode


def inspect(directory: Path, hang: Finding | None = None, command: list[str] | None = None) -> Subject:
    """What a recording shows without any reference."""
    name = " ".join(Path(word).name for word in (command or [str(directory)])[:6])
    if hang is not None:
        return Subject(name, len(list(directory.glob("rank-*"))), findings=[hang])
    if not list(directory.glob("rank-*")):
        sentence = (
            "nothing to check: no process of the command joined a process group or made an optimizer "
            "(or its Python does not see PYTHONPATH)"
        )
        return Subject(name, 0, findings=[Finding(INCONCLUSIVE, "", sentence)])
    recording = Recording(directory)
    subject = Subject(name, recording.world, timeline=timeline(recording))
    subject.findings = [*plain_facts(recording), *check(recording)]
    subject.facts = facts(recording)
    _drift(recording, subject)
    return subject


def plain_facts(recording: Recording) -> list[Finding]:
    """What stands in the way of a verdict, said plainly."""
    found = []
    backwards = sum(len(r.of("backward")) for r in recording.ranks)
    steps = [e for r in recording.ranks for e in r.of("step") if not e["note"]]
    worlds = {int(r.about["world"]) for r in recording.ranks} | {
        e["world"] for r in recording.ranks for e in r.of("world")
    }
    if not backwards:
        found.append(Finding(INCONCLUSIVE, "", "the program never called backward: there are no gradients to check"))
    elif not steps:
        found.append(
            Finding(INCONCLUSIVE, "", "no optimizer stepped: gradients were checked as the last backward left them")
        )
    elif not any(p["gradient"] for e in steps for p in e["parameters"].values()):
        sentence = "no parameter of a called module had a gradient at the optimizer's step"
        found.append(Finding(INCONCLUSIVE, "", sentence))
    if len(worlds) > 1:
        sentence = f"the world changed its size during the run ({', '.join(map(str, sorted(worlds)))} ranks)"
        found.append(Finding(INCONCLUSIVE, "", sentence + ": steps before and after cannot be compared"))
    unfinished = [r.rank for r in recording.ranks if not r.about.get("finished")]
    if unfinished:
        sentence = f"{spell(unfinished)} ended without closing the recording (killed, or left through os._exit)"
        found.append(Finding(NOTE, "", sentence))
    return found


def facts(recording: Recording) -> dict[str, str]:
    first = recording.ranks[0]
    count = sum(len(r.of("collective")) for r in recording.ranks)
    told = {"steps": str(len(recording.steps)), "collectives": str(count)}
    told["gradients"] = f"{sum(p['gradient'] for p in recording.parameters().values())} by name"
    own, seconds = float(first.about.get("own_seconds", 0)), float(first.about.get("watched_seconds", 0))
    if seconds:
        told["overhead"] = f"{own:.2f} s of the {seconds:.2f} s watched on rank 0"
    times = [float(t) for t in first.about.get("step_times", [])]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    watched = len(recording.steps) - 1
    if watched >= 1 and len(gaps) > watched + 2:
        with_it, without = statistics.median(gaps[:watched]), statistics.median(gaps[watched + 1 :])
        told["overhead"] = (
            f"a watched step took {with_it / without:.1f} x an unwatched one ({with_it:.3f} s, {without:.3f} s)"
        )
    return told


def _drift(recording: Recording, subject: Subject) -> None:
    """Heat map without a reference: how far each rank's gradient is from the first copy of it."""
    from isograd.verify.analysis import Analysis

    for step in recording.steps[:1]:
        analysis = Analysis(recording, step)
        for name in analysis.names:
            row: list[float | None] = [None] * recording.world
            for ranks in analysis.replica_sets(name):
                first = recording.ranks[ranks[0]].tensors(step).get(f"final/{name}")
                for rank in ranks:
                    mine = recording.ranks[rank].tensors(step).get(f"final/{name}")
                    if first is not None and mine is not None and mine.shape == first.shape:
                        size = max(float(first.double().norm()), 1e-300)
                        row[rank] = float((mine.double() - first.double()).norm()) / size
            known = [v for v in row if v is not None]
            if known:
                subject.by_rank[name], subject.errors[name] = row, max(known)


# -- waiting -----------------------------------------------------------------------------------------------------


def _wait(process: subprocess.Popen[bytes], directory: Path, stall: float) -> Finding | None:
    """Until the program ends; a finding when its watched ranks were silent for `stall` seconds."""
    quiet_since, newest = time.monotonic(), 0.0
    while True:
        try:
            process.wait(0.5)
            return None
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # the program received it too; let it end in its own way
            continue
        logs = list(directory.glob("rank-*/events.jsonl"))
        latest = max((log.stat().st_mtime for log in logs), default=0.0)
        if latest != newest or not logs or not _watching(directory):
            quiet_since, newest = time.monotonic(), latest
        elif time.monotonic() - quiet_since > stall:
            hang = describe_hang(directory, stall)
            _stop(process, directory)
            return hang


def _watching(directory: Path) -> bool:
    """Whether some rank's capture is still under way: after the last watched step silence means nothing."""
    return any('"watching": true' in path.read_text() for path in directory.glob("rank-*/rank.json"))


def describe_hang(directory: Path, stall: float) -> Finding:
    """Which rank waits in which collective, and who never came to it."""
    recording = Recording(directory)
    for record in recording.ranks:
        try:
            os.kill(int(record.about["pid"]), signal.SIGUSR2)
        except (OSError, KeyError):
            continue
    time.sleep(0.3)
    calls = {r.rank: [e for e in r.of("collective")] for r in recording.ranks}
    groups = {tuple(e["group"]) for events in calls.values() for e in events if e["op"] not in ("send", "recv")}
    for group in sorted(groups, key=len, reverse=True):
        counts = {r: [e for e in calls.get(r, []) if tuple(e["group"]) == group] for r in group}
        most = max(len(c) for c in counts.values())
        behind = [r for r in group if len(counts[r]) < most]
        if behind:
            ahead = next(r for r in group if len(counts[r]) == most)
            event = counts[ahead][-1]
            sentence = (
                f"hang: {spell([r for r in group if len(counts[r]) == most])} waits in {event['op']} of {event['numel']} x "
                f"{event['dtype']} at {event['site']} (number {most} over {spell(group)}), which {spell(behind)} never reached"
                f"{_stack(recording, behind[0])}"
            )
            return finding(BUG, "order", sentence, axis=spell(group))
    last = [
        f"rank {r}: {e[-1]['op']} at {e[-1]['site']}" if e else f"rank {r}: no collective" for r, e in calls.items()
    ]
    sentence = f"hang: nothing happened for {stall:g} s; last seen: {'; '.join(last)}{_stack(recording, 0)}"
    return Finding(BUG, "", sentence)


def _stack(recording: Recording, rank: int) -> str:
    path = recording.ranks[rank].path / "stacks.txt"
    lines = path.read_text()[:4000].splitlines() if path.exists() else []
    frames = [line.strip() for line in lines if line.strip().startswith("File")][:3]
    return f"; rank {rank} is at {'; '.join(frames)}" if frames else ""


def _stop(process: subprocess.Popen[bytes], directory: Path) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for record in Recording(directory).ranks:
        try:
            os.kill(int(record.about["pid"]), signal.SIGKILL)
        except (OSError, KeyError):
            continue
