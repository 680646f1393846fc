"""Faults planted in runs that survive them (or say why not): notes/faults.md is written from what happened.

    python -m tests.faults                 every case that notes/faults.json has no row of, one after the other
    python -m tests.faults --only zero3    those whose name has this word, once more
    python -m tests.faults --list          what there is, and what has been run

Stop it at any time; the next start does the rest. A run has five steps, and the fault comes in the fourth. Its row says
how soon the launcher saw it, what it named, how the run ended, how many finished steps had to be done again, and
whether all losses are those of the run that nothing happened to. After a case that ends the run, the same command is
given once more, and the losses compared are those of both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import product
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from isograd.core.layout import Layout
from isograd.elastic import Attempt, WorkerPool
from isograd.errors import IsogradError
from isograd.train import journal
from isograd.train.config import Config
from isograd.train.loop import RunOptions
from isograd.train.reading import written
from isograd.train.run.start import says_how_to_resume
from isograd.train.run.survive import survive
from isograd.train.run.watchdog import STALLED, ended_in_stall, silent_ranks
from tests.planted import IN_A_STEP, MEETING_AGAIN, RESCUING, SAVING, SAVING_FIRST, Fault, Faults
from tests.train.test_loop import close, config_of, losses

NOTES = Path(__file__).parents[1] / "notes"
AT, STEPS = 3, 5
SMALL = "300k"  # of a file system that holds a journal, and no checkpoint
EXPERTS = {"number": 4, "per_token": 2, "width": 16}
LAYOUTS = (
    "dp2 zero1", "dp2", "dp2 zero2", "dp2 zero3", "tp2 sp zero1", "pp2 zero1", "cp2 ulysses zero1", "dp2 ep2 zero1",
    "dp2 tp2 sp zero1",
)  # fmt: skip
PLACES = ("first", "last", "middle")
SELDOM = (*SAVING[1:], *SAVING_FIRST[:2], "joining")  # under two layouts: what happens there depends on no layout


@dataclass(frozen=True)
class Case:
    """One run, and what is done to it."""

    name: str
    layout: str
    faults: tuple[Fault, ...]
    config: dict[str, Any] = field(default_factory=dict, compare=False)
    around: str = ""  # what is done to the run from outside: a key of AROUND


@dataclass
class Row:
    """What happened."""

    name: str
    layout: str
    seen_s: float | None = None  # from the first fault to the launcher
    named: str = ""
    code: int = 0
    ended: str = ""  # the error that ended the run, if one did
    lost: int | None = None  # finished steps that were done again
    recovered_s: float | None = None  # from the fault to the end of the first step after it
    equal: str = "DIFFERENT"
    commit: str = ""


def settings(copies: str = "partner", after: str = "replace", **more: Any) -> dict[str, Any]:
    """A case's changes of the config."""
    return {
        "resilience": {"after_death": after, "copies": copies, "wait_s": 10.0},
        "checkpoint": {"every": None},
        **more,
    }


def killed(layout: str, point: str, rank: int, copies: str = "partner") -> Case:
    """A case of one SIGKILL; of two where the second is of a rank that has survived the first."""
    config, at = settings(copies, checkpoint={"every": 2 if copies == "none" else None}), AT
    if point.startswith("saving"):
        config, at = settings(copies, checkpoint={"every": AT + 1}), AT + 1
    if point == "evaluation":
        config, at = settings(copies, evaluate={"every": AT + 1, "batches": 1}), AT + 1
    faults = (Fault(point, at, rank),)
    if point in (*MEETING_AGAIN, RESCUING):
        faults = (Fault("forward", at, (rank + 1) % Layout.parse(layout).world_size), Fault(point, at, rank))
    return Case(f"kill in {point}, rank {rank}, copies {copies}", layout, faults, config)


