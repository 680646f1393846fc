"""The table, the JSON and the chart of a race; and the command line that all races share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import quiet, race, seat
from benchmarks.contestant import ONE, Entry
from benchmarks.data_peers import DDP_ENTRY
from benchmarks.race import Error, Result
from benchmarks.task import Sizes

OUT = Path(__file__).parent / "out"
MIB = 2**20


def options(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks on this machine (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=2, help="training steps in a turn")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contestants of these names; * stands for any letters"
    )
    parser.add_argument("--batch", type=int, default=Sizes().batch, help="sequences per step over all ranks")
    parser.add_argument("--settle", type=int, default=seat.SETTLE_STEPS, help="steps of each before its first turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers (of the last race) here, too")
    parser.add_argument("--no-errors", action="store_true", help="leave out the comparison of gradients")
    parser.add_argument("--anyway", action="store_true", help="race on a machine that other jobs use, too")
    return parser


def chosen_of(entries: Sequence[Entry], names: Sequence[str] | None) -> list[Entry]:
    """Those named, or all. A name is a whole one; "isograd" before it may be left out."""
    if not names:
        return list(entries)
    all_names = [entry.name for entry in entries]
    for name in names:
        if not any(_is_called(entry, name) for entry in entries):
            near = get_close_matches(name, all_names, 3, 0.4) or all_names
            raise SystemExit(f"no contestant is called {name!r}; did you mean {', '.join(map(repr, near))}?")
    return [entry for entry in entries if any(_is_called(entry, name) for name in names)]


def _is_called(entry: Entry, name: str) -> bool:
    return any(fnmatchcase(entry.name.lower(), full.lower()) for full in (name, f"isograd {name}"))


def main(name: str, text: str, entries: Sequence[Entry], notes: Sequence[str]) -> None:
    chosen = options(text).parse_args()
    entries = chosen_of(entries, chosen.only)
    sizes = dataclasses.replace(Sizes(), batch=chosen.batch)
    if name == "tensor_parallel":
        sizes = sizes.for_ranks(chosen.ranks)
    if sizes.batch % chosen.ranks:
        raise SystemExit(f"--batch {sizes.batch} cannot be dealt out over {chosen.ranks} ranks")
    contest(name, entries, sizes, chosen, notes)


def contest(
    name: str,
    entries: Sequence[Entry],
    sizes: Sizes,
    chosen: argparse.Namespace,
    notes: Sequence[str],
    reference: Entry = ONE,
) -> list[dict[str, Any]]:
    """One race of one size: run, shown and written down. Its rows."""
    ranks = f"{chosen.ranks} gloo ranks with one thread each" if chosen.ranks > 1 else "one thread"
    title = (
        f"{name.replace('_', ' ')}: {ranks}, {sizes.parameters() / 1e6:.1f} M "
        f"parameters, {sizes.batch} x {sizes.seq} tokens per step, {sizes.heads} heads, fp32, fused AdamW"
    )
    print(title, *notes, sep="\n", flush=True)
    if not chosen.anyway:
        quiet.refuse_noise()
    results = race.run(
        entries, sizes, chosen.ranks, rounds=chosen.rounds, steps=chosen.steps, errors=not chosen.no_errors,
        reference=reference, attempts=1 if chosen.anyway else race.ATTEMPTS, settle=chosen.settle,
    )  # fmt: skip
    rows = [row(result, sizes, chosen.ranks) for result in results]
    foreign = sum(r["disturbed_rounds"] for r in rows)
    if foreign:
        turns = chosen.rounds * len(rows)
        notes = [*notes, f"other jobs used the machine beside {foreign} of {turns} turns: distrust the times"]
    show(rows, title, notes)
    OUT.mkdir(exist_ok=True)
    stem = OUT / f"{name}-{chosen.ranks}{'' if chosen.batch == Sizes().batch else f'-batch{chosen.batch}'}"
    document = {"title": title, "notes": list(notes), "machine": machine(), "options": vars(chosen), "rows": rows}
    written = [stem.with_suffix(".json")]
    for path in [*written, *([chosen.json] if chosen.json else [])]:
        path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    if find_spec("matplotlib"):
        chart(rows, title, stem.with_suffix(".png"))
        written.append(stem.with_suffix(".png"))
    print("written:", *(path.relative_to(OUT.parent.parent) for path in written))
    return rows


def row(result: Result, sizes: Sizes, ranks: int) -> dict[str, Any]:
    peer = result.peer
    return {
        "name": result.entry.name,
        "step_s": result.median,
        "of_ddp": _median(result.ratios(DDP_ENTRY.name)),
        "of_one": _median(result.ratios(ONE.name)),
        "of_one_rounds": result.ratios(ONE.name),
        "cpu_of_one": _median(result.work_ratios(ONE.name)),
        "beside": list(result.heat),
        "peer": peer,
        "of_peer": _median(result.ratios(peer)),
        "of_peer_rounds": result.ratios(peer),
        "cpu_of_peer": _median(result.work_ratios(peer)),
        "peak_of_peer": result.peak / result.heat[peer].peak if peer else None,
        "bubble": _median_pair(result.bubbles),
        "wire_bytes": statistics.median(result.wire),
        "disturbed_rounds": result.disturbed,
        "bound_bytes": 0.0 if result.entry.alone else result.entry.bound(sizes, ranks),
        "peak_bytes": result.peak,
        "even": _plain(result.even),
        "uneven": _plain(result.uneven),
        "rounds_s": result.seconds,
        "rounds_cpu_s": result.cpu,
        "rounds_wire_bytes": result.wire,
        "rounds_loopback_bytes": result.loopback,
    }


def _median(ratios: Sequence[float] | None) -> float | None:
    return statistics.median(ratios) if ratios else None


def _median_pair(bubbles: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    if not bubbles:
        return None
    measured, theory = zip(*bubbles, strict=True)
    return {"measured": statistics.median(measured), "theory": statistics.median(theory)}


def _plain(error: Error | None) -> dict[str, Any] | None:
    return None if error is None else dataclasses.asdict(error)


def show(rows: Sequence[dict[str, Any]], title: str, notes: Sequence[str]) -> None:
    peers, ddp = (any(r[key] is not None for r in rows) for key in ("of_peer", "of_ddp"))
    peers = peers and any(r["peer"] not in (None, DDP_ENTRY.name) for r in rows)
    table = Table(title=title, caption="\n".join(notes) or None, caption_justify="left")
    headings = ["contestant", "step, ms", "best"] + (["of DDP"] if ddp else [])
    bubbles = any(r["bubble"] for r in rows)
    headings += ["of one", "work of one's"] + (["fastest peer", "of its peer", "work of peer's"] if peers else [])
    headings += ["bubble", "theory"] if bubbles else []
    headings += ["wire, MB", "bound", "wire/bound", "peak, MiB", "error even", "uneven"]
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for r in rows:
        cells = [r["name"], f"{r['step_s'] * 1e3:.0f}", f"{min(r['rounds_s']) * 1e3:.0f}"]
        cells += [_number(r["of_ddp"])] if ddp else []
        cells += [_number(r["of_one"]), _number(r["cpu_of_one"])]
        cells += [r["peer"] or "-", _number(r["of_peer"]), _number(r["cpu_of_peer"])] if peers else []
        cells += [_number(r["bubble"] and r["bubble"][kind]) for kind in ("measured", "theory")] if bubbles else []
        wire, bound = r["wire_bytes"], r["bound_bytes"]
        cells += [f"{wire / 1e6:.1f}", f"{bound / 1e6:.1f}", _number(wire / bound if bound else None)]
        cells += [f"{r['peak_bytes'] / MIB:.0f}"]
        cells += ["-" if r[kind] is None else f"{r[kind]['total']:.0e}" for kind in ("even", "uneven")]
        table.add_row(*cells, style="bold" if r["name"].startswith("isograd") else None)
    Console(width=max(180, Console().width)).print(table)


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.machine()


@contextmanager
def growth(
    path: Path, title: str, across: str, up: str, ticks: Mapping[int, str], *, from_zero: bool = False
) -> Iterator[Any]:
    """A panel for lines over doublings, written as SVG: the same bytes from the same numbers. from_zero: the upright
    axis begins at 0 and is not in doublings."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "isograd", "font.family": "sans-serif"})
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    yield panel
    panel.set_xscale("log", base=2)
    if not from_zero:
        panel.set_yscale("log", base=2)
    panel.set_xticks(list(ticks), list(ticks.values()))
    if from_zero:
        panel.set_ylim(bottom=0)
    else:
        panel.yaxis.set_major_formatter("{x:.0f}")
    panel.set_xlabel(across)
    panel.set_ylabel(up)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)
    panel.legend()
    figure.savefig(path, metadata={"Date": None})


def chart(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Three bars for each contestant: time, bytes, memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(14, 0.45 * len(rows) + 1.8), sharey=True, layout="constrained")
    names = [r["name"] for r in rows]
    colors = ["tab:green" if n.startswith("isograd") else "tab:gray" for n in names]
    values = {
        "ms per step (median)": [r["step_s"] * 1e3 for r in rows],
        "MB on the wire per rank and step (line: lower bound)": [r["wire_bytes"] / 1e6 for r in rows],
        "peak MiB per rank": [r["peak_bytes"] / MIB for r in rows],
    }
    for panel, (heading, numbers) in zip(panels, values.items(), strict=True):
        bars = panel.barh(names, numbers, color=colors)
        panel.bar_label(bars, fmt="%.0f", padding=3)
        panel.set_title(heading, fontsize=10)
        panel.margins(x=0.15)
    for place, r in enumerate(rows):
        panels[1].plot([r["bound_bytes"] / 1e6] * 2, [place - 0.4, place + 0.4], color="black")
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
