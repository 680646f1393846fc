"""The contracts of a model, as a table: who reduces each gradient, over which ranks, in which dtype, by which divisor.

Parameters that differ only in their layer number share one row. The divisor column always says "none": nothing in
isograd averages a gradient.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO

import torch
from torch import nn

from isograd.core.contract import Contract, contract_of
from isograd.core.mesh import Mesh
from isograd.errors import ContractError

TABLE = 110  # columns that the table needs to be read with ease; a narrower terminal gets a list
CAPTION = "divisor: none anywhere; the step multiplies once by 1 / global weight"
HEADINGS = ("parameter", "global shape", "here", "cut", "summed over: ranks", "in", "divisor")


@dataclass(frozen=True)
class ContractRow:
    """One row of the table: a parameter under its first name in the model, with its contract."""

    name: str
    parameter: nn.Parameter
    contract: Contract


class ContractTable:
    """Every parameter of a model, listed once by name, with its contract. Printing it shows what is summed where."""

    def __init__(self, records: list[ContractRow], mesh: Mesh) -> None:
        self.records = {record.name: record for record in records}
        self.mesh = mesh

    def __getitem__(self, name: str) -> Contract:
        return self.records[name].contract

    def __iter__(self) -> Iterator[ContractRow]:
        return iter(self.records.values())

    def __len__(self) -> int:
        return len(self.records)

    def fingerprint(self) -> torch.Tensor:
        """int64 [4]: a hash of all names, global shapes, cuts, partial axes, dtypes and of what is frozen."""
        text = repr([(r.name, r.contract, str(r.parameter.dtype), r.parameter.requires_grad) for r in self])
        digest = hashlib.sha256(text.encode()).digest()
        return torch.frombuffer(bytearray(digest), dtype=torch.int64).clone()

    def render(self, width: int = 140) -> str:
        """The table as text: each parameter, its cuts, and the ranks over which its gradient is summed."""
        from rich.console import Console
        from rich.table import Table as RichTable

        title = f"gradient contracts, layout {str(self.mesh.layout)!r}, seen from {self.mesh.describe_rank()}"
        rows = [_row(name, record, self) for name, record in _merged(self)]
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

    __str__ = render


def contracts(model: nn.Module, mesh: Mesh) -> ContractTable:
    """The contract of every parameter. A parameter shared by two modules is listed once, under its first name."""
    records: list[ContractRow] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            contract = contract_of(parameter)
            if contract is None:
                if type(module).__module__.startswith("isograd."):
                    raise ContractError("IG301", where=mesh.describe_rank(), leaf=leaf, kind=type(module).__name__)
                contract = Contract(tuple(parameter.shape))
            records.append(ContractRow(leaf, parameter, contract))
    return ContractTable(records, mesh)


def describe_sum(contract: Contract, mesh: Mesh) -> str:
    """The axes and ranks over which this rank's gradient of the parameter is summed, as in 'dp+tp: 0-3'."""
    axes = [axis for axis in contract.data.split() if mesh.size(axis) > 1] + list(contract.partial_over)
    ranks = {mesh.rank}
    for axis in axes:
        ranks = {other for rank in ranks for other in mesh.layout.ranks(axis, rank)}
    return f"{'+'.join(axes)}: {_spell(sorted(ranks))}" if axes else "nothing to sum"


def _spell(ranks: list[int]) -> str:
    """'0-7', '0, 4', or '0, 8, ... 120 (16)': readable at any world size."""
    if ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 6:
        return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
    return ", ".join(map(str, ranks))


def _row(name: str, record: ContractRow, table: ContractTable) -> tuple[str, ...]:
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


def _merged(table: Iterable[ContractRow]) -> list[tuple[str, ContractRow]]:
    """Records that differ only in one layer number, under one name, such as 'blocks.{0-7}.norm.weight'."""
    groups: dict[tuple[str, Contract, tuple[int, ...], bool], list[tuple[int | None, ContractRow]]] = {}
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