def deaths() -> Iterator[Case]:
    """Every point with every layout, and in turn every place of the rank: pairs, not the full product.

    Rank 0 of two gives a point's last row, if it is for rank 0 only.
    """
    every = (*IN_A_STEP, "reading", "evaluation", *SAVING, *SAVING_FIRST, *MEETING_AGAIN, RESCUING)
    for turn, layout in enumerate(LAYOUTS):
        last = Layout.parse(layout).world_size - 1
        ranks = {"first": 0, "last": last, "middle": last // 2 + last % 2 if last > 1 else last}
        points = [point for point in every if turn < 2 or point not in SELDOM]
        for number, point in enumerate(points):
            place = PLACES[(number + turn) % len(PLACES)] if last > 1 else PLACES[(number + turn) % 2]
            yield killed(layout, point, 0 if point in SAVING_FIRST else ranks[place])


def others() -> Iterator[Case]:
    """What is not one SIGKILL of one rank with copies."""
    for layout, rank in product(("dp2 zero1", "pp2 zero1", "dp2 ep2 zero1", "dp2 zero3"), (0, 1)):
        yield killed(layout, "backward", rank, "none")
    both = lambda a, b: (Fault("forward", AT, a), Fault("forward", AT, b))  # noqa: E731
    saves = {"checkpoint": {"every": 2}}
    yield Case("kill of two ranks, no partners", "dp2 tp2 sp zero1", both(1, 2), settings())
    yield Case("kill of two partners, checkpoint every 2", "dp2 tp2 sp zero1", both(0, 2), settings(**saves))
    yield Case("kill of all ranks, checkpoint every 2", "dp2 zero1", both(0, 1), settings(**saves))
    yield Case(
        "kill, then again in the next step", "dp2 zero1", (*both(0, 0)[:1], Fault("backward", AT + 1, 0)), settings()
    )
    four = "dp2 tp2 sp zero1"
    yield Case("kill, no replacement", four, (Fault("forward", AT, 3),), settings(after="shrink"))
    yield Case("kill of two, no replacement", four, both(1, 3), settings(after="shrink", **saves))
    yield Case(
        "kill, no replacement, no copies", "dp4 zero1", (Fault("backward", AT, 1),), settings("none", "shrink", **saves)
    )
    for name, layout, listed, died in (
        ("kill, the list's layout for one rank", "dp2 zero1", "dp1", (0,)),
        ("kill of three, no layout for the rest", "dp4 zero1", "dp2", (0, 1, 2)),
    ):
        shrinks = {"after_death": "shrink", "layouts": [listed], "copies": "partner"}
        kills = tuple(Fault("forward", AT, rank) for rank in died)
        yield Case(name, layout, kills, {**settings(**saves), "resilience": shrinks})
    grows = Fault("backward", AT, 0, "grow")
    yield Case(
        "kill, no replacement, then room again", "dp2 zero1", (Fault("forward", 1, 1), grows), settings(after="shrink")
    )
    four_times = tuple(Fault(point, AT, 0) for point in ("forward", "backward", "first bucket", "last bucket"))
    yield Case("kill at the same step, four times", "dp2 zero1", four_times, settings(**saves))
    for rank in (0, 1):
        yield Case(
            f"SIGSTOP, rank {rank}",
            "dp2 zero1",
            (Fault("forward", AT, rank, "stop"),),
            settings(safety={"stall_s": 4.0}, **saves),
        )
        yield Case(f"NaN, rank {rank}", "dp2 zero1", (Fault("forward", AT, rank, "nan"),), settings(**saves))
        yield Case(f"slow by 1.5 s, rank {rank}", "pp2 zero1", (Fault("forward", AT, rank, "slow"),), settings())
        yield Case(f"an exception, rank {rank}", "dp2 zero1", (Fault("forward", AT, rank, "raise"),), settings(**saves))
        yield Case(
            f"no memory: RLIMIT_AS, rank {rank}",
            "dp2 zero1",
            (Fault("forward", AT, rank, "memory"),),
            settings(**saves),
        )
        yield Case(
            f"files limited: RLIMIT_FSIZE, rank {rank}",
            "dp2 zero1",
            (Fault("forward", AT, rank, "files"),),
            settings(checkpoint={"every": AT + 1}),
        )
        yield Case(
            f"no memory: killed by a cgroup, rank {rank}",
            "dp2 zero1",
            (Fault("forward", AT, rank, "cgroup"),),
            settings(),
        )
        yield Case(
            f"files of the ranks' store removed, rank {rank}",
            "dp2 zero1",
            (Fault("forward", 1, rank, "no store"), Fault("forward", AT, rank)),
            settings(),
        )
    yield Case("disk full while saving", "dp2 zero1", (), settings(checkpoint={"every": 2}), "disk")
    yield Case("disk full when a rank dies", "dp2 zero1", (Fault("forward", AT, 1),), settings(), "disk")
    yield Case(
        "folder of checkpoints not writable", "dp2 zero1", (Fault("forward", 1, 0, "not writable"),), settings(**saves)
    )
    for moment in ("in a step", "saving", "while the ranks meet again"):
        yield Case(f"kill of the launcher, {moment}", "dp2 zero1", (), settings(**saves), "launcher")


class Watched(WorkerPool):
    """A pool that remembers its attempts."""

    def __init__(self, run: Config) -> None:
        super().__init__(
            wait_s=10.0, still_s=run.safety.stall_s, silent=partial(silent_ranks, run.folder, run.safety.stall_s)
        )
        self.attempts: list[Attempt] = []

    def attempt(self, size: int, fn: Callable[..., Any], *args: Any) -> Attempt:
        self.attempts.append(super().attempt(size, fn, *args))
        return self.attempts[-1]


def config(folder: Path, text: Path, layout: str, **changes: Any) -> Config:
    """A toy run."""
    options = {"vocab": 257, **({"experts": EXPERTS} if "ep2" in layout else {})}
    model = {"preset": "tiny-llama", "options": options, "dtype": "fp64"}
    return config_of(
        folder, text, **{"layout": layout, "steps": STEPS, "model": model, "checkpoint": {"every": None}, **changes}
    )


def undisturbed(folder: Path, text: Path, layout: str, **changes: Any) -> list[float]:
    """The losses of the run that nothing happens to."""
    with WorkerPool() as pool:
        assert survive(config(folder, text, layout, **changes), RunOptions(show="none", signals=()), pool).code == 0
    return losses(folder)


def one(case: Case, folder: Path, text: Path, expected: list[float]) -> Row:
    """Run a case. `folder`: an empty one."""
    row, marks = Row(case.name, case.layout), folder / "marks"
    marks.mkdir()
    run = config(folder / "run", text, case.layout, **case.config)
    if case.around == "launcher":
        return launcher(row, run, expected)
    if case.around == "disk":
        run.folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", run.folder], check=True)
    faults = Faults(case.faults, marks)
    with Watched(run) as pool:
        try:
            with says_how_to_resume(run):
                outcome = survive(run, RunOptions(show="none", signals=(), before_step=faults), pool)
            row.code, row.ended = outcome.code, outcome.why
        except IsogradError as error:
            row.code = STALLED if ended_in_stall(run.folder) else error.exit_code
            row.ended = _brief(error)
    _told(row, faults, pool, run)
    if (checkpoints := run.folder / "checkpoints").exists():
        subprocess.run(["chattr", "-i", checkpoints], check=False)
    if row.code and case.around == "disk":  # room is made
        subprocess.run(["mount", "-o", "remount,size=100m", run.folder], check=True)
    if row.code:
        with Watched(run) as pool:
            assert survive(run, RunOptions(show="none", signals=(), before_step=faults), pool).code == 0
    row.equal = same(losses(run.folder), expected)
    evaluated = [
        line["step"] for line in journal.read(run.folder / "metrics.jsonl") if line.get("event") == "evaluation"
    ]
    if evaluated != [*range(run.evaluate.every or STEPS, STEPS, run.evaluate.every or STEPS), STEPS]:
        row.equal = f"evaluated after steps {evaluated}"
    if case.around == "disk":
        subprocess.run(["umount", run.folder], check=True)
    return row


def launcher(row: Row, run: Config, expected: list[float]) -> Row:
    """Kill the launcher, wait for its ranks to end, and give its command again."""
    file, said = run.folder.parent / "run.yaml", run.folder.parent / "said.txt"
    file.write_text(written(run))
    command = [sys.executable, "-m", "isograd.cli.main", "train", str(file), "--log-format", "lines"]
    saves = "saving" in row.name
    with said.open("w") as out, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out) as process:
        while process.poll() is None and len(losses(run.folder)) < AT - saves:
            time.sleep(0.02)
        while saves and process.poll() is None and not any(run.folder.glob("checkpoints/.step-*4.partial-*")):
            pass
        ranks = _children(process.pid)
        if "meet" in row.name:
            os.kill(next(pid for pid in ranks if _called(pid) == "isograd r1"), signal.SIGKILL)
            time.sleep(0.3)
            ranks = _children(process.pid)
        process.kill()
        killed = time.monotonic()
    while any(_runs(pid) for pid in ranks):
        time.sleep(0.02)
    row.seen_s, row.code, row.named = (
        time.monotonic() - killed,
        process.returncode,
        f"{len(ranks)} processes, all ended",
    )
    before = len(losses(run.folder))
    told = said.read_text()
    row.ended = " ".join(told[max(0, told.find("IG260")) :].split()) or "nothing"
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    lines = list(journal.read(run.folder / "metrics.jsonl"))
    row.lost = before - max((line["step"] for line in lines if line.get("event") == "resumed"), default=0)
    row.equal = same(losses(run.folder), expected)
    return row


