"""Faults of every kind in one run of eight ranks, for hours, in segments: its losses are those of the undisturbed run.

    python -m benchmarks.soak --work FOLDER --minutes 60         a segment; the same words again are the next one

Each segment runs `isograd train` with `after_death: replace`, and does to it from outside, at random moments: `kill -9`
of one or two ranks, SIGSTOP of a rank until it counts as dead, SIGSTOP of the job as one and SIGCONT later, a clock
that jumps by up to two days, and a disk of checkpoints that is slow, full, fails at a flush, or lies (a flush says that
all is well, and half of the file is gone). At its end it sends SIGTERM. The next segment has the next layout. Then the
undisturbed run comes as far.

Said at the end of each segment, and written into FOLDER/found.json:

- whether all losses so far are those of the undisturbed run: to the bit before the first change of the layout, after it
  to 1e-7;
- memory, open files and threads of each process that lived long enough: the last quarter over the second one; - each
end of the command that was no stop_request of the soak, and each time at which no step came for `--hang` seconds.

The faults of a disk are put into the ranks by this script: a rank looks at a file before each step (`Disk`). So are
those of the clock, into the command as well: `time.time` adds what another file says (`jumping`).
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from isograd.cli.main import main as cli
from isograd.data import build
from isograd.train import journal
from isograd.train.run import start
from isograd.train.run.signals import STOPPED

LAYOUTS = ("dp8 zero1", "dp4 tp2 sp zero1", "dp8 zero3", "dp2 cp2 tp2 zero1", "dp4 pp2 zero1", "dp8")
CLOCKS = (-86400.0, 0.0, 86400.0)  # seconds that the clock is wrong by
DISKS = ("slow", "full", "fails", "lies")
STALL_S, WAIT_S = 15.0, 60.0
MOST = 10**6  # steps: more than any soak comes to
STARTS_S = 60  # of a process, which are not compared
GROWS = {"memory": (1.1, 30 << 20), "files": (1.0, 4), "threads": (1.0, 4)}  # (ratio, more than): both is too much
CONFIG: dict[str, Any] = {
    "model": {"preset": "tiny-llama", "options": {"vocab": 257}, "dtype": "fp64"},
    "optimizer": {"lr": 1e-3, "schedule": "constant"},
    "steps": MOST, "batch": 16, "micro_batches": 2, "log": {"sample": 0},
    "evaluate": {"every": 50, "batches": 1}, "checkpoint": {"every": 20, "keep_last": 3},
}  # fmt: skip
SAFE = {
    "safety": {"stall_s": STALL_S},
    "resilience": {"after_death": "replace", "copies": "partner", "tries": 20, "wait_s": WAIT_S},
}


@dataclass(frozen=True)
class Disk:
    """Given to ranks as `RunOptions.before_step`. `said`: a file that says what is wrong with the disk of
    checkpoints."""

    said: Path

    def __call__(self, step: int, job: Any) -> None:
        if not hasattr(os.fsync, "soak"):
            real = os.fsync

            def fsync(file: Any) -> None:
                number = file if isinstance(file, int) else file.fileno()
                real(number)
                if "/checkpoints/" in os.readlink(f"/proc/self/fd/{number}"):
                    self.does(number)

            fsync.soak = True  # type: ignore[attr-defined]
            os.fsync = fsync
            jumping(self.said.with_name("clock"))

    def does(self, file: int) -> None:
        """After a flush."""
        with suppress(FileNotFoundError):
            said = self.said.read_text()
            if said == "slow":
                time.sleep(1.0)
            elif said == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            elif said == "fails":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            elif said == "lies" and not os.path.isdir(f"/proc/self/fd/{file}"):
                with suppress(OSError):
                    os.ftruncate(file, os.fstat(file).st_size // 2)


def jumping(said: Path) -> None:
    """Let this process's clock be wrong by the seconds that a file names, if there is one."""
    real = time.time

    def now() -> float:
        with suppress(FileNotFoundError, ValueError):
            return real() + float(said.read_text())
        return real()

    time.time = now


def train(words: list[str], said: Path) -> int:
    """`isograd train` whose ranks look at the file."""
    jumping(said.with_name("clock"))
    done_here = start._done_here
    start._done_here = lambda config, ranks, orders: done_here(config, ranks, replace(orders, before_step=Disk(said)))
    return cli(["train", *words])


def losses(folder: Path) -> dict[int, float]:
    """By step."""
    return {line["step"]: line["loss"] for line in journal.read(folder / "metrics.jsonl") if "grad_norm" in line}


