"""Pictures of schedules: which rank does what, when. ASCII for the terminal, a file for reports and docs.

    print(picture.ascii(build("zb", 4, 2, 8)))                  # as planned: F 1, B 2, I 1, W 1
    picture.draw(schedule, Path("step.svg"), rows)              # as measured: rows[rank] is Pipeline.timeline of each

A row is a rank of the pp axis. F is a forward, B a backward, I the backward of a stage's input, W that of its weights;
the number is the micro-batch, and the letter after it, with vpp, the rank's chunk: a is its first stage. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median

from isograd.io import plots
from isograd.io.plots import Box
from isograd.pipeline.schedule import COST, Action, Schedule, Timed, idle_share

Rows = Sequence[Sequence[Timed]]
WORDS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
COLORS = {  # of a rank's first chunk, its second, all later ones
    "F": ("#9ecae9", "#6fa8d0", "#4a86b4"), "B": ("#f2b27e", "#d98d50", "#b96a2c"),
    "I": ("#f7d08a", "#dcae55", "#b98a2e"), "W": ("#a8d8a0", "#7cb873", "#55964b"),
}  # fmt: skip


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


def draw(schedule: Schedule, to: Path | BytesIO, rows: Rows | None = None) -> bool:
    """A file by matplotlib, False without it: a box per action, later chunks darker. Into a buffer: SVG."""
    found = schedule.timed() if rows is None else rows
    begin, scale = min(row[0].start for row in found), 1.0 if rows is None else 1e3
    colors = {f"{kind}{n}": COLORS[kind][min(n, 2)] for kind in _kinds(schedule) for n in range(schedule.vpp)}
    drawn = {
        _name(rank): [
            Box((t.start - begin) * scale, (t.end - begin) * scale, f"{t.action.kind}{t.action.stage // schedule.pp}",
                label(schedule, t.action)) for t in row
        ] for rank, row in enumerate(found)
    }  # fmt: skip
    names = {
        key: WORDS[key[0]] + (f", chunk {chr(ord('a') + int(key[1:]))}" if schedule.vpp > 1 else "") for key in colors
    }
    unit = "forwards" if rows is None else "milliseconds"
    return plots.timeline(drawn, to, title(schedule, rows), colors, names, unit)


def svg(schedule: Schedule, rows: Rows | None = None) -> str:
    """The picture as text; empty without matplotlib."""
    buffer = BytesIO()
    return buffer.getvalue().decode() if draw(schedule, buffer, rows) else ""


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
