"""Tables for people: who reduces each gradient, over which ranks, in which dtype, with which divisor.

Parameters that differ only in their layer number share one row. The divisor column always says "none": nothing in
isograd averages a gradient.
"""

from __future__ import annotations

import re
import textwrap
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable

from isograd.contract import Contract, Record, Table, describe_sum

if TYPE_CHECKING:
    from collections.abc import Iterable


TABLE = 110  # columns that the table needs to be read with ease; a narrower terminal gets a list
CAPTION = "divisor: none anywhere; the step multiplies once by 1 / global weight"
HEADINGS = ("parameter", "global shape", "here", "cut", "summed over: ranks", "in", "divisor")


def render_contracts(table: Table, width: int) -> str:
    """The contracts of a model as text of at most `width` columns: a table, or a list where a table would not fit."""
    mesh = table.mesh
    title = f"gradient contracts, layout {str(mesh.layout)!r}, seen from {mesh.where()}"
    rows = [_row(name, record, table) for name, record in _merged(table)]
    if width < TABLE:
        parts = [title, *(_listed(row) for row in rows), CAPTION]
        return "\n".join(_wrapped(line, width) for part in parts for line in part.split("\n")) + "\n"
    shown = RichTable(title=title, caption=CAPTION)
    for heading in HEADINGS:
        shown.add_column(heading, overflow="fold", no_wrap=heading == "parameter")
    for row in rows:
        shown.add_row(*row)
    text = StringIO()
    Console(file=text, width=width).print(shown)
    return text.getvalue()


def _row(name: str, record: Record, table: Table) -> tuple[str, ...]:
    """One parameter's cells, in the order of HEADINGS."""
    contract, parameter = record.contract, record.parameter
    here = "x".join(map(str, parameter.shape)) or "scalar"
    whole = "x".join(map(str, contract.shape)) or "scalar"
    cut = ", ".join(f"dim {s.dim} over {_cut_name(s.axis, s.ranges)}" for s in contract.shards) or "-"
    if not parameter.requires_grad:
        return name, whole, here, cut, "frozen: no gradient", "-", "-"
    wide = "fp64" if parameter.dtype.itemsize == 8 else "fp32"
    return name, whole, here, cut, describe_sum(contract, table.mesh), wide, "none"


def _listed(row: tuple[str, ...]) -> str:
    """A row of the table as two lines."""
    name, whole, here, cut, summed, wide, divisor = row
    shape = f"{whole}, here {here}" + ("" if cut == "-" else f": {cut}")
    gradient = summed if wide == "-" else f"summed over {summed}, in {wide}, divisor {divisor}"
    return f"{name}  {shape}\n    {gradient}"


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False) if len(line) > width else line


def _cut_name(axis: str, ranges: tuple[tuple[int, int], ...]) -> str:
    copies = len(ranges) // len(set(ranges))
    return f"{axis} ({copies} replicas)" if copies > 1 else axis


def _merged(table: Iterable[Record]) -> list[tuple[str, Record]]:
    """Records that differ only in one layer number, merged under a name such as
    'blocks.{0-7}.norm.weight'."""
    groups: dict[tuple[str, Contract, tuple[int, ...], bool], list[tuple[int | None, Record]]] = {}
    for record in table:
        number = re.search(r"\.(\d+)\.", record.name)
        pattern = record.name if number is None else record.name.replace(number[0], ".#.", 1)
        key = (pattern, record.contract, tuple(record.parameter.shape), record.parameter.requires_grad)
        groups.setdefault(key, []).append((int(number[1]) if number else None, record))
    rows = []
    for (pattern, *_), members in groups.items():
        numbers = [n for n, _ in members if n is not None]
        span = _spans(numbers)
        rows.append((pattern.replace("#", "{" + span + "}" if len(numbers) > 1 else span, 1), members[0][1]))
    return rows


def _spans(numbers: list[int]) -> str:
    """'0-7'; '1,3,5' where layers take turns; '0,2,4-7'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
