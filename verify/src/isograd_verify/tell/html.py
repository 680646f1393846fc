"""The report as one HTML file, which loads nothing: a wrong gradient is found faster in a picture than in numbers.

Every text in it comes from a model or a path and may hold anything, so everything goes through `_text`.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from isograd_verify.tell.findings import BUG, INCONCLUSIVE, NOTE, PASS
from isograd_verify.tell.report import Report

MARKS = {PASS: "✓", BUG: "✗", INCONCLUSIVE: "?", NOTE: "i"}  # a verdict must be told apart without colour
PHASES = ("forward", "backward", "step", "other")
MOST_PARAMETERS, MOST_EVENTS, MOST_BARS, MOST_NAMES, MOST_LETTERS = 200, 500, 32, 8, 36
CELL, LANE, LEFT = 22, 26, 62  # pixels: a heat map's cell, a rank's lane in the timeline and the room for its name
DECADES = 17  # colours of the heat map: 1e-16, 1e-15, ... 1
LIGHT = ("e3eef6", "a9cfe0", "f7d774", "e8743b", "8f0d24")
DARK = ("1d2f3f", "2f6f85", "b99a2c", "e8743b", "ff5c6c")

STYLE, SCRIPT = (Path(__file__).with_name(f"page.{kind}").read_text() for kind in ("css", "js"))


def page(report: Report) -> str:
    """The whole report as one HTML5 document."""
    data = report.data()
    subjects = data["subjects"]
    title, said = _text(data["title"]), [subject["verdict"] for subject in subjects]
    passed, bugs, unsure = said.count(PASS), said.count(BUG), said.count(INCONCLUSIVE)
    tally = f"{_many(len(said), 'subject')}: {passed} passed, {bugs} with a bug, {unsure} inconclusive"
    body = "".join(_subject(number, subject) for number, subject in enumerate(subjects))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{_text(data["verdict"])}: {title}</title>
<style>{STYLE}{_shades(LIGHT)}
@media (prefers-color-scheme: dark) {{ {_shades(DARK)} }}</style></head><body>
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs><pattern id="hatch" width="5" height="5"
 patternUnits="userSpaceOnUse"><path d="M-1 6 6 -1" /></pattern></defs></svg>
<h1>{title}</h1>
<p id="verdict">{_verdict(data["verdict"])}</p>
<p id="tally">{tally if subjects else "No subject was checked, so nothing could be told."}</p>
{_matrix(subjects)}
{body}
<div id="tip" hidden></div><script>{SCRIPT}</script>
</body></html>
"""


def _text(value: object) -> str:
    return escape(str(value), quote=True)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _number(value: object) -> float:
    """Numbers of `data()` may be words ('NaN', 'Infinity'), or be missing."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _short(value: object) -> str:
    """'3.1e-16'; zero and numbers that are none keep their names."""
    number = _number(value)
    return "0" if number == 0 else f"{number:.1e}" if math.isfinite(number) else _text(value)


def _verdict(verdict: str) -> str:
    return f'<span class="verdict {_text(verdict)}">{MARKS.get(verdict, "")} {_text(verdict)}</span>'


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """The second half of each pair is HTML already; empty ones are left out."""
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{value}</dd>" for name, value in pairs if value)
    return f"<dl>{rows}</dl>" if rows else ""


def _scroll(inner: str, label: str) -> str:
    """A box that scrolls by itself, so that the page never does sideways; keys reach it too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{inner}</div>'


def _matrix(subjects: list[dict[str, Any]]) -> str:
    """Layouts against classes of parameters: what is wrong everywhere, and what under one layout only."""
    cells = [{entry["class"]: entry for entry in subject["classes"]} for subject in subjects]
    names = list(dict.fromkeys(name for column in cells for name in column))
    if not names:
        return ""
    heads = "".join(
        f'<th scope="col"><a href="#s{n}">{_text(s["name"])}</a><br>{_verdict(s["verdict"])}</th>'
        for n, s in enumerate(subjects)
    )
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th>{"".join(_cell(column.get(name)) for column in cells)}</tr>'
        for name in names
    )
    table = f'<table id="matrix"><thead><tr><th>parameters</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    legend = f"Worst relative error of each kind of parameter. {MARKS[PASS]} equal to rounding, {MARKS[BUG]} wrong, "
    legend += f"{MARKS[INCONCLUSIVE]} could not be told, – not compared."
    return f'<h2>Layouts and parameters</h2><p class="soft">{legend}</p>{_scroll(table, "layouts and parameters")}'


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return '<td class="absent">–</td>'
    verdict, worst = _text(entry["verdict"]), _text(f"{entry['tensor']}: {entry['error']}")
    return f'<td class="{verdict}" title="{worst}">{_short(entry["error"])} <b>{MARKS[entry["verdict"]]}</b></td>'