def _called(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    """Whether a process runs: one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    found = [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]
    return found + [below for each in found for below in _children(each)]


def _told(row: Row, faults: Faults, pool: Watched, run: Config) -> None:
    """What launcher and journal say."""
    dead = [attempt for attempt in pool.attempts if attempt.dead]
    lines = list(journal.read(run.folder / "metrics.jsonl"))
    if dead and (when := [faults.when(number) for number in faults.happened()]):
        row.seen_s = dead[-1].seen - max(each for each in when if each <= dead[-1].seen)
        row.named = "rank " + ", then ".join(" and ".join(map(str, each.dead)) for each in dead)
    if recovered := [number for number, line in enumerate(lines) if line.get("event") == "recovered"]:
        row.recovered_s = sum(lines[recovered[-1]]["parts"].values()) + (row.seen_s or 0.0)
        done = max(a.finished or 0 for a in pool.attempts if a.dead)
        resumed = [line["step"] for line in lines[: recovered[-1]] if line.get("event") == "resumed"]
        row.lost = done - (resumed[-1] if resumed else 0)
    row.named = row.named or next((line["text"] for line in lines if line.get("event") == "skipped"), "")


def _brief(error: IsogradError) -> str:
    cause = getattr(error, "cause", None) or error
    last = str(cause.what).strip().splitlines()
    words = " / ".join(dict.fromkeys((last[0], last[-1]))) if "Traceback" not in last[0] else " / ".join(last[-3:])
    text = " ".join(f"{cause.code}: {words}; fix: {cause.fix}".split())
    return re.sub(r"/\S*/run\b", "RUN", text)[:400]


def same(found: list[float], expected: list[float]) -> str:
    """How two runs' losses compare."""
    return "the same bits" if found == expected else "within 1e-9" if close(found, expected) else "DIFFERENT"


def tokens(folder: Path) -> Path:
    """A little text."""
    from isograd.data import build

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(f"{number} of {i * i}" for i in range(20 + 9 * number)))
    build(folder / "tokens", sorted(folder.glob("*.txt")), validation=0.3)
    return folder / "tokens"


