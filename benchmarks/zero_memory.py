"""Memory that parameters and optimizer state take on each rank, over the number of ranks; draws docs/zero-memory.svg.

    python -m benchmarks.zero_memory                     # 1, 2, 4 and 8 gloo ranks, some minutes on two cores
    python -m benchmarks.zero_memory --ranks 1 2 --only zero3 --chart ""

Measured in each rank, of the rank that has most: resident memory between two steps, gradients cleared, above what it
was before the model was built (a miniature has trained before that, which loads what is loaded late). In theory fp32
parameters and AdamW's two moments are three times the parameters: all on each rank at zero0, a third of it on each and
two thirds over W at zero1, all of it over W at zero3. glibc is told to give every block above 64 KiB back at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import data_peers, ours, report
from benchmarks.contestant import Entry
from benchmarks.seat import where
from benchmarks.sequence_memory import resident
from benchmarks.task import Sizes, batch
from isograd.launcher.launch import World

SIZES = Sizes(seq=64)
RANKS = (1, 2, 4, 8)
CHART = Path(__file__).parents[1] / "docs" / "zero-memory.svg"
ENTRIES = [e for e in [*ours.DATA, *data_peers.PEERS] if e.name in ("isograd zero0", "isograd zero1", "isograd zero3")]
ENTRIES += [e for e in data_peers.PEERS if e.name == "FSDP2 reshard"]


def kept(entry: Entry) -> int:
    """Bytes between two steps, above what was resident before. Runs inside every rank."""
    rank, world = where()
    tiny = dataclasses.replace(SIZES.tiny(), batch=world)
    entry.build(tiny, rank, world).step(batch(tiny, 0))
    gc.collect()
    before = resident("VmRSS")
    sizes = dataclasses.replace(SIZES, batch=world)
    contestant = entry.build(sizes, rank, world)
    for number in range(2):
        contestant.step(batch(sizes, number))
    gc.collect()
    return resident("VmRSS") - before


def theory(name: str, ranks: int) -> float:
    """Parameters and two moments of each, in bytes."""
    whole = 4 * SIZES.parameters()
    if "zero0" in name:
        return 3 * whole
    return whole + 2 * whole / ranks if "zero1" in name else 3 * whole / ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contestants of these names; * stands for any letters"
    )
    parser.add_argument("--chart", default=str(CHART), help="where to draw; '' for nowhere")
    chosen = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    rows: dict[str, dict[int, int]] = {}
    for entry in report.chosen_of(ENTRIES, chosen.only):
        rows[entry.name] = {}
        for ranks in chosen.ranks:
            if ranks > 1 or entry in ours.DATA:  # FSDP2 wants a process group
                with World(ranks) as world:
                    rows[entry.name][ranks] = max(world.run(kept, entry, timeout=600.0))
                print(f"  {entry.name}, {ranks} ranks: {rows[entry.name][ranks] / report.MIB:.0f} MiB", flush=True)
    show(rows, chosen.ranks)
    report.OUT.mkdir(exist_ok=True)
    document = {"ranks": chosen.ranks, "bytes": rows, "parameters": SIZES.parameters(), "machine": report.machine()}
    (report.OUT / "zero-memory.json").write_text(json.dumps(document, indent=1) + "\n")
    if chosen.chart:
        chart(rows, chosen.ranks, Path(chosen.chart))


def show(rows: dict[str, dict[int, int]], ranks: list[int]) -> None:
    table = Table(title=f"MiB per rank between steps (in theory), {SIZES.parameters() / 1e6:.1f} M parameters, AdamW")
    for heading in ("contestant", *(f"W = {count}" for count in ranks)):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    for name, found in rows.items():
        cells = [
            f"{found[n] / report.MIB:.0f} ({theory(name, n) / report.MIB:.0f})" if n in found else "-" for n in ranks
        ]
        table.add_row(name, *cells)
    Console(width=120).print(table)


def chart(rows: dict[str, dict[int, int]], ranks: list[int], path: Path) -> None:
    ticks = {count: str(count) for count in ranks}
    with report.growth(
        path,
        "Parameters and AdamW's state on each rank (dotted: in theory)",
        "data ranks",
        "MiB per rank between steps",
        ticks,
    ) as panel:
        for (name, found), marker in zip(rows.items(), "osD^", strict=False):
            (line,) = panel.plot(list(found), [b / report.MIB for b in found.values()], marker=marker, label=name)
            ideal = [theory(name, n) / report.MIB for n in found]
            panel.plot(list(found), ideal, linestyle=":", color=line.get_color(), linewidth=1)


if __name__ == "__main__":
    main()
