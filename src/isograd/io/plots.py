"""Every picture that is drawn with matplotlib (the extra `plot`): curves of runs, timelines.

Each function takes plain data and a file, whose name says the format, and returns False where matplotlib is not
installed. The file is complete or absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from isograd.io import atomic

FORMATS = (".png", ".svg", ".pdf")
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH, DASH, RING = 2.2, 3.0, 3.0  # points, line widths, points
LETTER = 0.0055  # of the width of a timeline: a letter, written where there is room for it
MOST_LABELS = 2000  # of boxes

Points = list[tuple[int, float]]  # (step, value)


def _figure(rows: int, width: float, height: float) -> tuple[Any, list[Any]] | None:
    """A figure of plots below each other; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


def _save(figure: Any, to: Path | BytesIO) -> bool:
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        if isinstance(to, BytesIO):
            figure.savefig(to, format="svg")
            return True
        with atomic.replacing(to) as picture:
            figure.savefig(picture, dpi=120, format=to.suffix.removeprefix("."))
    return True


@dataclass(frozen=True)
class Curve:
    """What a run has logged."""

    training: Points
    held_out: Points = field(default_factory=list)
    measures: Mapping[str, Points] = field(default_factory=dict)  # of evaluations, such as accuracies, by name


@dataclass(frozen=True)
class Pen:
    """How one run is drawn, in every plot of a picture."""

    name: str
    color: str
    dashes: tuple[float, tuple[float, ...] | None]  # where the pattern begins; on and off lengths, None: solid
    ring: float  # size of its points: the first run's are the largest and lie below the others


def pens(names: Sequence[str]) -> list[Pen]:
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


def curves(runs: Mapping[str, Curve], to: Path, title: str) -> bool:
    """Loss over steps; below it what else was measured, and how far losses are from those of the first run.

    A run has one colour in all plots. Curves of runs that agree lie on each other, so all but the first are dashed,
    their dashes take turns, and points are drawn as rings: none hides another.
    """
    distances = differences(runs)
    kinds = list(dict.fromkeys(kind for curve in runs.values() for kind in curve.measures))
    plots = 1 + bool(kinds) + bool(distances)
    if (made := _figure(plots, 8, 1.5 + 3 * plots)) is None:
        return False
    figure, axes = made
    axes[0].set(ylabel="loss", title=title)
    for pen in pens(list(runs)):
        curve = runs[pen.name]
        _line(axes[0], curve.training, color=pen.color, linestyle=pen.dashes, linewidth=WIDTH, label=pen.name)
        _line(axes[0], curve.held_out, color=pen.color, linestyle="", marker="o", markersize=pen.ring)
        if pen.name in distances:
            _line(axes[1], distances[pen.name], color=pen.color, linewidth=1, marker=".")
        for marker, kind in zip(cycle(MARKERS), kinds):
            style = {"linestyle": pen.dashes, "linewidth": WIDTH, "marker": marker, "markersize": pen.ring}
            _line(axes[-1], curve.measures.get(kind, []), color=pen.color, **style)
    if any(curve.held_out for curve in runs.values()):
        axes[0].plot([], [], "o", color="grey", label="held out")
    if distances:
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
    return _save(figure, to)


def _line(axes: Any, points: Points, **style: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), solid_capstyle="butt", dash_capstyle="butt", **style)


def differences(runs: Mapping[str, Curve]) -> dict[str, Points]:
    """For each run but the first, the relative distance of its loss from the first's, at steps where they differ."""
    if len(runs) < 2:
        return {}
    (_, first), *others = runs.items()
    reference = dict(first.training)
    found = {
        name: [(n, abs(x - reference[n]) / abs(reference[n])) for n, x in curve.training if reference.get(n)]
        for name, curve in others
    }
    return {name: points for name, every in found.items() if (points := [(n, gap) for n, gap in every if gap > 0])}


class Box(NamedTuple):
    """A stretch of time of one row of a timeline."""

    start: float
    end: float
    kind: str
    label: str = ""


def timeline(
    rows: Mapping[str, Sequence[Box]],
    to: Path | BytesIO,
    title: str,
    colors: Mapping[str, str],
    names: Mapping[str, str],
    unit: str,
) -> bool:
    """A row for each rank, from the top; into a buffer as SVG. colors, names: by kind of box, in the legend's order."""
    high = 0.34 if len(rows) <= 40 else max(0.08, 13.6 / len(rows))
    if (made := _figure(1, 14, 1.6 + high * len(rows))) is None:
        return False
    figure, (axes,) = made
    end = max(box.end for row in rows.values() for box in row)
    labels = sum(bool(box.label) for row in rows.values() for box in row) <= MOST_LABELS
    for place, row in enumerate(rows.values()):
        for kind, color in colors.items():
            spans = [(box.start, box.end - box.start) for box in row if box.kind == kind]
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.3)
        for box in row if labels else ():
            if box.label and (box.end - box.start) / end > LETTER * len(box.label):
                axes.text((box.start + box.end) / 2, place, box.label, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, end), ylim=(len(rows) - 0.5, -0.5), xlabel=unit)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8 if high > 0.2 else 4)
    used = [kind for kind in colors if any(box.kind == kind for row in rows.values() for box in row)]
    handles = [axes.barh(-9, 0, color=colors[kind], label=names.get(kind, kind)) for kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(used)), fontsize=8)
    axes.set_title(title, fontsize=11, loc="left")
    return _save(figure, to)
