"""A report: subjects and their verdict, as plain JSON data and for the terminal."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from isograd_verify.record.events import Collective
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, EXIT, INCONCLUSIVE, NOTE, PASS, Finding, Subject, listed, worst

COLOUR = {PASS: "green", BUG: "red", INCONCLUSIVE: "yellow", NOTE: "cyan"}
WIDTH = 120
LONG_NAME = 48  # characters of a parameter's name; longer ones are broken
MOST_EVENTS = 500  # per rank in a report


@dataclass
class Report:
    """The verdict on several subjects."""

    title: str
    subjects: list[Subject] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """BUG if any subject has one, else INCONCLUSIVE if any is, or if there is none, else PASS."""
        return worst(subject.verdict for subject in self.subjects) if self.subjects else INCONCLUSIVE

    @property
    def ok(self) -> bool:
        """Whether every subject passed."""
        return self.verdict == PASS

    def __bool__(self) -> bool:
        return self.ok

    @property
    def exit_code(self) -> int:
        """What the command line returns for this verdict."""
        return EXIT[self.verdict]

    def findings(self, verdict: str = BUG) -> list[Finding]:
        """The findings of all subjects that have this verdict."""
        return [f for subject in self.subjects for f in subject.findings if f.verdict == verdict]

    def data(self) -> dict[str, Any]:
        """Plain JSON data; numbers that are no numbers are written as words, as JSON has none."""
        subjects = []
        for subject in self.subjects:
            classes = [
                {"class": key, "error": error, "tensor": tensor, "verdict": verdict}
                for key, (error, tensor, verdict) in subject.classes().items()
            ]
            subjects.append({**asdict(subject), "verdict": subject.verdict, "classes": classes})
        whole = {"version": 1, "title": self.title, "verdict": self.verdict, "subjects": subjects}
        return _finite(whole)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return render(self)


def render(report: Report, colour: bool = False, width: int = WIDTH) -> str:
    """A report as text."""
    text = StringIO()
    _print(report, Console(file=text, width=width, force_terminal=colour, no_color=not colour, highlight=False))
    return text.getvalue()


def picture(report: Report, width: int = WIDTH) -> str:
    """What the terminal shows, as an SVG that loads nothing from elsewhere."""
    console = Console(file=StringIO(), width=width, record=True, force_terminal=True, highlight=False)
    _print(report, console)
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="isograd-verify"), flags=re.DOTALL)


def _print(report: Report, console: Console) -> None:
    console.print(f"[bold]{escape(report.title)}[/]")
    for table in _matrices([subject for subject in report.subjects if subject.compared and subject.errors], console):
        console.print(table)
    for subject in report.subjects:
        _subject(console, subject)
    counts = [f"{sum(s.verdict == v for s in report.subjects)} {v}" for v in (PASS, BUG, INCONCLUSIVE)]
    console.print(f"[bold {COLOUR[report.verdict]}]{report.verdict}[/]  ({', '.join(counts)})")


def _matrices(shown: list[Subject], console: Console) -> list[Table]:
    """One table of all subjects, or several where one would have to break words to fit the console."""
    if not shown:
        return []
    table, half = _matrix(shown), len(shown) // 2
    unlimited = console.options.update(max_width=10_000)
    if half and Measurement.get(console, unlimited, table).minimum > console.width:
        return _matrices(shown[:half], console) + _matrices(shown[half:], console)
    return [table]


def _matrix(shown: list[Subject]) -> Table:
    table = Table(caption="largest relative error per kind of parameter, over ranks and blocks, before clip")
    kinds = [kind for subject in shown for kind in subject.classes()]
    table.add_column("parameter", no_wrap=max(map(len, kinds)) <= LONG_NAME)
    for subject in shown:
        table.add_column(f"{escape(subject.name)}\n[{COLOUR[subject.verdict]}]{subject.verdict}[/]", justify="right")
    classes = {subject.name: subject.classes() for subject in shown}
    for key in dict.fromkeys(k for found in classes.values() for k in found):
        held = [classes[subject.name].get(key) for subject in shown]
        words = [("", PASS) if one is None else (f"{one[0]:.1e}", one[2]) for one in held]
        cells = [f"[{COLOUR[v]}]{error}{' ' + v if v != PASS else ''}[/]" if error else "-" for error, v in words]
        table.add_row(escape(key), *cells)
    return table


def _subject(console: Console, subject: Subject) -> None:
    facts = "; ".join(f"{key}: {value}" for key, value in subject.facts.items())
    head = f"[{COLOUR[subject.verdict]}]{subject.verdict}[/] {escape(subject.name)} ({subject.world} ranks)"
    console.print(f"{head}  {escape(facts)}" if facts else head)
    if subject.schedule:
        console.print(escape(subject.schedule["text"]), style="dim", soft_wrap=True)
    for found in subject.findings:
        label = f" {found.bug}" if found.bug else ""
        console.print(f"  [{COLOUR[found.verdict]}]{found.verdict}{label}[/]: {escape(found.sentence)}")
        if found.verdict == NOTE:
            continue
        if found.coefficients:
            bars = ", ".join(f"{name}: {value:.4g}" for name, value in found.coefficients[:8])
            more = f" and {len(found.coefficients) - 8} more" if len(found.coefficients) > 8 else ""
            console.print(f"    coefficients: {escape(bars)}{more}")
        if len(found.tensors) > 3:
            console.print(f"    tensors: {escape(listed(found.tensors, 12))}")
        if found.site and not found.bug and found.site not in found.sentence:
            console.print(f"    where: {escape(found.site)}")
        if found.cause:
            console.print(f"    usual cause: {escape(found.cause)}")
        if found.look:
            console.print(f"    {'look at' if found.cause else 'what to do'}: {escape(found.look)}")


def timeline(recording: Recording) -> list[list[dict[str, Any]]]:
    """Per rank, the first collectives: what the page draws."""
    keys = ("op", "bytes", "start", "seconds", "phase", "module", "site", "dtype", "step")
    lanes = []
    for record in recording.ranks:
        events = record.of(Collective)[:MOST_EVENTS]
        told = [{key: value for key in keys if (value := getattr(e, key)) is not None} for e in events]
        lanes.append([{"group": ",".join(map(str, e.group)), **of} for e, of in zip(events, told, strict=True)])
    return lanes


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
