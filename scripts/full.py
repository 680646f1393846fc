"""Runs every test, also the slow ones, in pieces: `make full`. Those that have not run for longest come first.

    python scripts/full.py               40 minutes of it; again, until it says that no piece is left
    python scripts/full.py --minutes 15
    python scripts/full.py --stale       what `make lint` says of it

A piece is a folder of tests, or "peers": what `make test-peers` has an environment for. notes/full.md and
notes/full.json have for each piece the commit that it ran at, the day, the processor, and its numbers: a piece that ran
within the last 200 commits counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

STATE, PAGE = Path("notes/full.json"), Path("notes/full.md")
KEEPS = 200  # commits for which a piece counts
TREES = ("tests", "verify/tests")
PEERS, MARK = ".venv-peers/bin/python", "mark." + "peers"


def pieces() -> dict[str, list[str]]:
    """{folder: its own test files}, of all folders of tests; {"peers": the files that have tests of peers}."""
    found: dict[str, list[str]] = {}
    for tree in TREES:
        for file in sorted(Path(tree).rglob("test_*.py")):
            found.setdefault(str(file.parent), []).append(str(file))
    peers = [file for files in found.values() for file in files if MARK in Path(file).read_text()]
    return found | ({"peers": peers} if peers else {})


def run(name: str, files: list[str]) -> dict[str, Any]:
    """One pytest of these files: how many passed, failed and were skipped, in how many seconds, and which failed."""
    python = [PEERS, "-m", "pytest", "-m", "peers"] if name == "peers" else [sys.executable, "-m", "pytest"]
    if workers := os.environ.get("WORKERS"):
        python += ["-n", workers, "--dist", "loadfile"]
    with TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = [*python, "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        code = subprocess.run(command, check=False, env=os.environ | {"RANKS": "gloo"}).returncode
        seconds = round(time.monotonic() - began)
        if code not in (0, 1, 5) or not report.exists():  # tests failed: 1; there is none: 5
            return {
                "passed": 0,
                "failed": 1,
                "skipped": 0,
                "seconds": seconds,
                "failures": [f"pytest ended with {code}"],
            }
        cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [f"{c.get('classname')}::{c.get('name')}" for c in cases if any(e.tag in ("failure", "error") for e in c)]
    skipped = sum(any(e.tag == "skipped" for e in case) for case in cases)
    passed = len(cases) - len(bad) - skipped
    return {"passed": passed, "failed": len(bad), "skipped": skipped, "seconds": seconds, "failures": bad}


def processor() -> str:
    """As /proc/cpuinfo calls the first one, which may say no more than whose it is: with its family and model."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    says = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    if "cpu family" not in says:
        return says.get("model name", platform.machine())
    return f"{says['model name']}, family {says['cpu family']}, model {says['model']}"


def page(done: dict[str, dict[str, Any]]) -> str:
    """What notes/full.md says."""
    total = {key: sum(one[key] for one in done.values()) for key in ("passed", "failed", "skipped", "seconds")}
    lines = [
        "# Every test",
        "",
        f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped in {total['seconds'] // 60} "
        "minutes (`make full`), each piece at the commit that stands beside it.",
        "",
        "| folder | passed | failed | skipped | seconds | commit | day | processor |",
        "|---|---:|---:|---:|---:|---|---|---|",
    ]
    for at, n in sorted(done.items()):
        numbers = f"{n['passed']} | {n['failed']} | {n['skipped']} | {n['seconds']}"
        lines.append(f"| {at} | {numbers} | {n['commit'][:8]} | {n['day']} | {n['processor']} |")
    lines += [f"\nfailed: `{name}`" for one in done.values() for name in one["failures"]]
    return "\n".join(lines) + "\n"


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def left() -> dict[str, list[str]]:
    """{folder: its own test files}, of the pieces that have not run at this commit, the oldest first."""
    done, every = state(), pieces()
    old = {name: age(done[name]["commit"]) if name in done else math.inf for name in every}
    return {name: every[name] for name in sorted(every, key=lambda name: -old[name]) if old[name]}


def state() -> dict[str, dict[str, Any]]:
    """What is known of each piece."""
    found: dict[str, dict[str, Any]] = json.loads(STATE.read_text()) if STATE.exists() else {}
    return found


def age(commit: str) -> float:
    """How many commits ago this one was."""
    try:
        return int(git("rev-list", "--count", f"{commit}..HEAD"))
    except subprocess.CalledProcessError:  # it is in no history that this clone has
        return math.inf


def stale() -> list[str]:
    """The pieces that have not run within so many commits."""
    done = state()
    return [name for name in pieces() if name not in done or age(done[name]["commit"]) > KEEPS]


def told(old: list[str]) -> str:
    """A sentence, or nothing."""
    count = len(pieces())
    return f"make full: {len(old)} of {count} folders of tests have not run within {KEEPS} commits\n" if old else ""


def main() -> int:
    """0: all pieces have run, and nothing failed; 1: something failed; 3: there is more to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="no piece begins after this long")
    parser.add_argument("--stale", action="store_true", help="say how many pieces should run again, and run none")
    options = parser.parse_args()
    limit = time.monotonic() + 60 * options.minutes
    if options.stale:
        print(told(stale()), end="")
        return 0
    changed = [line for line in git("status", "--porcelain").splitlines() if "notes/full." not in line]
    if changed:
        print("commit first, a result belongs to a commit:", *changed, sep="\n", file=sys.stderr)
        return 2
    commit, todo = git("rev-parse", "HEAD"), left()
    if "peers" in todo and not Path(PEERS).exists():
        print(f"no {PEERS}: `make full` makes it", file=sys.stderr)
        return 2
    STATE.parent.mkdir(exist_ok=True)
    for number, (name, files) in enumerate(todo.items(), 1):
        if number > 1 and time.monotonic() > limit:
            break
        print(f"[{number} of {len(todo)}] {name}", flush=True)
        found = {"commit": commit, "day": str(date.today()), "processor": processor()} | run(name, files)
        done = {at: one for at, one in state().items() if at in pieces()} | {name: found}
        written = STATE.with_suffix(".new")
        written.write_text(json.dumps(done, indent=1, sort_keys=True) + "\n")
        written.replace(STATE)
        PAGE.write_text(page(done))
    failed, old = [name for one in state().values() for name in one["failures"]], stale()
    print(f"{PAGE} is written; {len(failed)} failed", *failed, sep="\n")
    print(told(old), end="")
    return 1 if failed else 3 if old else 0


if __name__ == "__main__":
    sys.exit(main())
