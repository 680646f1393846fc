"""What deaths cost a run: one that survives them beside one that is started again from its last checkpoint.

    python -m benchmarks.goodput --work FOLDER              the quickstart, 60 steps, one of four ranks killed six times
    python -m benchmarks.goodput --work FOLDER --draw docs/goodput.svg

Three runs, one after the other: nobody dies; `resilience`; and without it the same command again, at once, whenever a
death has ended it. Both lose the same ranks after the same steps, by `kill -9` from outside. All three save every ten
steps. Goodput is the time of the undisturbed run over that of the other: what part of the time was progress.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from isograd.train import journal

CONFIG = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
WAYS = {
    "undisturbed": [],
    "survives": ["--resilience.after_death", "replace", "--resilience.copies", "partner"],
    "starts again": [],
}
RANKS = 4


@dataclass
class Course:
    """One run: how far it had come at which second."""

    way: str
    seconds: float = 0.0
    starts: int = 0
    deaths: list[tuple[float, int, int]] = field(default_factory=list)  # (second, step, rank)
    steps: list[tuple[float, int]] = field(default_factory=list)


def course(way: str, folder: Path, steps: int, every: int, deaths: list[tuple[int, int]]) -> Course:
    """Run it to its end. deaths: (after which step, which rank)."""
    found, began, coming = Course(way), time.monotonic(), list(deaths)
    words = [sys.executable, "-m", "isograd", "train", str(CONFIG), "--run", str(folder), "--steps", str(steps),
             "--checkpoint.every", str(every), "--log.every", "1", "--log.sample", "0", *WAYS[way]]  # fmt: skip
    code: int | None = -1
    while code != 0:
        found.starts += 1
        killed, out = False, folder.with_name(f"{folder.name}-{found.starts}.txt")
        with out.open("w") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
            while (code := process.poll()) is None:
                now, step = time.monotonic() - began, _step(folder)
                if not found.steps or found.steps[-1][1] != step:
                    found.steps.append((now, step))
                if coming and step >= coming[0][0] and (pid := _pid(process.pid, coming[0][1])) is not None:
                    os.kill(pid, signal.SIGKILL)
                    found.deaths.append((now, step, coming.pop(0)[1]))
                    killed = True
                time.sleep(0.05)
        if code and (not killed or way != "starts again"):
            raise SystemExit(f"start {found.starts} of {way!r} ended with {code}:\n{out.read_text()}")
    found.seconds = time.monotonic() - began
    return found


def _step(folder: Path) -> int:
    return max((step for step, _ in journal.curve(folder / "metrics.jsonl").training), default=0)


def _pid(launcher: int, rank: int) -> int | None:
    """Ranks have names (launcher/worker.py)."""
    for process in psutil.Process(launcher).children(recursive=True):
        if process.is_running() and process.name() == f"isograd r{rank}":
            return int(process.pid)
    return None


def draw(courses: list[Course], to: Path) -> None:
    """Steps over seconds."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes: Any = figure.subplots()
    for one, color in zip(courses, ("#59636e", "#1f77b4", "#d62728"), strict=True):
        times, steps = zip(*one.steps, strict=True)
        goodput = courses[0].seconds / one.seconds
        label = one.way if one is courses[0] else f"{one.way}: {goodput:.0%} of the time is progress"
        axes.plot([*times, one.seconds], [*steps, steps[-1]], color=color, drawstyle="steps-post", label=label)
        axes.plot([t for t, _, _ in one.deaths], [s for _, s, _ in one.deaths], "x", color=color)
    axes.set(xlabel="seconds", ylabel="finished step", title="the quickstart, four ranks; x: kill -9 of one of them")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(to, format="svg", metadata={"Date": None})


def main() -> None:
    """The three runs, their numbers, and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--deaths", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    chance = random.Random(options.seed)
    after = sorted(chance.sample(range(2, options.steps - 1), options.deaths))
    deaths = [(step, chance.randrange(RANKS)) for step in after]
    courses = []
    for way in WAYS:
        folder = options.work / way.replace(" ", "-")
        courses.append(course(way, folder, options.steps, options.every, deaths if way != "undisturbed" else []))
        one = courses[-1]
        same = _losses(folder) == _losses(options.work / "undisturbed")
        print(f"{way}: {one.seconds:.0f} s, {len(one.deaths)} deaths, {one.starts} starts, goodput "
              f"{courses[0].seconds / one.seconds:.0%}, losses {'the same bits' if same else 'DIFFERENT'}, "
              f"load {os.getloadavg()[0]:.0f}", flush=True)  # fmt: skip
        (options.work / "courses.json").write_text(json.dumps([asdict(each) for each in courses], indent=1))
    if options.draw is not None:
        draw(courses, options.draw)


def _losses(folder: Path) -> list[Any]:
    lines = journal.read(folder / "metrics.jsonl")
    return [line["loss"] for line in lines if "event" not in line]


if __name__ == "__main__":
    main()