def _subject(number: int, subject: dict[str, Any]) -> str:
    """One layout; those that passed are closed, as nobody needs them first."""
    facts = {"ranks": subject["world"], "compared": "with a reference" if subject["compared"] else "no, only watched"}
    shown = _definitions((name, _text(value)) for name, value in {**facts, **subject["facts"]}.items())
    found = "".join(map(_finding, subject["findings"])) or "<p>Nothing was found to be wrong.</p>"
    head = f"<summary>{_verdict(subject['verdict'])} {_text(subject['name'])}</summary>"
    opened = "" if subject["verdict"] == PASS else " open"
    drawn = _schedule(subject["schedule"]) + _heat_map(subject) + _timeline(subject["timeline"])
    return f'<details class="subject" id="s{number}"{opened}>{head}{shown}{found}{drawn}</details>\n'


def _schedule(schedule: dict[str, str]) -> str:
    if not schedule:
        return ""
    source = base64.b64encode(schedule["svg"].encode()).decode()
    image = f'<img class="schedule" alt="{_text(schedule["text"])}" src="data:image/svg+xml;base64,{source}">'
    image = image if source else f"<pre>{_text(schedule['text'])}</pre>"  # no matplotlib
    told = "<figcaption>What each pipeline rank did when, in the last step, while it was watched</figcaption>"
    return f"<h3>Schedule</h3><figure>{told}{_scroll(image, 'schedule')}</figure>"


def _finding(finding: dict[str, Any]) -> str:
    names = [f'<span class="mono">{_text(name)}</span>' for name in finding["tensors"]]
    tensors = ", ".join(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        rest = ", ".join(names[MOST_NAMES:])
        tensors += f"<details><summary>and {len(names) - MOST_NAMES:,} more</summary>{rest}</details>"
    said = [(name, _text(finding[key])) for name, key in (("axis", "axis"), ("cause", "cause"), ("look at", "look"))]
    verdict, bug = finding["verdict"], _text(finding["bug"])
    return (
        f'<article class="of-{_text(verdict)}">{_verdict(verdict)} <span class="mono">{bug}</span>'
        f'<p class="sentence">{_text(finding["sentence"])}</p>{_definitions([("tensors", tensors), *said])}'
        f"{_bars(finding['coefficients'])}</article>"
    )


def _expected(values: list[float]) -> tuple[float, str]:
    """All parts should weigh the same: 1 where any or none of them shows it, else what most of them have."""
    common = Counter(round(value, 3) for value in values if math.isfinite(value))
    value, times = common.most_common(1)[0] if common else (1.0, 1)
    if 1.0 in common or times == 1 or len(common) == 1:
        return 1.0, "what is expected, 1"
    return value, f"what most have, {value:g}"


def _bars(coefficients: list[list[Any]]) -> str:
    """How much of each part reached the gradient, as bars from zero with a line where they should end."""
    parts = [(str(label), _number(value), value) for label, value in coefficients]
    if not parts:
        return ""
    expected, words = _expected([value for _, value, _ in parts])
    caption = f"How much of each part is in the gradient; the dashed line is {words}."
    if len(parts) > MOST_BARS:
        caption += f" Shown are the {MOST_BARS} of {len(parts):,} that are furthest from it."
        near = [abs(value - expected) if math.isfinite(value) else math.inf for _, value, _ in parts]
        parts = [parts[n] for n in sorted(sorted(range(len(parts)), key=near.__getitem__)[-MOST_BARS:])]
    finite = [value for _, value, _ in parts if math.isfinite(value)]
    low, high = min(0.0, expected, *finite), max(0.0, expected, *finite)
    left, height = 8 + 7.3 * min(max(len(label) for label, _, _ in parts), MOST_LETTERS), 8 + 20 * len(parts)
    unit = 190 / (high - low or 1.0)
    zero, goal = left - low * unit, left + (expected - low) * unit
    drawn = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}" />']
    drawn += [_bar(6 + 20 * n, part, zero, unit, expected) for n, part in enumerate(parts)]
    drawn.append(f'<line class="expected" x1="{goal:.1f}" x2="{goal:.1f}" y1="0" y2="{height}" />')
    whole = left + 190 + 64
    box = f'class="bars" width="{whole:.0f}" height="{height}" viewBox="0 0 {whole:.0f} {height}" role="img"'
    svg = f'<svg {box} aria-label="coefficients">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{_scroll(svg, 'coefficients')}</figure>"


