"""What a parameter's gradient owes, declared once, where the parameter is made.

A gradient *owes* an axis when it is still a partial sum over the ranks of that axis. A Contract gives a parameter's
global shape, the part of it that this rank holds along each axis, and the axes its gradient owes. The engine pays these
debts; buckets, norm, clipping, checkpoints and replica checks are derived from contracts and from nothing else.
`contracts(model, mesh)` is the table that answers "who reduces this gradient, over which ranks, with which divisor".

Every parameter owes its *data axes*: those over which ranks hold copies of it and give it different tokens. These are
dp and cp, but for one exception. The weights of routed experts are cut over ep, and the exchange of tokens has brought
an expert the tokens of its whole ep group; so it owes edp, the ranks that hold copies of it, and nothing else. Owners
of rows, buckets, norm, checkpoints and replica checks follow from `Contract.data`.

A parameter of a foreign module that declares nothing owes dp and cp. A parameter of an isograd layer without a contract
is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isograd.comm import raw
from isograd.comm.raw import even_sizes
from isograd.errors import ContractError
from isograd.mesh import DATA, EXPERT_DATA, Mesh

_MARK = "_isograd_contract"
_START = "_isograd_start"
BESIDE = {DATA: "tp", EXPERT_DATA: "ep"}  # of data axes, the other axis of a stage: it may cut what has them
Start = Callable[[Sequence[tuple[int, int]], torch.device], torch.Tensor]  # values of a box of the global tensor


@dataclass(frozen=True)
class Shard:
    """This parameter is cut along `dim` over `axis`: the member with index i holds rows ranges[i] = (start, stop).

    Members with equal ranges are replicas of one another (key and value heads fewer than tp ranks).
    """

    axis: str
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def even(cls, axis: str, dim: int, length: int, parts: int) -> Shard:
        """Cut `length` into parts that differ by at most one."""
        ends, at = [], 0
        for size in even_sizes(length, parts):
            ends.append((at, at + size))
            at += size
        return cls(axis, dim, tuple(ends))


@dataclass(frozen=True)
class Contract:
    """The global shape of a parameter, how it is cut over ranks, and which axes its gradient owes."""

    shape: tuple[int, ...]  # global
    shards: tuple[Shard, ...] = ()
    owes: tuple[str, ...] = ()  # beyond the data axes: "tp", "tp/2" for blocks of 2 tp neighbours, "pp:0+3" for a tie
    data: str = DATA  # over which ranks hold copies and sum what their tokens gave: "edp" for routed experts

    @property
    def beside(self) -> str:
        """The axis of a stage that is not among the data axes: its ranks hold other parts, or replicas."""
        return BESIDE[self.data]

    @property
    def cut(self) -> Shard | None:
        """How the ranks beside the data axes cut it; None: each holds all of it."""
        return next((shard for shard in self.shards if shard.axis == self.beside), None)

    @property
    def stacked(self) -> bool:
        """Whether each row of dim 0 is a parameter of its own: an expert's."""
        return self.data == EXPERT_DATA

    @property
    def ties(self) -> tuple[str, ...]:
        """The axes owed to other pipeline stages that use the same parameter."""
        return tuple(axes for axes in self.owes if axes.startswith("pp"))

    def local(self, mesh: Mesh) -> tuple[tuple[int, int], ...]:
        """The (start, stop) that this rank holds along each dimension of the global tensor."""
        box = [(0, size) for size in self.shape]
        for shard in self.shards:
            box[shard.dim] = shard.ranges[mesh.index(shard.axis)]
        return tuple(box)

    def counted_here(self, mesh: Mesh) -> bool:
        """Whether this rank's copy is the one that stands for its replicas and ties in norms and checkpoints."""
        if any(mesh.index(axes) for axes in self.ties):
            return False
        index = mesh.index(self.beside)
        if self.cut is None:
            return index == 0
        ranges = self.cut.ranges
        return ranges.index(ranges[index]) == index


def declare(
    parameter: nn.Parameter,
    mesh: Mesh,
    *,
    shape: tuple[int, ...],
    shards: tuple[Shard, ...] = (),
    owes: tuple[str, ...] = (),
    data: str = DATA,
) -> nn.Parameter:
    """Attach a contract to a parameter that this rank has just made; its local shape must agree with the contract.

    `owes`: axes beyond the data axes. Cuts and debts over axes of one rank are left out. `data`: "edp" for the weights
    of routed experts, whose gradient here is that of all tokens of the ep group.
    """
    _refuse_axes(shards, owes, data, mesh)
    contract = Contract(tuple(shape), tuple(s for s in shards if mesh.size(s.axis) > 1), owing(mesh, owes), data)
    expected = tuple(stop - start for start, stop in contract.local(mesh))
    if tuple(parameter.shape) != expected:
        raise ContractError(
            "IG302",
            "a parameter's local shape contradicts its contract",
            seen=tuple(parameter.shape),
            expected=f"{expected} of global {contract.shape}",
            where=mesh.where(),
        )
    setattr(parameter, _MARK, contract)
    return parameter


