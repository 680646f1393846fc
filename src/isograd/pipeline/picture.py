"""Pictures of schedules: which rank does what, when. ASCII for the terminal, SVG for reports and docs.

    print(picture.ascii(build("zb", 4, 2, 8)))                  # as planned: F 1, B 2, I 1, W 1
    picture.svg(schedule, rows)                                 # as measured: rows[rank] is Pipeline.timeline of each

A row is a rank of the pp axis. F is a forward, B a backward, I the backward of a stage's input, W that of its weights;
the number is the micro-batch, and the letter after it, with vpp, the rank's chunk: a is its first stage. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from isograd.pipeline.schedule import COST, Action, Schedule, Timed, idle_share

Rows = Sequence[Sequence[Timed]]
WORDS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
COLORS = {"F": "#9ecae9", "B": "#f2b27e", "I": "#f7d08a", "W": "#a8d8a0"}
INK = {"F": "#1f5f8b", "B": "#a5561a", "I": "#8a6a10", "W": "#2f7a2a"}  # borders, and later chunks
LEFT, TOP, HIGH, GAP, WIDE = 48, 54, 30, 8, 1100


def ascii(schedule: Schedule, rows: Rows | None = None, *, width: int | None = None) -> str:
    """A line per rank, with dots where the rank waits; lines longer than `width` continue below."""
    drawn = schedule.timed() if rows is None else rows
    cell = max(len(label(schedule, timed.action)) for row in drawn for timed in row) + 1
    begin = min(row[0].start for row in drawn)
    unit = 1.0 if rows is None else median(t.end - t.start for row in rows for t in row if t.action.kind == "F")
    lines = [_line(schedule, row, begin, cell / unit) for row in drawn]
    longest = max(map(len, lines))
    room = longest if width is None else max(cell, width - len(_name(len(lines))) - 1)
    parts = []
    for start in range(0, longest, room):
        pieces = (line.ljust(longest, ".")[start : start + room] for line in lines)
        parts.append("\n".join(f"{_name(rank)} {piece}" for rank, piece in enumerate(pieces)))
    held = ", ".join(str(schedule.in_flight(rank)) for rank in range(schedule.pp))
    heading = f"{title(schedule, rows)}\nstage passes whose activations a rank holds at a time: {held}"
    return "\n\n".join([heading, *parts, legend(schedule)])


def svg(schedule: Schedule, rows: Rows | None = None) -> str:
    """The text of an SVG file: a box per action, with its full name and time in a tooltip."""
    drawn = schedule.timed() if rows is None else rows
    begin, end = min(row[0].start for row in drawn), max(row[-1].end for row in drawn)
    scale = WIDE / (end - begin)
    width, height = LEFT + WIDE + 12, TOP + len(drawn) * (HIGH + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="bold">{title(schedule, rows)}</text>',
        f'<text x="{LEFT}" y="40" font-size="12" fill="#555">{legend(schedule)}</text>',
    ]
    for rank, row in enumerate(drawn):
        y = TOP + rank * (HIGH + GAP)
        parts.append(f'<text x="8" y="{y + HIGH / 2 + 5:g}" font-size="13">{_name(rank)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDE}" height="{HIGH}" fill="#f1f1f1"/>')
        parts += [_box(schedule, timed, LEFT + (timed.start - begin) * scale, y, scale, rows) for timed in row]
    length = f"{(end - begin) * 1e3:.1f} ms" if rows is not None else f"{end - begin:g} forwards"
    parts.append(f'<text x="{LEFT + WIDE}" y="{height - 12}" font-size="12" text-anchor="end">{length}</text>')
    return "\n".join([*parts, "</svg>", ""])


def title(schedule: Schedule, rows: Rows | None = None) -> str:
    """The schedule's name and its bubble: in theory, and measured if `rows` is given."""
    chunks = f" vpp{schedule.vpp}" if schedule.vpp > 1 else ""
    name = f"{schedule.name}, pp{schedule.pp}{chunks}, {schedule.micro_batches} micro-batches"
    if rows is None:
        costs = ", ".join(f"{kind} {COST[kind]:g}" for kind in _kinds(schedule))
        return f"{name}: bubble {schedule.bubble():.1%} ({costs})"
    took = {timed.action: timed.end - timed.start for row in rows for timed in row}
    theory = schedule.bubble(took.__getitem__)
    return f"{name}: bubble measured {idle_share(rows):.1%}, {theory:.1%} if messages took no time"


def legend(schedule: Schedule) -> str:
    """What the letters in a picture mean."""
    text = ", ".join(f"{kind} {WORDS[kind]}" for kind in _kinds(schedule))
    return text + ("; a, b, ...: the rank's first chunk, its second" if schedule.vpp > 1 else "")


def _kinds(schedule: Schedule) -> list[str]:
    return [kind for kind in WORDS if any(a.kind == kind for order in schedule.orders for a in order)]


def label(schedule: Schedule, action: Action) -> str:
    """A short name of an action, such as F3 or F3b."""
    chunk = chr(ord("a") + action.stage // schedule.pp) if schedule.vpp > 1 else ""
    return f"{action.kind}{action.micro}{chunk}"


def _name(rank: int) -> str:
    return f"pp{rank}"


def _line(schedule: Schedule, row: Sequence[Timed], begin: float, scale: float) -> str:
    line = ""
    for timed in row:
        start, stop = round((timed.start - begin) * scale), round((timed.end - begin) * scale)
        line = line.ljust(start, ".")
        room = max(stop - len(line), 1)  # an action too short for a column is drawn as one column
        line += label(schedule, timed.action)[: max(room - 1, 1)].ljust(room - 1, "-").ljust(room)
    return line


def _box(schedule: Schedule, timed: Timed, x: float, y: float, scale: float, rows: Rows | None) -> str:
    action, wide = timed.action, (timed.end - timed.start) * scale
    chunk, text = action.stage // schedule.pp, label(schedule, action)
    took = f"{(timed.end - timed.start) * 1e3:.2f} ms" if rows is not None else f"{timed.end - timed.start:g}"
    tip = f"{WORDS[action.kind]} of stage {action.stage}, micro-batch {action.micro}: {took}"
    # Later chunks are darker: the border's colour shows through.
    shade = f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{HIGH}" fill="{INK[action.kind]}"/>'
    opacity = max(0.35, 1.0 - 0.3 * chunk)
    face = (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{HIGH}" fill="{COLORS[action.kind]}" '
        f'fill-opacity="{opacity:g}" stroke="{INK[action.kind]}" stroke-width="0.7"/>'
    )
    words = f'<text x="{x + wide / 2:.2f}" y="{y + HIGH / 2 + 4:g}" font-size="10" text-anchor="middle">{text}</text>'
    fits = wide >= 6 * len(text) + 2
    return f"<g><title>{tip}</title>{shade if chunk else ''}{face}{words if fits else ''}</g>"
