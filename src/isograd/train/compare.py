"""The same run under several layouts, or runs that are over: speed, memory and bytes differ; the losses must not.

Each layout runs in its own folder from the same first values on the same samples. Bytes are what the sockets of a
rank's process sent in the steps, without the start, evaluations and saves; known for gloo on Linux, left out elsewhere.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from isograd.comm import wire
from isograd.core.layout import Layout
from isograd.errors import ConfigError, TrainError
from isograd.io import atomic, plots, terminal
from isograd.launcher.launch import World
from isograd.train import journal
from isograd.train.config import Config
from isograd.train.loop import RunOptions, RunOutcome, run
from isograd.train.reading import load


@dataclass(frozen=True)
class ComparedRun:
    """One layout's run."""

    layout: str
    ranks: int
    loss: float  # of the last step
    difference: float  # the largest of any step to the first layout's, relative
    held_out: float | None
    per_s: float  # tokens or pairs, median
    memory_gb: float  # of the rank that held most
    sent_mb: float | None  # per step and rank, of the rank that sent most


def compare(configs: Mapping[str, Config], out: str | None) -> int:
    """Train under each layout in turn; write numbers and picture; print the table; return the exit code."""
    first = next(iter(configs.values()))
    folder = Path(out) if out else first.folder / "compare"
    runs: dict[str, Path] = {}
    results: dict[str, tuple[RunOutcome, float | None]] = {}
    for layout, config in configs.items():
        here = folder / layout.replace(" ", "_")
        if here.exists() and any(here.iterdir()):
            raise TrainError(
                "IG987", "this folder holds an earlier comparison", seen=str(here), expected="an empty folder",
                fix="--out FOLDER, or delete the old one",
            )  # fmt: skip
        print(f"{layout}: {Layout.parse(layout).world_size} ranks, {config.steps} steps", flush=True)
        quiet = config.log.model_copy(update={"every": 1, "sample": 0})
        alone = config.model_copy(update={"run": str(here), "log": quiet})
        with World(Layout.parse(layout).world_size, threads=config.threads, device=config.device) as world:
            found = world.run(_measured, alone)
        sent = [bytes_ for _, bytes_ in found if bytes_ is not None]
        results[layout] = found[0][0], max(sent, default=None)
        runs[layout] = here / "metrics.jsonl"
    losses = {layout: dict(enumerate(outcome.losses, 1)) for layout, (outcome, _) in results.items()}
    start = next(iter(losses.values()))
    rows = [_row(each, each, start, losses[each], runs[each], most) for each, (_, most) in results.items()]
    about = (
        f"{first.steps} steps of {first.batch} {'sequences' if first.data else 'pairs'}, {first.model.dtype}; "
        "the largest difference is that of any step's loss to the first layout's, relative"
    )
    _write(rows, runs, folder, f"{first.folder.name} under {len(rows)} layouts", about)
    return int(any(outcome.code for outcome, _ in results.values()))


def compare_runs(folders: Sequence[Path], out: str | None) -> int:
    """What runs have written into their folders; numbers, picture and table; return the exit code."""
    runs = {str(folder): folder / "metrics.jsonl" for folder in folders}
    losses = {name: dict(journal.curve(file).training) for name, file in runs.items()}
    common = sorted(set.intersection(*(set(points) for points in losses.values())))
    if not common or len(runs) < 2:
        raise ConfigError(
            "IG636", "these runs have no step in common" if len(runs) > 1 else "a comparison needs two runs",
            seen=", ".join(f"{name}: {len(points)} logged steps" for name, points in losses.items()),
            expected="two folders of runs or more, with the loss of the same steps in metrics.jsonl",
            fix="isograd compare RUN RUN; 'log.every' says which steps are logged",
        )  # fmt: skip
    configs = {name: load(Path(name) / "config.yaml").config for name in runs}
    first = next(iter(losses.values()))
    shared = {name: {step: points[step] for step in common} for name, points in losses.items()}
    rows = [_row(name, configs[name].layout, first, shared[name], runs[name], None) for name in runs]
    folder = Path(out) if out else folders[0] / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{len(common)} logged steps; the largest difference is that of one of their losses to the first run's"
    _write(rows, runs, folder, f"{len(rows)} runs", about)
    return 0


def _measured(config: Config) -> tuple[RunOutcome, float | None]:
    """On a rank: the run, and the bytes that it sent in a step: without the start, evaluations and saves."""
    try:
        wire.sent_by_me()
    except OSError:
        return run(config, RunOptions(resume="never", show="none", signals=())), None
    outcome = run(config, RunOptions(resume="never", show="none", signals=(), sent=wire.sent_by_me))
    return outcome, outcome.sent / max(1, outcome.step)


def _row(
    name: str, layout: str, first: Mapping[int, float], losses: Mapping[int, float], journaled: Path, sent: float | None
) -> ComparedRun:
    """One run beside the first one, whose losses, by step, are `first`. `sent`: bytes, per step and rank."""
    lines = [line for line in journal.read(journaled) if "event" not in line and "per_s" in line]
    held_out = journal.curve(journaled).held_out
    common = first.keys() & losses.keys()
    return ComparedRun(
        name,
        Layout.parse(layout).world_size,
        losses[max(losses)],
        max(abs(losses[n] - first[n]) / max(abs(first[n]), 1e-30) for n in common),
        held_out[-1][1] if held_out else None,
        statistics.median(line["per_s"] for line in lines[1:] or lines),
        max(line["memory_gb"] for line in lines),
        None if sent is None else sent / 1e6,
    )


def table(rows: list[ComparedRun], columns: int = 120) -> str:
    """The comparison as text of at most `columns`: titles in two lines, long layouts in several."""
    titles = (
        "\nranks",
        "last\nloss",
        "largest\ndifference",
        "held-out\nloss",
        "\ntokens/s",
        "memory\nGB",
        "sent\nMB/step",
    )
    numbers = [Column(title, justify="right", no_wrap=True) for title in titles]
    grid = Table(Column("\nlayout", min_width=12), *numbers, box=None, pad_edge=False)
    for row in rows:
        held_out = "-" if row.held_out is None else f"{row.held_out:.5f}"
        sent = "-" if row.sent_mb is None else f"{row.sent_mb:.2f}"
        losses = f"{row.loss:.5f}", f"{row.difference:.1e}", held_out
        grid.add_row(Text(row.layout), str(row.ranks), *losses, f"{row.per_s:,.0f}", f"{row.memory_gb:.2f}", sent)
    shown = StringIO()
    Console(file=shown, width=columns, color_system=None).print(grid)
    return shown.getvalue().rstrip()


def _write(rows: list[ComparedRun], runs: Mapping[str, Path], folder: Path, title: str, about: str) -> None:
    atomic.replace_text(folder / "compare.json", json.dumps([asdict(row) for row in rows], indent=2))
    drawn = plots.curves({name: journal.curve(file) for name, file in runs.items()}, folder / "compare.png", title)
    made = "compare.json, compare.png" if drawn else "compare.json (no picture: pip install matplotlib)"
    print(f"{about}\n{folder}: {made}\n{table(rows, terminal.width())}", flush=True)
