"""Pictures of runs: loss over steps, one line per run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from isograd import inside
from isograd.train import journal


def losses(file: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(training, held-out) points of a run's journal."""
    training, held_out = [], []
    for line in journal.read(file):
        if line.get("event") == "evaluation" and line["loss"] is not None:
            held_out.append((line["step"], line["loss"]))
        elif line.get("loss") is not None and "event" not in line:
            training.append((line["step"], line["loss"]))
    return training, held_out


def measures(file: Path) -> dict[str, list[tuple[int, float]]]:
    """What evaluations measured beside the loss, such as accuracies: its points by name."""
    known = ("step", "event", "loss", "weight", "unit")
    found: dict[str, list[tuple[int, float]]] = {}
    for line in journal.read(file):
        if line.get("event") == "evaluation":
            for name, value in line.items():
                if name not in known and isinstance(value, int | float):
                    found.setdefault(name, []).append((line["step"], value))
    return found


def draw(runs: Mapping[str, Path], to: Path, title: str) -> bool:
    """Loss curves as a PNG; below them what else was measured, and how far losses are from those of the first run.

    A run has one colour in all plots. Curves of runs that agree lie on each other, so all but the first are dashed,
    their dashes take turns, and points are drawn as rings: none hides another. False when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    further, apart = {name: measures(file) for name, file in runs.items()}, differences(runs)
    kinds = list(dict.fromkeys(kind for found in further.values() for kind in found))
    plots = 1 + bool(kinds) + bool(apart)
    figure = Figure(figsize=(8, 1.5 + 3 * plots), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(plots, 1, sharex=True, squeeze=False)[:, 0])
    axes[0].set(ylabel="loss", title=title)
    for pen in pens(list(runs)):
        training, held_out = losses(runs[pen.name])
        _line(axes[0], training, color=pen.color, linestyle=pen.dashes, linewidth=WIDTH, label=pen.name)
        _line(axes[0], held_out, color=pen.color, linestyle="", marker="o", markersize=pen.ring)
        if pen.name in apart:
            _line(axes[1], apart[pen.name], color=pen.color, linewidth=1, marker=".")
        for marker, kind in zip(cycle(MARKERS), kinds):
            style = {"linestyle": pen.dashes, "linewidth": WIDTH, "marker": marker, "markersize": pen.ring}
            _line(axes[-1], further[pen.name].get(kind, []), color=pen.color, **style)
    if any(losses(file)[1] for file in runs.values()):
        axes[0].plot([], [], "o", color="grey", label="held out")
    if apart:
        axes[1].set(ylabel=f"distance from the loss\nof {next(iter(runs))}, relative", yscale="log")
    if kinds:
        axes[-1].set(ylabel="held out")
        for marker, kind in zip(cycle(MARKERS), kinds):
            axes[-1].plot([], [], marker, color="grey", label=kind)
        axes[-1].legend(fontsize="small")
    axes[-1].set_xlabel("step")
    axes[0].legend(fontsize="small", handlelength=5)
    for each in axes:
        each.grid(alpha=0.3)
    partial = to.with_suffix(".partial.png")
    with inside.opened(partial, "wb") as picture:
        figure.savefig(picture, dpi=120, format="png")
    partial.replace(to)
    return True


COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH, DASH, RING = 2.2, 3.0, 3.0  # points, line widths, points


@dataclass(frozen=True)
class Pen:
    """How one run is drawn, in every plot of a picture."""

    name: str
    color: str
    dashes: tuple[float, tuple[float, ...] | None]  # where the pattern begins; on and off lengths, None: solid
    ring: float  # size of its points: the first run's are the largest and lie below the others


def pens(names: list[str]) -> list[Pen]:
    """One for each run, in the order of drawing. The first is solid; the dashes of the others leave room for each."""
    count = len(names)
    return [
        Pen(
            name,
            COLORS[i % len(COLORS)],
            (0.0, None) if i == 0 else (DASH * (count - i), (DASH, DASH * (count - 1))),
            RING * (1 + count - i),
        )
        for i, name in enumerate(names)
    ]


def _line(axes: Any, points: list[tuple[int, float]], **style: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), solid_capstyle="butt", dash_capstyle="butt", **style)


def differences(runs: Mapping[str, Path]) -> dict[str, list[tuple[int, float]]]:
    """For each run but the first, the relative distance of its loss from the first's, at steps where they differ."""
    if len(runs) < 2:
        return {}
    (_, first), *others = runs.items()
    reference = dict(losses(first)[0])
    found = {
        name: [(n, abs(x - reference[n]) / abs(reference[n])) for n, x in losses(file)[0] if reference.get(n)]
        for name, file in others
    }
    return {name: kept for name, points in found.items() if (kept := [(n, gap) for n, gap in points if gap > 0])}
