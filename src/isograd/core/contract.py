"""Over which ranks a parameter's gradient is still a partial sum, declared once, where the parameter is made.

A gradient is *partial over* an axis when the ranks of that axis hold terms of its sum (DTensor: Partial). A Contract
gives a parameter's global shape, the part of it that this rank holds along each axis, and the axes that its gradient is
partial over. The engine sums over them; buckets, norm, clipping, checkpoints and replica checks are derived from
contracts and from nothing else. core/contract_table.py lists the contracts of a model.

Every gradient is partial over its parameter's *data axes*: those over which ranks hold copies of it and give it
different tokens. These are dp and cp, but for one exception. The weights of routed experts are cut over ep, and the
exchange of tokens has brought an expert the tokens of its whole ep group; so it is partial over edp, the ranks with
copies of it, and nothing else. Owners of rows, buckets, norm, checkpoints and replica checks follow from
`Contract.data`.

A parameter of a foreign module that declares nothing is partial over dp and cp. A parameter of an isograd layer without
a contract is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isograd.comm import raw
from isograd.comm.group import even_sizes
from isograd.core.mesh import DATA, EXPERT_DATA, Mesh
from isograd.errors import ContractError

_MARK = "_isograd_contract"
_START = "_isograd_start"
MODEL_PARALLEL_AXIS = {
    DATA: "tp",
    EXPERT_DATA: "ep",
}  # of data axes, the other axis of a stage: it may cut what has them
InitFn = Callable[[Sequence[tuple[int, int]], torch.device], torch.Tensor]  # values of a box of the global tensor


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
    """The global shape of a parameter, how it is cut over ranks, and over which axes its gradient is partial."""

    shape: tuple[int, ...]  # global
    shards: tuple[Shard, ...] = ()
    partial_over: tuple[
        str, ...
    ] = ()  # beyond the data axes: "tp", "tp/2" for blocks of 2 tp neighbours, "pp:0+3" for a tie
    data: str = DATA  # over which ranks hold copies and sum what their tokens gave: "edp" for routed experts

    @property
    def model_parallel_axis(self) -> str:
        """The axis of a stage that is not among the data axes: its ranks hold other parts, or replicas."""
        return MODEL_PARALLEL_AXIS[self.data]

    @property
    def cut(self) -> Shard | None:
        """How the ranks beside the data axes cut it; None: each holds all of it."""
        return next((shard for shard in self.shards if shard.axis == self.model_parallel_axis), None)

    @property
    def per_expert(self) -> bool:
        """Whether each row of dim 0 is a parameter of its own: an expert's."""
        return self.data == EXPERT_DATA

    @property
    def ties(self) -> tuple[str, ...]:
        """The axes that lead to other pipeline stages with the same parameter."""
        return tuple(axes for axes in self.partial_over if axes.startswith("pp"))

    def local(self, mesh: Mesh) -> tuple[tuple[int, int], ...]:
        """The (start, stop) that this rank holds along each dimension of the global tensor."""
        box = [(0, size) for size in self.shape]
        for shard in self.shards:
            box[shard.dim] = shard.ranges[mesh.index(shard.axis)]
        return tuple(box)

    def is_primary_replica(self, mesh: Mesh) -> bool:
        """Whether this rank's copy is the one that stands for its replicas and ties in norms and checkpoints."""
        if any(mesh.index(axes) for axes in self.ties):
            return False
        index = mesh.index(self.model_parallel_axis)
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
    partial_over: tuple[str, ...] = (),
    data: str = DATA,
) -> nn.Parameter:
    """Attach a contract to a parameter that this rank has just made; its local shape must agree with the contract.

    `partial_over`: axes beyond the data axes. Axes of one rank are left out, of cuts too. `data`: "edp" for the
    weights of routed experts, whose gradient here is that of all tokens of the ep group.
    """
    beside = MODEL_PARALLEL_AXIS.get(data)  # members of the data axes hold copies, and no gradient is summed twice
    wrong = [f"cut over {shard.axis!r}" for shard in shards if shard.axis != beside]
    wrong += [f"partial over {axes!r}" for axes in partial_over if data != DATA and not axes.startswith("pp")]
    if beside is None or wrong:
        raise ContractError("IG304", seen=", ".join([f"data axes {data!r}", *wrong]), where=mesh.describe_rank())
    cut = tuple(shard for shard in shards if mesh.size(shard.axis) > 1)
    contract = Contract(tuple(shape), cut, tuple(axes for axes in partial_over if mesh.size(axes) > 1), data)
    expected = tuple(stop - start for start, stop in contract.local(mesh))
    if tuple(parameter.shape) != expected:
        raise ContractError(
            "IG302", seen=tuple(parameter.shape), where=mesh.describe_rank(), local=expected, shape=contract.shape
        )
    setattr(parameter, _MARK, contract)
    return parameter


def contract_of(parameter: torch.Tensor) -> Contract | None:
    """The contract declared for this parameter, or None."""
    found = getattr(parameter, _MARK, None)
    return found if isinstance(found, Contract) else None


def set_init_fn(parameter: nn.Parameter, start: InitFn) -> None:
    """Attach a function that makes the initial values of any box of a parameter on the meta device."""
    setattr(parameter, _START, start)


def init_fn_of(parameter: torch.Tensor) -> InitFn | None:
    """The function that makes this parameter's initial values, or None."""
    found: InitFn | None = getattr(parameter, _START, None)
    return found


def metadata_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The contract and the initial values attached to a parameter: torch drops both when it copies a parameter."""
    return {mark: getattr(parameter, mark) for mark in (_MARK, _START) if hasattr(parameter, mark)}


def set_metadata(parameter: torch.Tensor, marks: Mapping[str, Any]) -> None:
    """Attach to a copy of a parameter what `metadata_of` returned for the original."""
    for mark, value in marks.items():
        setattr(parameter, mark, value)


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
