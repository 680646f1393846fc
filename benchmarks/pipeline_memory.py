"""Peak memory of a training step against the number of micro-batches; draws docs/pipeline-memory.svg.

    python -m benchmarks.pipeline_memory                 # 1 to 32 micro-batches on 2 ranks, some minutes on two cores
    python -m benchmarks.pipeline_memory --micro-batches 1 4 16 --chart ""

A micro-batch is one sequence of 512 tokens, so the batch grows with their number. Measured as in
benchmarks.sequence_memory: after two steps the kernel's high-water mark of each rank is reset, one step runs, and the
mark less what was resident before is the peak; of the rank that needs most. It holds the gradients, and the activations
of as many micro-batches as the schedule keeps: that number, from the schedule itself, stands beside each peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.pipeline_ours import IsogradPipeline
from benchmarks.seat import where
from benchmarks.sequence_memory import peak_of
from benchmarks.task import Sizes, batch
from isograd.launcher.launch import World
from isograd.pipeline import build

SIZES = Sizes(vocab=512, hidden=256, layers=8, heads=4, mlp=688, seq=512)
RANKS = 2
SCHEDULES = {"gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved (vpp2)": ("1f1b", 2), "zb": ("zb", 1)}
COUNTS = (1, 2, 4, 8, 16, 32)
CHART = Path(__file__).parents[1] / "docs" / "pipeline-memory.svg"


def peaks(schedule: str, vpp: int, counts: Sequence[int]) -> list[int]:
    """Bytes above what was resident before the step, for each number of micro-batches. Runs inside every rank."""
    contestant = IsogradPipeline(SIZES, *where(), schedule=schedule, vpp=vpp)
    found = []
    for number, count in enumerate((1, 1, *counts)):
        contestant.micro_batches = count
        given = batch(dataclasses.replace(SIZES, batch=count), number)
        found.append(peak_of(lambda given=given: contestant.step(given)))
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--chart", default=str(CHART), help="where to draw; '' for nowhere")
    chosen = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    rows: dict[str, list[int]] = {}
    for name, (schedule, vpp) in SCHEDULES.items():
        with World(RANKS) as world:
            per_rank = world.run(peaks, schedule, vpp, chosen.micro_batches, timeout=1800.0)
        rows[name] = [max(values) for values in zip(*per_rank, strict=True)]
        print(f"  {name}: {', '.join(f'{value / report.MIB:.0f}' for value in rows[name])} MiB", flush=True)
    show(rows, chosen.micro_batches)
    report.OUT.mkdir(exist_ok=True)
    document = {"micro_batches": chosen.micro_batches, "peaks": rows, "machine": report.machine()}
    (report.OUT / "pipeline-memory.json").write_text(json.dumps(document, indent=1) + "\n")
    if chosen.chart:
        chart(rows, chosen.micro_batches, Path(chosen.chart))


def show(rows: dict[str, list[int]], counts: Sequence[int]) -> None:
    """Peaks, and the most stage passes whose activations a rank holds at a time."""
    table = Table(title=f"peak MiB of a step above what was resident (held at a time), {RANKS} ranks")
    for heading in ("schedule", *map(str, counts)):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name, found in rows.items():
        schedule, vpp = SCHEDULES[name]
        made = [build(schedule, RANKS, vpp, count) for count in counts]
        held = [max(each.in_flight(rank) for rank in range(RANKS)) for each in made]
        table.add_row(name, *(f"{peak / report.MIB:.0f} ({n})" for peak, n in zip(found, held, strict=True)))
    Console(width=120).print(table)


def chart(rows: dict[str, list[int]], counts: Sequence[int], path: Path) -> None:
    ticks = {count: str(count) for count in counts}
    with report.growth(
        path,
        f"Peak memory of a training step on {RANKS} pipeline ranks",
        "micro-batches in the step, of one size",
        "peak MiB per rank, of one step",
        ticks,
        from_zero=True,
    ) as panel:
        for (name, found), marker in zip(rows.items(), "osD^", strict=True):
            panel.plot(counts, [peak / report.MIB for peak in found], marker=marker, label=name)


if __name__ == "__main__":
    main()