def _bar(y: int, part: tuple[str, float, object], zero: float, unit: float, expected: float) -> str:
    label, value, exact = part
    cut = label if len(label) <= MOST_LETTERS else label[: MOST_LETTERS - 1] + "…"
    finite, right = math.isfinite(value), abs(value - expected) < 1e-3 * max(1.0, abs(expected))
    start, end = sorted((zero, zero + value * unit)) if finite else (zero, zero)
    goal = zero + expected * unit
    after = 6 + (goal if goal - 50 < end < goal else end)  # the number never lies on the dashed line
    off, red = ("", "") if right else (' class="off"', ' class="BUG"')
    size = f'x="{start:.2f}" y="{y + 2}" width="{end - start:.2f}" height="12"'
    bar = f"<rect{off} {size}><title>{_text(f'{label}: {exact}')}</title></rect>"
    number = f'<text{red} x="{after:.1f}" y="{y + 12}">{_text(f"{value:.5g}" if finite else exact)}</text>'
    return f'<text x="0" y="{y + 12}">{_text(cut)}<title>{_text(label)}</title></text>{bar * finite}{number}'


def _shades(stops: tuple[str, ...]) -> str:
    """One CSS rule per decade of error, between the given colours."""
    rules = []
    for decade in range(DECADES):
        place = decade / (DECADES - 1) * (len(stops) - 1)
        below = min(int(place), len(stops) - 2)
        pairs = [(int(stops[below][i : i + 2], 16), int(stops[below + 1][i : i + 2], 16)) for i in (0, 2, 4)]
        rgb = ",".join(f"{a + (b - a) * (place - below):.0f}" for a, b in pairs)
        rules.append(f".d{decade}{{fill:rgb({rgb})}}")
    return "".join(rules)


def _worst(errors: list[Any]) -> float:
    numbers = [_number(error) for error in errors if error is not None]
    return max((math.inf if math.isnan(number) else number for number in numbers), default=-1.0)


def _heat_map(subject: dict[str, Any]) -> str:
    """Parameters x ranks: one dark row is a parameter's fault, one dark column a rank's."""
    rows = list(subject["by_rank"].items())
    if not rows:
        return ""
    caption = "A column per rank, then the worst error and the name."
    if len(rows) > MOST_PARAMETERS:
        caption = f"Shown are the {MOST_PARAMETERS} worst of {len(rows):,} parameters, the worst first. {caption}"
        rows = sorted(rows, key=lambda row: -_worst(row[1]))[:MOST_PARAMETERS]
    ranks = max(subject["world"], *(len(errors) for _, errors in rows))
    pairs = [(tensor, finding["verdict"]) for finding in subject["findings"] for tensor in finding["tensors"]]
    said = {tensor: verdict for worse in (INCONCLUSIVE, BUG) for tensor, verdict in pairs if verdict == worse}
    drawn = [f'<text class="soft" x="{CELL * n + 4}" y="12">{n}</text>' for n in range(ranks)]
    drawn += [_heat_row(18 + 17 * n, name, errors, ranks, said.get(name, "")) for n, (name, errors) in enumerate(rows)]
    size = f'width="{CELL * ranks + 90 + 7.6 * max(len(name) for name, _ in rows):.0f}" height="{18 + 17 * len(rows)}"'
    svg = f'<svg class="cells" {size} role="img" aria-label="errors of parameters on ranks">{"".join(drawn)}</svg>'
    ramp = "".join(f'<rect class="d{n}" x="{11 * n}" y="0" width="11" height="12" />' for n in range(DECADES))
    keys = f'<span>1e-16 <svg width="{11 * DECADES}" height="12" style="margin:0 .3rem">{ramp}</svg> 1 or more</span>'
    keys += _key("none", "not held on this rank") + _key("nan", "NaN or infinite")
    told = f'<figcaption>{caption}</figcaption><div class="keys">{keys}</div>'
    return f"<h3>Relative error of each parameter on each rank</h3><figure>{told}{_scroll(svg, 'heat map')}</figure>"


def _heat_row(y: int, name: str, errors: list[Any], ranks: int, verdict: str) -> str:
    """Cells first and the name last: on a narrow screen the colours are what must be in view."""
    drawn, shown = [], _text(name)
    for rank, error in enumerate([*errors, *[None] * (ranks - len(errors))]):
        shade, words = ("none", "not held here") if error is None else ("nan", _text(error))
        if math.isfinite(size := _number(error)):
            shade = f"d{min(max(round(math.log10(size)) + DECADES - 1, 0), DECADES - 1)}" if size > 0 else "d0"
        place = f'x="{CELL * rank}" y="{y}" width="{CELL - 1}" height="16"'
        drawn.append(f'<rect class="{shade}" {place}><title>{shown}\nrank {rank}: {words}</title></rect>')
    worst = _worst(errors)
    number = "–" if worst < 0 else "NaN" if "NaN" in errors else "Infinity" if math.isinf(worst) else _short(worst)
    shown, right = f"{shown} {MARKS.get(verdict, '')}", CELL * ranks
    text = f'<tspan x="{right + 8}">{number}</tspan><tspan x="{right + 74}">{shown}</tspan>'
    return f'{"".join(drawn)}<text class="{verdict}" y="{y + 12}">{text}</text>'