def cases() -> list[Case]:
    """All of them, those first that differ most: a start that is stopped has seen some of everything."""
    found = [*deaths()]
    step = 7  # has no divisor in common with the number of points
    spread = [found[i] for start in range(step) for i in range(start, len(found), step)]
    unlike = list(others())
    mixed = [case for pair in zip(spread, unlike, strict=False) for case in pair]
    return mixed + spread[len(unlike) :] + unlike[len(spread) :]


def main() -> None:
    """Run what has no row yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", metavar="WORD", help="cases with this word in their name or layout, again")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rows", type=Path, default=NOTES / "faults.json")
    options = parser.parse_args()
    commit()
    rows = {(row["name"], row["layout"]): Row(**row) for row in _read(options.rows)}
    key = lambda case: (case.name, case.layout)  # noqa: E731
    wanted = [
        case
        for case in cases()
        if (options.only in f"{case.name} {case.layout}" if options.only else key(case) not in rows)
    ]
    if options.list:
        for case in cases():
            print("run " if key(case) in rows else "    ", case.layout, "|", case.name)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(
        ["isograd.launcher.worker", "tests.preloaded", "tests.planted", "matplotlib.figure"]
    )
    forkserver.ensure_running()
    expected: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as home:
        text = tokens(Path(home) / "text")
        for number, case in enumerate(wanted):
            if case.layout not in expected:
                expected[case.layout] = undisturbed(Path(home) / f"whole-{number}", text, case.layout)
            folder = Path(home) / f"case-{number}"
            folder.mkdir()
            began = time.monotonic()
            try:
                row = one(case, folder, text, expected[case.layout])
            except Exception:
                print(f"NO ROW: {case}\n{traceback.format_exc()}", flush=True)
                continue
            row.commit = commit()
            rows[key(case)] = row
            print(f"{number + 1}/{len(wanted)} in {time.monotonic() - began:.0f} s: {row}", flush=True)
            options.rows.write_text(json.dumps([asdict(each) for each in rows.values()], indent=1) + "\n")
            if options.rows == NOTES / "faults.json":
                tell(list(rows.values()))


def _read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else []


@cache
def commit() -> str:
    """Of the code as this process began."""
    git = lambda *words: subprocess.run(["git", *words], cwd=NOTES, capture_output=True, text=True, check=True).stdout  # noqa: E731
    return git("rev-parse", "--short", "HEAD").strip() + ("+" if git("status", "--porcelain", "../src") else "")


MARK = "<!-- the tables below are written by python -m tests.faults -->\n"


def tell(rows: list[Row]) -> None:
    """Write notes/faults.md below its mark."""
    page = NOTES / "faults.md"
    before = page.read_text().partition(MARK)[0]
    survived, ended = [row for row in rows if not row.ended], [row for row in rows if row.ended]
    known = {(row.name, row.layout) for row in rows}
    left = [f"{case.name} (`{case.layout}`)" for case in cases() if (case.name, case.layout) not in known]
    commits = ", ".join(sorted({row.commit for row in rows}))
    text = f"\n{len(rows)} of {len(rows) + len(left)} cases were run, on commit {commits}"
    names = "; ".join(left) or "none" if len(left) < 20 else f"{len(left)}, which `python -m tests.faults --list` names"
    text += f" (+: with changes). Not run: {names}.\n"
    text += "\n| fault | layout | seen after | named | steps lost | next step after | losses |\n"
    text += f"|{'---|' * 7}\n"
    text += "".join(
        f"| {row.name} | `{row.layout}` | {_s(row.seen_s, 2)} | {row.named or '-'} | "
        f"{'-' if row.lost is None else row.lost} | {_s(row.recovered_s, 1)} | {row.equal} |\n"
        for row in sorted(survived, key=lambda row: (row.name, row.layout))
    )
    text += "\n| fault that ends the run | layout | exit code | what it says | losses of both runs |\n"
    text += f"|{'---|' * 5}\n"
    text += "".join(
        f"| {row.name} | `{row.layout}` | {row.code} | {row.ended.replace('|', '/')} | {row.equal} |\n"
        for row in sorted(ended, key=lambda row: (row.name, row.layout))
    )
    page.write_text(before + MARK + text)


def _s(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{seconds:.{digits}f} s"


if __name__ == "__main__":
    main()
