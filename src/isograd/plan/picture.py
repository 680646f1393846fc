"""The picture of a plan: a predicted step, rank by rank of a pipeline.

step(work, layout, machine, Path("step.svg"))
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from isograd.core.layout import Layout
from isograd.io import plots
from isograd.io.plots import Box
from isograd.plan.machine import Machine
from isograd.plan.step_time import PARTS, StageTimes, timeline
from isograd.plan.work import Work

COLORS = {
    "forward": "#9ecae9", "backward": "#f2b27e", "tp": "#d6455d", "cp": "#8c5fb8", "ep": "#3f9b52", "pp": "#7a7a7a",
    "dp": "#2b5c9e", "optimizer": "#222222",
}  # fmt: skip
WORDS = {"dp": "dp: reduction, gather", "pp": "pp: waits for its sends"}


def spans(work: Work, layout: Layout, machine: Machine) -> list[list[Box]]:
    """Of each pipeline rank, in order, without the bubble. A pass is its compute, then the messages that nothing
    hides, by axis (in a run they stand between its layers)."""
    ranks, rows = timeline(work, layout, machine)
    last = max(row[-1].end for row in rows)
    found = []
    for rank, row in zip(ranks, rows, strict=True):
        drawn: list[Box] = []
        for action, start, end in row:
            parts = dict(_parts(rank, action.kind, action.stage // layout.pp))
            parts["pp"] = end - start - sum(parts.values())
            drawn += _laid(parts, start, f"{action.kind}{action.micro}")
        drawn += _laid(rank.after, last)
        found.append(drawn)
    return found


def _parts(rank: StageTimes, kind: str, place: int) -> Iterator[tuple[str, float]]:
    forward, backward = rank.stages[place]
    if kind == "F":
        yield "forward", forward.compute
        yield from forward.messages.items()
        return
    yield "backward", backward.compute / (1 if kind == "B" else 2)
    if kind in "BI":
        yield from backward.messages.items()


def _laid(parts: dict[str, float], start: float, label: str = "") -> Iterator[Box]:
    for part, seconds in parts.items():
        if seconds > 1e-9:
            yield Box(start, start + seconds, part, label if part in ("forward", "backward") else "")
            start += seconds


def shares(row: list[Box], end: float) -> dict[str, float]:
    """Of a stage's step, by PARTS; they add up to 1."""
    found = dict.fromkeys([*PARTS, "pp"], 0.0)
    for span in row:
        found["compute" if span.kind in ("forward", "backward") else span.kind] += span.end - span.start
    found["bubble"] = end - sum(found.values())
    return {part: seconds / end for part, seconds in found.items()}


def step(work: Work, layout: Layout, machine: Machine, to: Path) -> bool:
    """A row for each rank of the pp axis; white is the bubble, and the row's name says where its time goes. False
    without matplotlib."""
    rows = spans(work, layout, machine)
    end = max(row[-1].end for row in rows)
    took = f"{end:.2f} s" if end >= 1 else f"{end * 1e3:.3g} ms"
    title = f"{layout} on {layout.world_size:,} x {machine.name}: {took} a step, {work.micro_batches} micro-batches"
    if machine.per_device > 1:
        title += f"; as if each rank always had its part of a device, which {machine.per_device:g} share"
    unit, scale = ("seconds", 1.0) if end >= 1 else ("milliseconds", 1e3)
    words = [[f"{part} {share:.0%}" for part, share in shares(row, end).items() if share > 0.005] for row in rows]
    named = {
        f"pp{number}  {', '.join(words[number])}": [b._replace(start=b.start * scale, end=b.end * scale) for b in row]
        for number, row in enumerate(rows)
    }
    return plots.timeline(named, to, title, COLORS, WORDS, unit)