class Process:
    """The command under way, and what its processes take."""

    def __init__(self, home: Path, words: list[str]) -> None:
        self.out = (home / "said.txt").open("a")
        self.popen = subprocess.Popen(words, stdout=self.out, stderr=self.out, stdin=subprocess.DEVNULL)
        self.taken: dict[str, list[dict[str, int]]] = {}
        self.kinds: dict[str, list[Counter[str]]] = {}  # of its open files, beside `taken`

    def everyone(self) -> list[psutil.Process]:
        """All that still run, the command first."""
        with suppress(psutil.NoSuchProcess):
            command = psutil.Process(self.popen.pid)
            return [command, *command.children(recursive=True)]
        return []

    def ranks(self) -> list[psutil.Process]:
        """Those that are ranks."""
        found = []
        for process in self.everyone():
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.name().startswith("isograd r") else []
        return found

    def signal(self, processes: list[psutil.Process], number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def look(self) -> None:
        """Note what each process takes."""
        for process in self.everyone():
            with suppress(psutil.Error, OSError):
                name = "command" if process.pid == self.popen.pid else process.name()
                kinds = open_files(process)
                taken = {"memory": process.memory_info().rss, "files": kinds.total(), "threads": process.num_threads()}
                self.taken.setdefault(f"{name} ({process.pid})", []).append(taken)
                self.kinds.setdefault(f"{name} ({process.pid})", []).append(kinds)

    def grown(self) -> list[str]:
        """What takes more in its last quarter than in its second one."""
        found = []
        for name, every in self.taken.items():
            taken = every[STARTS_S:]
            quarter = len(taken) // 4
            for what, (ratio, least) in GROWS.items() if quarter >= 5 else ():
                numbers = [each[what] for each in taken]
                before, now = statistics.median(numbers[quarter : 2 * quarter]), statistics.median(numbers[-quarter:])
                if now > ratio * before and now - before > least:
                    more = self.kinds[name][-1] - self.kinds[name][STARTS_S + 3 * quarter // 2]
                    found.append(f"{name}: {what} {before:g} -> {now:g}" + f" {dict(more)}" * (what == "files"))
        return found


def open_files(process: psutil.Process) -> Counter[str]:
    """How many of each kind: a socket by its state, a file by its name without numbers."""
    sockets = {each.fd: f"tcp {each.status}" for each in process.net_connections("tcp")}
    kinds: Counter[str] = Counter()
    for entry in os.listdir(f"/proc/{process.pid}/fd"):
        with suppress(OSError):
            name = re.sub(r"\d+", "#", os.readlink(f"/proc/{process.pid}/fd/{entry}"))
            kinds[sockets.get(int(entry), name)] += 1
    return kinds


class Segment:
    """Up to `seconds` of one layout."""

    def __init__(self, home: Path, layout: str, chance: random.Random, hang: float) -> None:
        self.home, self.chance, self.hang = home, chance, hang
        self.run, self.disk = home / "run", home / "disk"
        self.clock = home / "clock"
        self.words = command(home, self.run, layout, SAFE)
        self.did: dict[str, int] = {}
        self.wrong: list[str] = []
        self.grown: list[str] = []

    def go(self, seconds: float) -> None:
        end, started = time.monotonic() + seconds, 0
        while time.monotonic() < end and started < 50:
            started += 1
            process = Process(self.home, self.words)
            try:
                self._plague(process, end)
            finally:
                process.signal(process.everyone(), signal.SIGCONT)
                process.popen.kill()
                process.popen.wait()
                self.grown += process.grown()
        self.disk.unlink(missing_ok=True)
        self.clock.unlink(missing_ok=True)

    def _plague(self, process: Process, end: float) -> None:
        came, step, coming = time.monotonic(), -1, time.monotonic() + 20
        plagued = False  # whether the disk has been bad in this start
        while process.popen.poll() is None:
            time.sleep(1.0)
            process.look()
            now, last = time.monotonic(), max(losses(self.run), default=0)
            if last != step:
                came, step = now, last
            if now - came > self.hang:
                stacks = [f"{each.name()} {each.status()}" for each in process.everyone()]
                self.wrong.append(f"no step after {step} for {self.hang:g} s: {'; '.join(stacks)}")
                return
            if now > end:
                self._stop(process, plagued)
                return
            if now > coming and step > 0:
                plagued |= self._do(process)
                coming = time.monotonic() + self.chance.uniform(5, 20)
                came = time.monotonic()
        code = process.popen.returncode
        self.did[f"ended with {code}"] = self.did.get(f"ended with {code}", 0) + 1
        if not plagued or code not in (1, 2):
            self.wrong.append(f"the command ended with {code} after step {step}: {self._tail()}")

    def _stop(self, process: Process, plagued: bool) -> None:
        self.disk.unlink(missing_ok=True)
        process.popen.terminate()
        try:
            code = process.popen.wait(self.hang)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"SIGTERM did not end it in {self.hang:g} s")
            return
        if code != STOPPED and not (plagued and code == 1):  # a save that had failed is told at the end
            self.wrong.append(f"after SIGTERM it ended with {code}: {self._tail()}")

    def _do(self, process: Process) -> bool:
        """One fault; whether it is one of the disk, after which the command may end with an error."""
        what = self.chance.choice(("kill", "kill", "kill two", "stop", "suspend", "clock", "disk"))
        ranks = process.ranks()
        self.chance.shuffle(ranks)
        if what == "disk":
            what = f"disk {self.chance.choice(DISKS)}"
            self.disk.write_text(what.split()[1])
            time.sleep(self.chance.uniform(5, 20))
            self.disk.unlink()
        elif what == "clock":
            self.clock.write_text(f"{self.chance.choice(CLOCKS)}")
        elif what == "suspend":
            everyone = process.everyone()
            process.signal(everyone, signal.SIGSTOP)
            time.sleep(self.chance.uniform(1, 2 * STALL_S))
            process.signal(everyone, signal.SIGCONT)
        elif what == "stop":
            process.signal(ranks[:1], signal.SIGSTOP)
        else:
            process.signal(ranks[: 2 if "two" in what else 1], signal.SIGKILL)
        self.did[what] = self.did.get(what, 0) + 1
        return "disk" in what

    def _tail(self) -> str:
        return " / ".join((self.home / "said.txt").read_text().splitlines()[-4:])[-600:]


def command(home: Path, run: Path, layout: str, more: dict[str, Any]) -> list[str]:
    """What runs this layout in a folder."""
    file = run.with_suffix(".yaml")
    data = {"sources": [{"path": str(home / "text" / "tokens")}], "length": 24}
    file.write_text(json.dumps({"run": str(run), "layout": layout, "data": data, **CONFIG, **more}))
    return [sys.executable, "-m", "benchmarks.soak", "--train", str(home / "disk"), str(file)]


def undisturbed(home: Path, layout: str, step: int) -> dict[int, float]:
    """The losses of the run that nothing happens to, up to a step at least."""
    folder = home / "whole"
    if max(losses(folder), default=0) < step:
        words = [*command(home, folder, layout, {}), "--until", str(step)]
        with (home / "whole.txt").open("a") as out:
            code = subprocess.run(words, check=False, stdout=out, stderr=out).returncode
        assert code == STOPPED, f"the undisturbed run ended with {code}: see {home / 'whole.txt'}"
    return losses(folder)


def compared(found: dict[int, float], expected: dict[int, float], same_to: int) -> list[str]:
    """What is wrong with the losses. same_to: up to this step they must be equal to the bit."""
    wrong = [f"step {step} is missing" for step in range(1, max(found, default=0) + 1) if step not in found]
    for step, loss in found.items():
        limit = 0.0 if step <= same_to else 1e-7 * abs(expected[step])
        if abs(loss - expected[step]) > limit:
            wrong.append(f"step {step}: loss {loss!r}, undisturbed {expected[step]!r}")
    return wrong


def main(given: list[str] | None = None) -> int:
    """A segment of the soak; 0: nothing is wrong."""
    words = sys.argv[1:] if given is None else given
    if words[:1] == ["--train"]:
        from benchmarks.soak import train as of_module  # not of __main__, which ranks do not have under this name

        return of_module(words[2:], Path(words[1]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="a folder for it, which the next segment resumes from")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang", type=float, default=240.0, help="seconds without a step that are a finding")
    parser.add_argument(
        "--layouts", nargs="+", default=list(LAYOUTS), help="of eight ranks, one for each segment in turn"
    )
    options = parser.parse_args(words)
    home = options.work.resolve()
    home.mkdir(parents=True, exist_ok=True)
    text = home / "text"
    if not (text / "tokens").exists():
        text.mkdir(exist_ok=True)
        for number in range(24):
            (text / f"{number}.txt").write_text(" ".join(f"{number} of {i * i}" for i in range(200 + 9 * number)))
        build(text / "tokens", sorted(text.glob("*.txt")), validation=0.3)
    file = home / "found.json"
    before = json.loads(file.read_text()) if file.exists() else []
    layout = options.layouts[len(before) % len(options.layouts)]
    kept = [int(place.name.removeprefix("step-")) for place in (home / "run" / "checkpoints").glob("step-*")]
    segment = Segment(home, layout, random.Random(f"{options.seed} {len(before)}"), options.hang)
    segment.go(60 * options.minutes)
    found = losses(segment.run)
    begins = min(kept, default=0)  # at the latest: the newest checkpoints may be damaged
    courses = [(one["layout"], one["begins"]) for one in before] + [(layout, begins)]
    first = courses[0][0]
    same_to = next((start for course, start in courses if course != first), max(found, default=0))
    wrong = segment.wrong + compared(found, undisturbed(home, first, max(found, default=1)), same_to)
    events = [line["event"] for line in journal.read(segment.run / "metrics.jsonl") if "event" in line]
    said = {
        "layout": layout, "minutes": options.minutes, "begins": begins, "steps": max(found, default=0),
        "equal to the bit": same_to,
        "deaths survived so far": events.count("recovered"), "did": segment.did, "grown": segment.grown,
        "wrong": wrong[:20],
    }  # fmt: skip
    file.write_text(json.dumps([*before, said], indent=1) + "\n")
    print(json.dumps(said, indent=1), flush=True)
    return 1 if wrong or segment.grown else 0


if __name__ == "__main__":
    sys.exit(main())
