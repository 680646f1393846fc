"""Peak memory of a training step on long sequences, over cp 1, 2 and 4; draws docs/sequence-memory.svg.

    python -m benchmarks.sequence_memory                 # 1k to 16k tokens, about ten minutes on two cores
    python -m benchmarks.sequence_memory --lengths 1024 2048 --layouts 1 "cp2 ring" --chart ""

One sequence; recompute is on and the loss is taken in chunks of 1024 tokens. Measured in each rank: two short steps
make gradients, buckets and optimizer state; then the kernel's high-water mark of resident memory is reset (5 written to
/proc/self/clear_refs), one step runs, and its mark less what was resident before is the peak; of the rank that needs
most. glibc is told to give every block above 64 KiB back at once (MALLOC_MMAP_THRESHOLD_), so that what an earlier step
left behind is not counted for free. "floor" is the same for a sequence of 64 tokens: what the parameters' gradients and
their reduction cost. "a token" is what each further one costs, from the last two lengths, and that relative to one
rank's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.ours import IsogradModel
from benchmarks.task import Sizes, batch
from isograd.core.layout import Layout
from isograd.launcher.launch import World

SIZES = Sizes(vocab=4096, hidden=256, layers=4, heads=4, mlp=688, batch=1)
SHORT = 64
LAYOUTS = ("1", "cp2 ulysses", "cp2 ring", "cp4 ulysses", "cp4 ring")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
CHART = Path(__file__).parents[1] / "docs" / "sequence-memory.svg"


def peaks(layout: str, lengths: Sequence[int]) -> list[int]:
    """Bytes above what was resident before the step, for each length. Runs inside every rank."""
    contestant = IsogradModel(SIZES, Layout.parse(layout))
    contestant.model.recompute = True
    found = []
    for number, length in enumerate((SHORT, SHORT, *lengths)):
        one = batch(dataclasses.replace(SIZES, seq=length), number)
        found.append(peak_of(lambda one=one: contestant.step(one)))
    return found[1:]


def peak_of(step: Callable[[], object]) -> int:
    """Bytes of this rank's high-water mark in a step, above what was resident before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="two or more")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--chart", default=str(CHART), help="where to draw; '' for nowhere")
    chosen = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    rows: dict[str, list[int]] = {}
    for layout in chosen.layouts:
        with World(Layout.parse(layout).world_size) as world:
            per_rank = world.run(peaks, layout, chosen.lengths, timeout=1800.0)
        rows[layout] = [max(values) for values in zip(*per_rank, strict=True)]
        print(f"  {layout}: {', '.join(f'{value / report.MIB:.0f}' for value in rows[layout])} MiB", flush=True)
    show(rows, chosen.lengths)
    report.OUT.mkdir(exist_ok=True)
    document = {"lengths": chosen.lengths, "floor_then_peaks": rows, "machine": report.machine()}
    (report.OUT / "sequence-memory.json").write_text(json.dumps(document, indent=1) + "\n")
    if chosen.chart:
        chart(rows, chosen.lengths, Path(chosen.chart))


def show(rows: dict[str, list[int]], lengths: Sequence[int]) -> None:
    table = Table(title=f"peak MiB of a step above what was resident, {SIZES.parameters() / 1e6:.1f} M parameters")
    for heading in ("layout", "floor", *map(str, lengths), "a token, KiB", "of one rank's"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    tokens = [(found[-1] - found[-2]) / (lengths[-1] - lengths[-2]) for found in rows.values()]
    for (layout, found), token in zip(rows.items(), tokens, strict=True):
        cells = [f"{peak / report.MIB:.0f}" for peak in found]
        table.add_row(layout, *cells, f"{token / 1024:.1f}", f"{token / tokens[0]:.2f}")
    Console(width=120).print(table)


def chart(rows: dict[str, list[int]], lengths: Sequence[int], path: Path) -> None:
    ticks = {length: f"{length // 1024}k" for length in lengths}
    with report.growth(
        path,
        "Peak memory of a training step (dotted: one rank's, divided by cp)",
        "tokens in the sequence",
        "peak MiB per rank, of one step",
        ticks,
    ) as panel:
        colors = {1: "tab:gray", 2: "tab:blue", 4: "tab:green"}
        whole = next(iter(rows.values()))[1:]
        for cp in (2, 4):
            panel.plot(
                lengths, [peak / cp / report.MIB for peak in whole], color=colors[cp], linewidth=0.8, linestyle=":"
            )
        for layout, (_, *found) in rows.items():
            ring = "ring" in layout
            panel.plot(
                lengths,
                [peak / report.MIB for peak in found],
                color=colors[Layout.parse(layout).cp],
                marker="s" if ring else "o",
                linestyle="--" if ring else "-",
                label="one rank" if layout == "1" else layout,
            )


if __name__ == "__main__":
    main()
