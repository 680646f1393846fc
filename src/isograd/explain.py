"""Tables for people: who reduces each gradient, over which ranks, in which dtype, with which divisor.

Parameters that differ only in their layer number are one row. The divisor column is
always the same, which is the point.
"""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable

from isograd.contract import Contract, Record, Table, describe_sum

if TYPE_CHECKING:
    from collections.abc import Iterable


def render_contracts(table: Table, width: int) -> str:
    mesh = table.mesh
    shown = RichTable(
        title=f"gradient contracts, layout {str(mesh.layout)!r}, seen from {mesh.where()}",
        caption="divisor: none anywhere; the step multiplies once by 1 / global weight",
    )
    for heading in ("parameter", "global shape", "here", "cut", "summed over: ranks", "in", "divisor"):
        shown.add_column(heading, overflow="fold", no_wrap=heading == "parameter")
    for name, record in _merged(table):
        contract, parameter = record.contract, record.parameter
        here = "x".join(map(str, parameter.shape)) or "scalar"
        whole = "x".join(map(str, contract.shape)) or "scalar"
        cut = ", ".join(f"dim {s.dim} over {_cut_name(s.axis, s.ranges)}" for s in contract.shards) or "-"
        if not parameter.requires_grad:
            shown.add_row(name, whole, here, cut, "frozen: no gradient", "-", "-")
            continue
        wide = "fp64" if parameter.dtype.itemsize == 8 else "fp32"
        shown.add_row(name, whole, here, cut, describe_sum(contract, mesh), wide, "none")
    text = StringIO()
    Console(file=text, width=width).print(shown)
    return text.getvalue()


def _cut_name(axis: str, ranges: tuple[tuple[int, int], ...]) -> str:
    copies = len(ranges) // len(set(ranges))
    return f"{axis} ({copies} replicas)" if copies > 1 else axis


def _merged(table: Iterable[Record]) -> list[tuple[str, Record]]:
    """Records alike but for one layer number, as 'blocks.{0-7}.norm.weight'."""
    groups: dict[tuple[str, Contract, tuple[int, ...], bool], list[tuple[int | None, Record]]] = {}
    for record in table:
        number = re.search(r"\.(\d+)\.", record.name)
        pattern = record.name if number is None else record.name.replace(number[0], ".#.", 1)
        key = (pattern, record.contract, tuple(record.parameter.shape), record.parameter.requires_grad)
        groups.setdefault(key, []).append((int(number[1]) if number else None, record))
    rows = []
    for (pattern, *_), members in groups.items():
        numbers = [n for n, _ in members if n is not None]
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(*numbers)
        rows.append((pattern.replace("#", "{" + span + "}" if len(numbers) > 1 else span, 1), members[0][1]))
    return rows
