"""A picture of a predicted step: when each pipeline stage computes, waits for messages, waits for others, and steps.

    Path("step.svg").write_text(gantt.svg(work, layout, machine))

A row is a rank of the pp axis. Each forward and each backward is a box: its compute, and after it the messages that
nothing hides, by axis (in a run they stand between its layers). White is the bubble. After the last backward come what
is left of the gradients' reduction and the gather of parameters, and the optimizer. Beside a row: where its time goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from isograd.layout import Layout
from isograd.plan.machine import Machine
from isograd.plan.step_time import PARTS, Rank, timeline
from isograd.plan.work import Work

COLORS = {
    "forward": "#9ecae9", "backward": "#f2b27e", "tp": "#d6455d", "cp": "#8c5fb8", "ep": "#3f9b52", "pp": "#7a7a7a",
    "dp": "#2b5c9e", "optimizer": "#222222", "bubble": "#ffffff",
}  # fmt: skip
WORDS = {"bubble": "bubble", "dp": "dp: reduction, gather", "pp": "pp: waits for its sends"}
LEFT, TOP, WIDE, SHARES = 52, 84, 1000, 330  # of the picture; SHARES: the column of shares
MOST = 40  # rows of the full height


class Span(NamedTuple):
    """A stretch of time of one stage."""

    part: str  # a key of COLORS
    start: float
    end: float
    told: str


def spans(work: Work, layout: Layout, machine: Machine) -> list[list[Span]]:
    """Of each pipeline rank, in order, without the bubble."""
    ranks, rows = timeline(work, layout, machine)
    last = max(row[-1].end for row in rows)
    found = []
    for rank, row in zip(ranks, rows, strict=True):
        drawn: list[Span] = []
        for action, start, end in row:
            parts = dict(_parts(rank, action.kind, action.stage // layout.pp))
            parts["pp"] = end - start - sum(parts.values())
            name = f"{action.kind} of stage {action.stage}, micro-batch {action.micro}"
            drawn += _laid(parts, start, name)
        drawn += _laid(rank.after, last, "after the last backward")
        found.append(drawn)
    return found


def _parts(rank: Rank, kind: str, place: int) -> Iterator[tuple[str, float]]:
    forward, backward = rank.stages[place]
    if kind == "F":
        yield "forward", forward.compute
        yield from forward.messages.items()
        return
    yield "backward", backward.compute / (1 if kind == "B" else 2)
    if kind in "BI":
        yield from backward.messages.items()


def _laid(parts: dict[str, float], start: float, name: str) -> Iterator[Span]:
    for part, seconds in parts.items():
        if seconds > 1e-9:
            yield Span(part, start, start + seconds, f"{part}: {name}, {seconds * 1e3:.3g} ms")
            start += seconds


def shares(row: list[Span], end: float) -> dict[str, float]:
    """Of a stage's step, by PARTS; they add up to 1."""
    found = dict.fromkeys([*PARTS, "pp"], 0.0)
    for span in row:
        found["compute" if span.part in ("forward", "backward") else span.part] += span.end - span.start
    found["bubble"] = end - sum(found.values())
    return {part: seconds / end for part, seconds in found.items()}


def svg(work: Work, layout: Layout, machine: Machine) -> str:
    """The text of an SVG file; every box has its name and time in a tooltip."""
    rows = spans(work, layout, machine)
    end = max(row[-1].end for row in rows)
    high = 26 if len(rows) <= MOST else max(6, 26 * MOST // len(rows))
    gap = 6 if high > 12 else 2
    width, height = LEFT + WIDE + SHARES, TOP + len(rows) * (high + gap) + 40
    used = [part for part in COLORS if part == "bubble" or any(span.part == part for row in rows for span in row)]
    columns = [part for part in [*PARTS, "pp"] if any(shares(row, end)[part] > 0.0005 for row in rows)]
    title = (
        f"{layout} on {layout.world_size:,} x {machine.name}: {_time(end)} a step, {work.micro_batches} micro-batches"
    )
    if machine.per_device > 1:
        title += f"; as if each rank always had its part of a device, which {machine.per_device:g} share"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{title}</text>',
        *_legend(used),
        *_heading(columns),
    ]
    for number, row in enumerate(rows):
        y = TOP + number * (high + gap)
        if high > 12 or number % 4 == 0:
            parts.append(f'<text x="6" y="{y + high / 2 + 4:g}" font-size="12">pp{number}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDE}" height="{high}" fill="#fff" stroke="#ccc"/>')
        parts += [_box(span, y, high, WIDE / end) for span in row]
        if high > 12 or number % 4 == 0:
            found = shares(row, end)
            for place, part in enumerate(columns):
                x = LEFT + WIDE + 44 + place * 46
                parts.append(
                    f'<text x="{x}" y="{y + high / 2 + 4:g}" font-size="11" text-anchor="end">{found[part]:.1%}</text>'
                )
    parts += _axis(end, TOP + len(rows) * (high + gap) + 12)
    return "\n".join([*parts, "</svg>", ""])


def _legend(used: list[str]) -> Iterator[str]:
    x = LEFT
    for part in used:
        text = WORDS.get(part, part)
        yield f'<rect x="{x}" y="38" width="14" height="14" fill="{COLORS[part]}" stroke="#888"/>'
        yield f'<text x="{x + 19}" y="50" font-size="12">{text}</text>'
        x += 36 + 7 * len(text)


def _heading(columns: list[str]) -> Iterator[str]:
    for place, part in enumerate(columns):
        x = LEFT + WIDE + 44 + place * 46
        words = {"compute": "comp.", "optimizer": "optim."}.get(part, part)
        yield f'<text x="{x}" y="{TOP - 8}" font-size="11" fill="#555" text-anchor="end">{words}</text>'


def _box(span: Span, y: int, high: int, scale: float) -> str:
    x, wide = LEFT + span.start * scale, (span.end - span.start) * scale
    edge = ' stroke="#fff" stroke-width="0.6"' if wide > 4 and span.part in ("forward", "backward") else ""
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{high}" fill="{COLORS[span.part]}"{edge}>'
        f"<title>{span.told}</title></rect>"
    )


def _axis(end: float, y: int) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        x = LEFT + WIDE * tenth / 10
        time = _time(end * tenth / 10)
        yield f'<text x="{x:g}" y="{y + 14}" font-size="11" fill="#555" text-anchor="middle">{time}</text>'


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