def _refuse_axes(shards: Sequence[Shard], owes: Sequence[str], data: str, mesh: Mesh) -> None:
    """Members of the data axes hold copies, and no rank's gradient is summed twice."""
    beside = BESIDE.get(data)
    wrong = [f"cut over {shard.axis!r}" for shard in shards if shard.axis != beside]
    wrong += [f"owes {axes!r}" for axes in owes if data != DATA and not axes.startswith("pp")]
    if beside is None or wrong:
        raise ContractError(
            "IG304",
            "the axes of a contract contradict each other",
            seen=", ".join([f"data axes {data!r}", *wrong]),
            expected="data axes 'dp cp' with cuts over tp; or data axes 'edp' with cuts over ep and no debt but ties, "
            "as edp and ep are all ranks of a stage",
            fix="declare(..., shards=(Shard.even('ep', 0, experts, mesh.size('ep')),), data='edp') for routed experts",
            where=mesh.where(),
        )


def contract_of(parameter: torch.Tensor) -> Contract | None:
    """The contract declared for this parameter, or None."""
    found = getattr(parameter, _MARK, None)
    return found if isinstance(found, Contract) else None


def remember_start(parameter: nn.Parameter, start: Start) -> None:
    """Attach a function that makes the initial values of any box of a parameter on the meta device."""
    setattr(parameter, _START, start)


def start_of(parameter: torch.Tensor) -> Start | None:
    """The function that makes this parameter's initial values, or None."""
    found: Start | None = getattr(parameter, _START, None)
    return found


def marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The contract and the initial values attached to a parameter: torch drops both when it copies a parameter."""
    return {mark: getattr(parameter, mark) for mark in (_MARK, _START) if hasattr(parameter, mark)}


def mark_as(parameter: torch.Tensor, marks: Mapping[str, Any]) -> None:
    """Attach to a copy of a parameter what `marks_of` returned for the original."""
    for mark, value in marks.items():
        setattr(parameter, mark, value)


def owing(mesh: Mesh, owes: tuple[str, ...]) -> tuple[str, ...]:
    """The debts that exist under this mesh: nothing is owed over an axis of one rank."""
    return tuple(axes for axes in owes if mesh.size(axes) > 1)


@dataclass(frozen=True)
class Record:
    """One row of the table: a parameter under its first name in the model, with its contract."""

    name: str
    parameter: nn.Parameter
    contract: Contract


class Table:
    """Every parameter of a model, listed once by name, with its contract. Printing the table shows the debts."""

    def __init__(self, records: list[Record], mesh: Mesh) -> None:
        self.records = {record.name: record for record in records}
        self.mesh = mesh

    def __getitem__(self, name: str) -> Contract:
        return self.records[name].contract

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def __len__(self) -> int:
        return len(self.records)

    def fingerprint(self) -> torch.Tensor:
        """int64 [4]: a hash of all names, global shapes, cuts, debts, dtypes and of what is frozen."""
        text = repr([(r.name, r.contract, str(r.parameter.dtype), r.parameter.requires_grad) for r in self])
        digest = hashlib.sha256(text.encode()).digest()
        return torch.frombuffer(bytearray(digest), dtype=torch.int64).clone()

    def render(self, width: int = 140) -> str:
        """The table as text: each parameter, its cuts, and the ranks over which its gradient is summed."""
        from isograd.explain import render_contracts

        return render_contracts(self, width)

    __str__ = render


def contracts(model: nn.Module, mesh: Mesh) -> Table:
    """The contract of every parameter. A parameter shared by two modules is listed once, under its first name."""
    records: list[Record] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            contract = contract_of(parameter)
            if contract is None:
                if type(module).__module__.startswith("isograd."):
                    raise ContractError(
                        "IG301",
                        f"parameter {leaf!r} of an isograd layer has no contract",
                        seen=f"{type(module).__name__} made it without declare(), or it was replaced later",
                        expected="declare(parameter, mesh, shape=..., shards=..., owes=...) where it is made",
                        where=mesh.where(),
                    )
                contract = Contract(tuple(parameter.shape))
            records.append(Record(leaf, parameter, contract))
    return Table(records, mesh)


def describe_sum(contract: Contract, mesh: Mesh) -> str:
    """The axes and ranks over which this rank's gradient of the parameter is summed, as in 'dp+tp: 0-3'."""
    axes = [axis for axis in contract.data.split() if mesh.size(axis) > 1] + list(contract.owes)
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


def assemble(local: torch.Tensor, contract: Contract, mesh: Mesh) -> torch.Tensor:
    """Gather every rank's part into the whole global tensor, on every rank. Of replicas, the first is taken."""
    for shard in contract.shards:
        group = mesh.group(shard.axis)
        lengths = [stop - start for start, stop in shard.ranges]
        rows = local.movedim(shard.dim, 0)
        parts = raw.all_gather(rows, group, lengths).split(lengths)
        firsts = [part for i, part in enumerate(parts) if shard.ranges.index(shard.ranges[i]) == i]
        local = torch.cat(firsts).movedim(0, shard.dim)
    return local