def _key(name: str, words: str) -> str:
    box = f'<rect class="{name}" x="1" y="1" width="12" height="12" />'
    return f'<span><svg width="14" height="14">{box}</svg>{words}</span>'


def _seconds(seconds: float) -> str:
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1, "s")
    return f"{seconds * scale:.4g} {unit}" if seconds else "0"


def _placed(events: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, Any]]]:
    """Start, length and event; one that does not say when it started follows the one before it."""
    starts = [_number(event.get("start")) for event in events]
    clock, placed = next(filter(math.isfinite, starts), 0.0), []
    for start, event in zip(starts, events, strict=True):
        begin, length = start if math.isfinite(start) else clock, _number(event.get("seconds"))
        length = max(length, 0.0) if math.isfinite(length) else 0.0
        placed.append((begin, length, event))
        clock = begin + length
    return placed


def _timeline(ranks: list[list[dict[str, Any]]]) -> str:
    """Collectives of each rank on one clock: a rank that waits, or that takes another road, stands out."""
    lanes = [_placed(events[:MOST_EVENTS]) for events in ranks]
    spans = [(start, start + length) for lane in lanes for start, length, _ in lane]
    if not spans:
        return ""
    begin, whole = min(start for start, _ in spans), max(end for _, end in spans) - min(start for start, _ in spans)
    width = min(max(960, 6 * max(map(len, lanes))), 4000)  # many events need room; the box scrolls
    unit, bottom = width / (whole or 1.0), LANE * len(lanes)
    drawn = _ticks(whole, unit, bottom) + "".join(
        f'<text x="0" y="{LANE * n + 17}">rank {n}</text>'
        f'<rect class="lane" x="{LEFT}" y="{LANE * n + 3}" width="{width}" height="{LANE - 6}" />'
        + "".join(_event(LANE * n + 3, start - begin, length, unit, event) for start, length, event in lane)
        for n, lane in enumerate(lanes)
    )
    cut = [f"rank {n}: first {MOST_EVENTS} of {len(r):,}" for n, r in enumerate(ranks) if len(r) > MOST_EVENTS]
    told = f"{_many(sum(map(len, ranks)), 'collective')} on {_many(len(ranks), 'rank')}, {_seconds(whole)} drawn."
    told += f" Not all are shown: {', '.join(cut)}." if cut else ""
    size = f'width="{LEFT + width + 60}" height="{bottom + 22}" role="img" aria-label="collectives of each rank"'
    svg = _scroll(f'<svg class="events" {size}>{drawn}</svg>', "timeline")
    keys = "".join(_key(phase, phase) for phase in PHASES)
    return f'<h3>Collectives</h3><figure><figcaption>{told}</figcaption><div class="keys">{keys}</div>{svg}</figure>'


def _ticks(whole: float, unit: float, bottom: int) -> str:
    step = 10.0 ** math.floor(math.log10(whole / 4)) if whole > 0 else 1.0
    step *= next((factor for factor in (5, 2) if whole / (step * factor) >= 4), 1)
    return "".join(
        f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 4}" />'
        f'<text class="soft" x="{x + 3:.1f}" y="{bottom + 16}">{_seconds(time)}</text>'
        for time, x in ((n * step, LEFT + n * step * unit) for n in range(int(whole / step) + 1))
    )


def _event(y: int, start: float, length: float, unit: float, event: dict[str, Any]) -> str:
    phase = event.get("phase") if event.get("phase") in PHASES else "other"
    place = f'x="{LEFT + start * unit:.2f}" y="{y}" width="{max(length * unit, 1):.2f}" height="{LANE - 6}"'
    bytes_ = event.get("bytes")
    size = f"{bytes_:,} bytes" if isinstance(bytes_, int) else ""
    lines = [f"{event.get('op', 'collective')} over ranks {event.get('group', '?')}"]
    lines.append(" ".join(filter(None, (size, str(event.get("dtype", ""))))))
    lines.append(f"{_seconds(length)}, at {_seconds(start)}")
    lines += [f"{key} {event[key]}" for key in ("phase", "step", "module", "site") if event.get(key) not in (None, "")]
    told = _text("\n".join(filter(None, lines)))
    return f'<rect class="{phase}" {place}><title>{told}</title></rect>'
