"""Two pipelines' steps on one page: what each rank did when, what it waited for, what its actions cost.

    python -m benchmarks.pipeline_timeline --pairs 1f1b zb             # beside torch's same schedule, 2 stages
    python -m benchmarks.pipeline_timeline --ranks 4 --draw timeline.svg

A pair takes turns of a step. The table has, of the fastest of these steps, for each rank: seconds by kind of action,
seconds of waiting, what lies before the first action and after the last one (splitting the batch, norm and optimizer),
and the processor's time of all threads and of the main one. "floor": the step if the same actions cost what they cost,
in the same order, and messages took no time. The longest waits are listed with the message that they waited for.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import quiet, seat
from benchmarks.pipeline_ours import PIPELINE
from benchmarks.pipeline_peers import PEERS
from benchmarks.race import schedule_of
from benchmarks.task import Sizes, batch
from isograd.launcher.launch import World
from isograd.pipeline.schedule import Schedule, Timed

LONGEST = 4
COLORS = {"F": "tab:blue", "B": "tab:orange", "I": "tab:orange", "W": "tab:green"}


def step(sizes: Sizes, number: int) -> dict[str, Any]:
    """A step of this rank's contestant between two barriers."""
    contestant = seat._held["contestant"]
    given = batch(sizes, number)
    seat.barrier()
    began, worked, main = time.perf_counter(), time.process_time(), time.thread_time()
    contestant.step(given)
    contestant.finish()
    ended = time.perf_counter()
    rows = sorted(contestant.timeline(), key=lambda timed: timed.start)
    found = {"began": began, "ended": ended, "row": list(rows)}
    return found | {"work": time.process_time() - worked, "main": time.thread_time() - main}


def waits(schedule: Schedule, rows: Sequence[Sequence[Timed]]) -> list[tuple[float, float, str]]:
    """(seconds waited, of which before the message was made, what for) before each action, longest first."""
    ends = {timed.action: timed.end for row in rows for timed in row}
    found = []
    for rank, row in enumerate(rows):
        for before, timed in pairwise(row):
            foreign = [need for need in schedule.needs(timed.action) if schedule.rank_of(need.stage) != rank]
            source = max(foreign, key=ends.__getitem__, default=None)
            unmade = max(0.0, ends[source] - before.end) if source else 0.0
            found.append((timed.start - before.end, unmade, f"rank {rank} before {timed.action} for {source}"))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [entry.name.removeprefix("isograd ") for entry in PIPELINE]
    parser.add_argument("--pairs", nargs="+", choices=names, default=names[:1], metavar="SCHEDULE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="an SVG of the last pair")
    parser.add_argument("--anyway", action="store_true", help="on a machine that other jobs use, too")
    chosen = parser.parse_args()
    if not chosen.anyway:
        quiet.refuse_noise()
    sizes = Sizes()
    ours = {entry.name.removeprefix("isograd "): entry for entry in PIPELINE}
    theirs = {entry.name: entry for entry in PEERS}
    for name in chosen.pairs:
        pair = [theirs[ours[name].peers[0]], ours[name]]
        with World(chosen.ranks) as one, World(chosen.ranks) as two:
            worlds = [one, two]
            for entry, world in zip(pair, worlds, strict=True):
                world.run(seat.sit, entry, sizes, 2, timeout=300)
            best: list[list[dict[str, Any]] | None] = [None, None]
            for number in range(chosen.steps):
                for place, world in enumerate(worlds):
                    found = world.run(step, sizes, number, timeout=300)
                    if best[place] is None or length(found) < length(best[place] or []):
                        best[place] = found
        shown = [(entry.name, found) for entry, found in zip(pair, best, strict=True) if found]
        show(shown)
    if chosen.draw:
        draw(shown, chosen.draw)


def length(found: Sequence[dict[str, Any]]) -> float:
    return max(rank["ended"] for rank in found) - min(rank["began"] for rank in found)


def show(pair: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
    table = Table("ms", "rank", "step", "F", "B or I", "W", "waits", "before", "after", "floor", "work", "main thread")
    for name, found in pair:
        rows = [rank["row"] for rank in found]
        schedule = schedule_of(rows)
        took = {timed.action: timed.end - timed.start for row in rows for timed in row}
        floor = max(row[-1].end for row in schedule.timed(took.__getitem__))
        for number, rank in enumerate(found):
            row, by = rank["row"], Counter[str]()
            for timed in row:
                by[timed.action.kind] += timed.end - timed.start  # type: ignore[assignment]
            gaps = row[-1].end - row[0].start - sum(by.values())
            seconds = (
                rank["ended"] - rank["began"], by["F"], by["B"] + by["I"], by["W"], gaps,
                row[0].start - rank["began"], rank["ended"] - row[-1].end, floor, rank["work"], rank["main"],
            )  # fmt: skip
            table.add_row(name, str(number), *(f"{1e3 * s:.0f}" for s in seconds))
    Console(width=130).print(table)
    for name, found in pair:
        rows = [rank["row"] for rank in found]
        for waited, unmade, what in waits(schedule_of(rows), rows)[:LONGEST]:
            print(f"  {name}: {1e3 * waited:.0f} ms, {1e3 * unmade:.0f} of them before it was made: {what}")


def draw(pair: Sequence[tuple[str, list[dict[str, Any]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "isograd", "font.family": "sans-serif"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(pair), 1, figsize=(9, 1.3 * len(pair) + 0.6), sharex=True, layout="constrained"
    )
    for panel, (name, found) in zip(panels, pair, strict=True):
        zero = min(rank["began"] for rank in found)
        for number, rank in enumerate(found):
            for (kind, _, micro), start, end in rank["row"]:
                panel.barh(number, end - start, left=start - zero, color=COLORS[kind], edgecolor="white", linewidth=0.5)
                panel.text((start + end) / 2 - zero, number, str(micro), ha="center", va="center", size=6)
        panel.set_yticks(range(len(found)), [f"rank {number}" for number in range(len(found))])
        panel.invert_yaxis()
        panel.set_title(name, fontsize=9)
    panels[-1].set_xlabel("seconds; blue: forward, orange: backward, or its input's part, green: weights' part")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
