"""Waits for a watched program, and tells a hang from patience: which rank waits in which collective, who never came.

A program hangs when no rank has said anything, or counted an optimizer step, for the stall limit, and the stacks of all
are where they were half that time ago. After the watched steps who waits for another process, or serves one, is let be.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from isograd_verify.errors import VerifyError
from isograd_verify.judge.checks.traffic import called, signature
from isograd_verify.record.events import Collective
from isograd_verify.record.recording import STEPS, Recording, ranks_so_far
from isograd_verify.tell.findings import BUG, Finding
from isograd_verify.tell.wording import spell
from isograd_verify.watch.foreign import ENGINE
from isograd_verify.watch.life import alive


def wait(process: subprocess.Popen[bytes], directory: Path, stall: float) -> Finding | None:
    """Until the program ends by itself (None), or is found to hang and is stopped."""
    quiet_since, newest = time.monotonic(), (0.0, [b""])
    before: dict[Path, str] | None = None
    while True:
        try:
            process.wait(0.5)
            return None
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # the program received it too; let it end in its own way
            continue
        # When the last event was written, and the counts of optimizer steps of the ranks that have not finished.
        written = max((log.stat().st_mtime for log in directory.glob("rank-*/events.jsonl")), default=0.0)
        homes = [home for home, about in ranks_so_far(directory).items() if not about.get("finished")]
        latest = written, [(home / STEPS).read_bytes() for home in homes if (home / STEPS).exists()]
        quiet = time.monotonic() - quiet_since
        if latest != newest or not (watching(directory) or any(map(any, latest[1]))):
            quiet_since, newest, before = time.monotonic(), latest, None
        elif before is None and quiet > stall / 2:
            before = stacks(directory)
        elif before is not None and quiet > stall:
            now = stacks(directory)
            # Nobody waits for something outside of the program: every stack is known, and none ends there.
            innermost = [re.findall(r'File "([^"]+)"', stack)[:1] for stack in now.values()]
            stuck = bool(innermost) and all(files and not re.search(ELSEWHERE, files[0]) for files in innermost)
            if now != before or not (watching(directory) or stuck):  # it computes, compiles or loads
                quiet_since, before = time.monotonic(), None
                continue
            hang = describe(directory, stall, now) if watching(directory) else silent(stall, now)
            stop(process, directory)
            return hang


def watching(directory: Path) -> bool:
    """Whether some rank's capture is still under way: later only optimizer steps are counted."""
    return any(about.get("watching") for about in ranks_so_far(directory).values())


OURS = r"/torch/|/isograd_verify/(?!corpus)|^<|contextlib|threading\.py"
ELSEWHERE = r"/(subprocess|socketserver|selectors|socket|asyncio/\w+|signal)\.py$"


def stacks(directory: Path) -> dict[Path, str]:
    """Each rank's main stack, as the rank itself writes it when it is sent the signal that it has a handler for."""
    sizes = {path: path.stat().st_size for path in directory.glob("rank-*/stacks.txt")}
    running = processes(directory)
    for home, about in ranks_so_far(directory).items():
        if home / "stacks.txt" in sizes and about.get("pid") in running:
            os.kill(about["pid"], signal.SIGUSR2)
    time.sleep(0.5)
    return {path.parent: path.read_text()[size:] for path, size in sizes.items()}


def place(stack: str) -> str:
    """'train.py:33 in step': the innermost frame of a stack that is the program's own."""
    for file, line, function in re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack):
        if not (ENGINE.search(file) or re.search(OURS, file)):
            return f"{os.path.basename(file)}:{line} in {function}"
    return ""


def describe(directory: Path, stall: float, where: dict[Path, str]) -> Finding:
    """Which rank waits in which collective, and who never came to it."""
    try:
        recording = Recording(directory)
    except VerifyError as error:
        return Finding(BUG, "order", f"hang: nothing happened for {stall:g} s, and the recording is not whole: {error}")
    parted = _all_parted(recording)
    at = {}
    for record in recording.ranks:
        ended = record.about.get("finished") or not alive(int(record.about.get("pid", 0)) or -1)
        found = place(where.get(record.path, ""))
        at[record.rank] = " has ended" if ended else f" is at {found}" if found else ""
    if not parted:
        seen = {r.rank: [f"last seen in {e.op} at {e.site}," for e in r.of(Collective)][-1:] for r in recording.ranks}
        last = "; ".join(f"rank {r}: {''.join(told) or 'no collective yet,'}{at[r]}" for r, told in seen.items())
        return Finding(BUG, "", f"hang: nothing happened for {stall:g} s; {last}")
    group, number, here = parted[0]
    sentence = f"hang: {_who(here, 'wait', ' in')} (collective {number + 1} over {spell(group)})"
    behind = [r for r in group if r not in here]
    if behind:
        sentence += f", which {spell(behind)} never reached"
        sentence += "".join(f"; rank {r}{at[r]}" for r in behind[:3])
    return Finding(BUG, "order", sentence, axis=spell(group))


def silent(stall: float, where: dict[Path, str]) -> Finding:
    """Of a hang after the watched steps: where each rank is, and after how many steps."""
    said = []
    for home, stack in sorted(where.items()):
        count = int.from_bytes((home / STEPS).read_bytes(), "little") if (home / STEPS).exists() else 0
        said.append(f"rank {int(home.name[5:])} is at {place(stack) or 'no line of the program'} after {count} steps")
    return Finding(BUG, "", f"hang: no optimizer step for {stall:g} s; {'; '.join(said)}")


def crash(recording: Recording) -> Finding | None:
    """Of a program that failed: whether members of a group called different collectives, which breaks gloo at once."""
    for group, number, here in [p for p in _all_parted(recording) if len(p[2]) == len(p[0])][:1]:
        sentence = f"before the program failed: {_who(here, 'call', '')} (collective {number + 1} over {spell(group)})"
        return Finding(BUG, "order", sentence, axis=spell(group))
    return None


def _who(here: dict[int, Collective], verb: str, preposition: str) -> str:
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, event in here.items():
        by_kind[str(event)].append(rank)
    words = [(spell(ranks), verb + "s" * (len(ranks) == 1) + preposition, what) for what, ranks in by_kind.items()]
    return ", ".join(" ".join(word) for word in words)


def _all_parted(recording: Recording) -> list[tuple[tuple[int, ...], int, dict[int, Collective]]]:
    """(group, number, who is there): of each group the first collective in which its members do not meet."""
    found = []
    for group, calls in called(recording).items():
        for number in range(max(map(len, calls.values()))):
            here = {rank: events[number] for rank, events in calls.items() if number < len(events)}
            if len(here) < len(group) or len({signature(e) for e in here.values()}) > 1:
                found.append((group, number, here))
                break
    return sorted(found, key=lambda p: min(e.start for e in p[2].values()))


def processes(directory: Path) -> set[int]:
    """Everything that the program started and that still runs, by the recording's name in its environment."""
    mark = f"ISOGRAD_VERIFY={directory.resolve()}\0".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or not ours
            if mark in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.add(int(entry.name))
    return found


def stop(process: subprocess.Popen[bytes], directory: Path) -> None:
    """First asked, then not."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    until = time.monotonic() + 10
    while (left := processes(directory)) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
