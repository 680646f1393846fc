"""Every race, one after the other: one JSON, one table, one picture of isograd's time beside that of its peers.

    python -m benchmarks.all                     # make bench: under an hour on two quiet cores
    python -m benchmarks.all --quick             # make bench-quick: about five minutes, wider ranges
    python -m benchmarks.all --goes-on           # races that the file has of this commit are not run again
    python -m benchmarks.all --draw FILE.json    # the table and the picture of a run that is over

Each contestant of isograd stands beside the fastest of the peers that do the same. A ratio is taken between turns of
the same round; the picture shows its median and, as a line, the smallest and the largest. benchmarks.diff compares two
such files. The picture in README.md is docs/race.svg, its numbers are benchmarks/results/race.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
    "pipeline-4": ["pipeline", "--ranks", "4"],
    "experts_even-2": ["experts", "--loads", "even"],
    "one_device-1-batch2": ["one_device", "--batch", "2"],
    "one_device-1": ["one_device"],
    "contrastive": ["contrastive"],
}
QUICK = {  # those of every parallelism, and the peers that were fastest in the whole run
    "data_parallel-2-batch2": [
        "--only", "one process", "DDP", "ZeroRedundancyOptimizer", "FSDP2 reshard", "zero0", "zero1", "zero2", "zero3",
    ],
    "tensor_parallel-2": ["--only", "one process", "DTensor TP + SP", "tp sp"],
    "sequence_1024-2": [],
    "pipeline-2": ["--only", "one process", "torch 1F1B", "1f1b", "torch zero-bubble", "zb"],
    "experts_even-2": ["--only", "one process", "* fsdp ep", "dp ep zero1"],
    "one_device-1-batch2": ["--only", "one process", "transformers*", "isograd"],
}  # fmt: skip
TURNS = ["--rounds", "2", "--steps", "1", "--settle", "2", "--no-errors"]  # of a quick race
WORDS = {
    "data_parallel-2": "8 x 256 tokens",
    "data_parallel-2-batch2": "2 x 256 tokens",
    "sequence_1024-2": "1,024 tokens",
    "pipeline-2": "pipeline, 2 stages",
    "pipeline-4": "pipeline, 4 stages",
    "experts_even-2": "experts",
    "one_device-1": "one device, 8 x 256 tokens",
    "one_device-1-batch2": "one device, 2 x 256 tokens",
    "contrastive": "contrastive, 512 rows",
}
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
    parser.add_argument("--races", nargs="+", choices=RACES, metavar="RACE", help=f"some of {', '.join(RACES)}")
    parser.add_argument("--goes-on", action="store_true", help="keep the races that the JSON has of this commit")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this file instead of racing")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=f"where the picture goes (default {PICTURE})")
    chosen = parser.parse_args()
    if chosen.draw:
        document = json.loads(chosen.draw.read_text())
    else:
        if not chosen.anyway:
            quiet.refuse_noise()
        path = report.OUT / ("quick.json" if chosen.quick else "all.json")
        document = run(path, chosen.quick, chosen.anyway, chosen.races or list(RACES), chosen.goes_on)
        print(f"written: {path.relative_to(report.OUT.parent.parent)} after {document['minutes']:.1f} minutes")
    show(document)
    draw(document, chosen.picture)
    print(f"written: {chosen.picture}")


def run(path: Path, quick: bool, anyway: bool, wanted: Sequence[str], goes_on: bool) -> dict[str, Any]:
    """Race after race, each in a process of its own, written down after each. One that fails is named, and the others
    are run."""
    races: dict[str, Any] = {}
    document = {"commit": commit(), "machine": report.machine(), "quick": quick, "minutes": 0.0, "races": races}
    if goes_on and path.exists():
        before = json.loads(path.read_text())
        if all(before[key] == document[key] for key in ("commit", "machine", "quick")):
            races |= before["races"]
            document["minutes"] = before["minutes"]
    path.parent.mkdir(exist_ok=True)
    for stem, command in RACES.items():
        if stem not in wanted or stem in races or (quick and stem not in QUICK):
            continue
        began = time.perf_counter()
        found = one(command, ([*TURNS, *QUICK[stem]] if quick else []) + ["--anyway"] * anyway)
        if found is None:
            continue
        races[stem] = found
        document["minutes"] += (time.perf_counter() - began) / 60
        path.write_text(json.dumps(document, indent=1) + "\n")
    if not races:
        raise SystemExit("no race came to its end: nothing is written")
    return document


def one(command: Sequence[str], more: Sequence[str]) -> dict[str, Any] | None:
    """What a race has found, or None where it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = [f"benchmarks.{command[0]}", *command[1:], *more]
        ended = subprocess.run([sys.executable, "-m", *words, "--json", file.name], check=False).returncode
        text = Path(file.name).read_text()
    if ended or not text:
        print(f"{' '.join(words)} ended with {ended}: left out", flush=True)
        return None
    found: dict[str, Any] = json.loads(text)
    for name in ("json", "chart"):  # paths of this machine
        found.get("options", {}).pop(name, None)
    return found


def commit() -> str:
    """With a + where files differ from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty=+"], check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def lines(document: Mapping[str, Any]) -> Iterator[Line]:
    """In the order of RACES, whenever each was run."""
    order = [*RACES, *document["races"]]
    for race in sorted(document["races"], key=order.index):
        for r in document["races"][race]["rows"]:
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
    where = f"gloo on {machine['processor']}, torch {machine['torch']}"
    rounds = {len(line.rounds) for line in lines(document)}
    turns = "-".join(map(str, sorted({min(rounds), max(rounds)})))
    return f"isograd's time by its fastest peer's, {turns} rounds, {where}, commit {document['commit']}"


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
    figure.supxlabel("step time by the fastest peer's: left of 1 isograd is faster (median; line: all rounds)", size=9)
    figure.suptitle(title(document), size=8)  # of the figure, as the panel is narrower than these words
    panel.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
