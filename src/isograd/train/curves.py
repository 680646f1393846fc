"""Pictures of runs: loss over steps, one line per run."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Loss curves as PNG; below them what else was measured, and how far losses are from the first run's. False when
    matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    more = {f"{name}, {what}": points for name, file in runs.items() for what, points in measures(file).items()}
    apart = differences(runs)
    plots = 1 + bool(more) + bool(apart)
    figure = Figure(figsize=(8, 1.5 + 3 * plots), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(plots, 1, sharex=True, squeeze=False)[:, 0])
    axes[0].set(ylabel="loss", title=title)
    for name, file in runs.items():
        training, held_out = losses(file)
        line = axes[0].plot(*zip(*training, strict=True), label=name, linewidth=1.4)[0] if training else None
        if held_out:
            color = line.get_color() if line else None
            axes[0].plot(*zip(*held_out, strict=True), "o--", color=color, label=f"{name}, held out", markersize=4)
    if apart:
        axes[1].set(ylabel="loss, relative distance", yscale="log")
        for name, points in apart.items():
            axes[1].plot(*zip(*points, strict=True), ".-", label=f"{name} to {next(iter(runs))}", linewidth=1)
    if more:
        axes[-1].set(ylabel="held out")
        for name, points in more.items():
            axes[-1].plot(*zip(*points, strict=True), "o-", label=name, linewidth=1.4)
    axes[-1].set_xlabel("step")
    for each in axes:
        each.grid(alpha=0.3)
        if each.lines:
            each.legend(fontsize="small")
    partial = to.with_suffix(".partial.png")
    with inside.opened(partial, "wb") as picture:
        figure.savefig(picture, dpi=120, format="png")
    partial.replace(to)
    return True


def differences(runs: Mapping[str, Path]) -> dict[str, list[tuple[int, float]]]:
    """Of each further run, how far its loss is from the first one's, relative; steps where they are equal left out."""
    if len(runs) < 2:
        return {}
    (_, first), *others = runs.items()
    reference = dict(losses(first)[0])
    found = {
        name: [(n, abs(x - reference[n]) / abs(reference[n])) for n, x in losses(file)[0] if reference.get(n)]
        for name, file in others
    }
    return {name: kept for name, points in found.items() if (kept := [(n, gap) for n, gap in points if gap > 0])}
