"""A picture of what ranks hold over a step: stacked areas, one plot for each rank."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from isograd import inside
from isograd.plan.held import KINDS
from isograd.plan.peak import Peak

COLORS = ("#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#f58518", "#e45756", "#bab0ac")
SHADES = {"forward": "#ffffff", "backward": "#f3f3f3"}
OTHER = "#e4e9f2"
MOST = 8  # plots
LETTER = 0.008  # of the step's width: a letter of a phase's name, which is written where there is room for it


def draw(ranks: Sequence[tuple[str, Peak]], to: Path, title: str) -> bool:
    """A PNG with a plot for each (name, peak). False when matplotlib is not installed.

    Along the step stand the moments at which memory is taken or given back, not time.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    ranks = ranks[:MOST]
    figure = Figure(figsize=(10, 1 + 3.2 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(len(ranks), 1, squeeze=False)[:, 0]
    largest = max(peak.bytes for _, peak in ranks)
    unit, size = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6)) if largest >= s), ("KB", 1e3))
    for plot, (name, peak) in zip(plots, ranks, strict=True):
        count = len(next(iter(peak.areas.values())))
        places = [i / count for i in range(count)]
        areas = [[value / size for value in peak.areas[kind]] for kind in KINDS]
        plot.stackplot(places, areas, labels=KINDS, colors=COLORS, step="post")
        ends = [at for at, _ in peak.phases[1:]] + [1.0]
        for (start, phase), end in zip(peak.phases, ends, strict=True):
            plot.axvspan(start, end, color=SHADES.get(phase.split()[0], OTHER), zorder=0)
            letters = int((end - start) / LETTER)
            if letters >= max(map(len, phase.split())):
                words = textwrap.fill(phase, letters)
                plot.text((start + end) / 2, 1.12 * peak.bytes / size, words, ha="center", va="center", fontsize=8)
        plot.axhline(peak.bytes / size, color="black", linewidth=0.8, linestyle=":")
        plot.set(xlim=(0, 1), ylim=(0, 1.2 * peak.bytes / size), ylabel=unit, xticks=[])
        plot.set_title(f"{name}: {peak.bytes / size:.3g} {unit} in {peak.when}", fontsize=10, loc="left")
    plots[-1].set_xlabel("the step, by what is taken and given back")
    plots[0].legend(*(side[::-1] for side in plots[0].get_legend_handles_labels()), loc="center left",
                    bbox_to_anchor=(1.0, 0.5), fontsize=8)  # fmt: skip
    figure.suptitle(title)
    partial = to.with_suffix(".partial.png")
    with inside.opened(partial, "wb") as picture:
        figure.savefig(picture, dpi=110, format="png")
    partial.replace(to)
    return True
