"""Runs every test, also the slow ones, in pieces: `make full`. Each call goes on where the last one has stopped.

    python scripts/full.py               40 minutes of it; again, until it says that all is done
    python scripts/full.py --minutes 15

A piece is a folder of tests. What has run at this commit is in runs/full.json; when all pieces have, notes/full.md is
written: the commit, the day, the processor, and each piece with its numbers. A change of the commit begins anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

STATE, PAGE = Path("runs/full.json"), Path("notes/full.md")
TREES = ("tests", "verify/tests")


def pieces() -> dict[str, list[str]]:
    """{folder: its own test files}, of all folders of tests."""
    found: dict[str, list[str]] = {}
    for tree in TREES:
        for file in sorted(Path(tree).rglob("test_*.py")):
            found.setdefault(str(file.parent), []).append(str(file))
    return found


def run(files: list[str]) -> dict[str, Any]:
    """One pytest of these files: how many passed, failed and were skipped, in how many seconds, and which failed."""
    with TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        code = subprocess.run(command, check=False).returncode
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
    """As /proc/cpuinfo calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def page(commit: str, done: dict[str, dict[str, Any]]) -> str:
    """What notes/full.md says."""
    total = {key: sum(one[key] for one in done.values()) for key in ("passed", "failed", "skipped", "seconds")}
    lines = [
        "# Every test",
        "",
        f"commit: {commit}",
        "",
        f"{date.today()}, {processor()}: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"
        f" in {total['seconds'] // 60} minutes (`make full`).",
        "",
        "| folder | passed | failed | skipped | seconds |",
        "|---|---:|---:|---:|---:|",
        *(f"| {at} | {n['passed']} | {n['failed']} | {n['skipped']} | {n['seconds']} |" for at, n in done.items()),
        *(f"\nfailed: `{name}`" for one in done.values() for name in one["failures"]),
    ]
    return "\n".join(lines) + "\n"


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """0: all pieces have run, and nothing failed; 1: something failed; 3: there is more to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="no piece begins after this long")
    limit = time.monotonic() + 60 * parser.parse_args().minutes
    if changed := git("status", "--porcelain"):
        print(f"commit first, the result belongs to a commit:\n{changed}", file=sys.stderr)
        return 2
    commit, every = git("rev-parse", "HEAD"), pieces()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    done = state["done"] if state.get("commit") == commit else {}
    STATE.parent.mkdir(exist_ok=True)
    left = [name for name in every if name not in done]
    for number, name in enumerate(left):
        if number and time.monotonic() > limit:
            print(f"{len(left) - number} of {len(every)} pieces are left: run this again")
            return 3
        print(f"[{len(done) + 1} of {len(every)}] {name}", flush=True)
        done[name] = run(every[name])
        written = STATE.with_suffix(".new")
        written.write_text(json.dumps({"commit": commit, "done": done}, indent=1))
        written.replace(STATE)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(commit, done))
    failed = [name for one in done.values() for name in one["failures"]]
    print(f"{PAGE} is written; {len(failed)} failed", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
