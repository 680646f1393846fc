"""Pictures of runs: loss over steps, one line per run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """What evaluations found beside the loss: accuracies, by name."""
    known = ("step", "event", "loss", "weight", "unit")
    found: dict[str, list[tuple[int, float]]] = {}
    for line in journal.read(file):
        if line.get("event") == "evaluation":
            for name, value in line.items():
                if name not in known and isinstance(value, int | float):
                    found.setdefault(name, []).append((line["step"], value))
    return found


def draw(runs: Mapping[str, Path], to: Path, title: str) -> bool:
    """Loss curves as PNG; False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    more = {name: measures(file) for name, file in runs.items()}
    plots = 2 if any(more.values()) else 1
    figure = Figure(figsize=(8, 4.5 * plots), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot(plots, 1, 1)
    for name, file in runs.items():
        training, held_out = losses(file)
        line = axes.plot(*zip(*training, strict=True), label=name, linewidth=1.4)[0] if training else None
        if held_out:
            color = line.get_color() if line else None
            axes.plot(*zip(*held_out, strict=True), "o--", color=color, label=f"{name}, held out", markersize=4)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    if plots == 2:
        below: Any = figure.add_subplot(plots, 1, 2)
        for name, found in more.items():
            for measure, points in found.items():
                below.plot(*zip(*points, strict=True), "o-", label=f"{name}, {measure}", linewidth=1.4)
        below.set(xlabel="step", ylabel="held out")
        below.grid(alpha=0.3)
        below.legend()
    partial = to.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(to)
    return True
