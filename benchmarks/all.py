"""Every race, one after the other: one JSON, one table, one picture of isograd's time beside that of its peers.

    python -m benchmarks.all                     # make bench: under an hour on two quiet cores
    python -m benchmarks.all --quick             # make bench-quick: about five minutes, wider ranges
    python -m benchmarks.all --draw FILE.json    # the table and the picture of a run that is over

Each contestant of isograd stands beside the peer that does the same. A ratio is taken between turns of the same round;
the picture shows its median and, as a line, the smallest and the largest. benchmarks.diff compares two such files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import quiet, report

RACES = {  # what is raced -> how it is called
    "data_parallel-2-batch2": ["data_parallel", "--batch", "2"],
    "data_parallel-2": ["data_parallel"],
    "tensor_parallel-2": ["tensor_parallel"],
    "sequence_1024-2": ["sequence", "--lengths", "1024", "--rounds", "5"],
    "pipeline-2": ["pipeline"],
    "experts_even-2": ["experts", "--loads", "even"],
}
QUICK = {
    "data_parallel-2-batch2": ["--only", "one process", "DDP", "FSDP2 *", "zero*"],
    "tensor_parallel-2": ["--only", "one process", "DTensor *", "tp*"],
    "sequence_1024-2": [],
    "pipeline-2": ["--only", "one process", "torch 1F1B", "1f1b", "torch zero-bubble", "zb"],
    "experts_even-2": ["--only", "one process", "* fsdp ep", "dp ep zero1"],
}
WORDS = {"data_parallel-2": "8 x 256 tokens", "data_parallel-2-batch2": "2 x 256 tokens"}
PICTURE = Path("docs/race.svg")


@dataclass(frozen=True)
class Line:
    """A contestant of isograd beside its peer."""

    race: str
    name: str
    peer: str
    rounds: list[float]  # time by the peer's
    work: float  # CPU time by the peer's
    wire: float | None  # bytes by the least that have to be sent
    memory: float  # peak by the peer's

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer contestants, two rounds of one step")
    parser.add_argument("--anyway", action="store_true", help="race on a machine that other jobs use, too")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this file instead of racing")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"where the picture goes (default {PICTURE})")
    chosen = parser.parse_args()
    if chosen.draw:
        document = json.loads(chosen.draw.read_text())
    else:
        if not chosen.anyway:
            quiet.refuse_noise()
        document = run(chosen.quick, chosen.anyway)
        path = report.OUT / ("quick.json" if chosen.quick else "all.json")
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {path.relative_to(report.OUT.parent.parent)}")
    show(document)
    draw(document, chosen.picture)
    print(f"written: {chosen.picture}")


def run(quick: bool, anyway: bool) -> dict[str, Any]:
    """Race after race, each in a process of its own. One that fails is named, and the others are run."""
    races, began = {}, time.perf_counter()
    for stem, command in RACES.items():
        if quick and stem not in QUICK:
            continue
        module, *options = command
        if quick:
            options += ["--rounds", "2", "--steps", "1", "--no-errors", *QUICK[stem]]
        options += ["--anyway"] * anyway
        path = report.OUT / f"{stem}.json"
        path.unlink(missing_ok=True)
        ended = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *options], check=False).returncode
        if ended or not path.exists():
            print(f"benchmarks.{module} {' '.join(options)} ended with {ended}: left out", flush=True)
            continue
        races[stem] = json.loads(path.read_text())
    minutes = (time.perf_counter() - began) / 60
    return {"commit": commit(), "machine": report.machine(), "quick": quick, "minutes": minutes, "races": races}


def commit() -> str:
    """With a + where files differ from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def lines(document: Mapping[str, Any]) -> Iterator[Line]:
    for race, found in document["races"].items():
        for r in found["rows"]:
            if r["of_peer_rounds"]:
                wire = r["wire_bytes"] / r["bound_bytes"] if r["bound_bytes"] else None
                yield Line(race, r["name"], r["peer"], r["of_peer_rounds"], r["cpu_of_peer"], wire, r["peak_of_peer"])


def words(race: str) -> str:
    return WORDS.get(race, race.rpartition("-")[0].replace("_", " "))


def show(document: Mapping[str, Any]) -> None:
    table = Table(title=title(document))
    for number, heading in enumerate(
        ("race", "isograd", "beside", "time", "from", "to", "work", "wire/bound", "peak memory")
    ):
        table.add_column(heading, justify="left" if number < 3 else "right", no_wrap=True)
    for line in lines(document):
        numbers = (line.median, min(line.rounds), max(line.rounds), line.work, line.wire, line.memory)
        cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
        table.add_row(words(line.race), line.name.removeprefix("isograd "), line.peer, *cells)
    Console(width=max(150, Console().width)).print(table)


def title(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    where = f"2 ranks on {machine['processor']}, torch {machine['torch']}"
    return f"isograd's time by its peer's, {where}, {document['commit']}"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """As SVG: the same bytes from the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "isograd", "font.family": "sans-serif"})
    from matplotlib import pyplot

    found = list(lines(document))
    figure, panel = pyplot.subplots(figsize=(8.5, 0.3 * len(found) + 1.4), layout="constrained")
    for place, line in enumerate(found):
        color = "tab:green" if line.median < 1 else "tab:red"
        panel.plot([min(line.rounds), max(line.rounds)], [place, place], color=color, linewidth=2)
        panel.plot(line.median, place, "o", color=color)
        panel.annotate(
            f"{line.median:.2f}", (line.median, place), (0, 5), textcoords="offset points", ha="center", size=8
        )
    panel.axvline(1.0, color="grey", linewidth=1)
    names = [f"{words(line.race)}: {line.name.removeprefix('isograd ')} beside {line.peer}" for line in found]
    panel.set_yticks(range(len(found)), names)
    panel.set_ylim(len(found) - 0.4, -0.8)
    panel.set_xlabel("step time by the peer's: left of 1 isograd is faster (median; line: all rounds)")
    panel.set_title(title(document), fontsize=8)
    panel.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
