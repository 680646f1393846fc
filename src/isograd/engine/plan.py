"""The engine's plan, made once: which rows of which parameter each rank owns, and which travel together.

The owners of a parameter's rows are the ranks that hold copies of it: its contract's data axes. Where those of routed
experts are other ranks than those of everything else, no bucket holds both.

A row cut is a pure function of the parameter's local shape and the number of owners. Members that must add
shards to each other (tp replicas, ties between stages) therefore hold the same rows by construction; the plan's
fingerprint, compared across each group at start, proves that names, shapes and cuts are indeed the same.

Cuts fall on multiples of 64 elements. An elementwise optimizer then treats every element in the same vector lane
whether it steps a whole tensor or a shard of it, which is why ZeRO 0, 1 and 2 give the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from isograd.comm.group import Group
from isograd.core.contract import Contract
from isograd.core.contract_table import ContractRow, ContractTable
from isograd.core.mesh import DATA, Mesh

ALIGN = 64  # elements
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def cut_rows(shape: Sequence[int], owners: int) -> tuple[int, ...]:
    """Row boundaries, owners + 1 of them, as torch.chunk has them: equal parts, and less for the last owners. So the
    parts of a parameter are views of one tensor [owners, rows of the first owner] (engine/packing.py)."""
    rows = shape[0] if shape else 1
    width = math.prod(shape[1:])
    unit = ALIGN // math.gcd(width, ALIGN) if width else 1
    each = -(-rows // (unit * owners)) * unit
    return tuple(min(rows, owner * each) for owner in range(owners + 1))


@dataclass(frozen=True, eq=False)
class Slot:
    """One trainable parameter as the engine sees it: who owns which rows of it. What a step gathers is in StepState."""

    name: str
    parameter: nn.Parameter
    contract: Contract
    cuts: tuple[int, ...]
    owners: Group  # the ranks that hold copies of it
    uncut_matrix: bool = False  # no owner has a piece of it, because the optimizer works on matrices

    @property
    def owner(self) -> int:
        """My index among the owners."""
        return self.owners.index

    @property
    def cut_by_rows(self) -> bool:
        """Whether an owner has some of the rows only."""
        return self.owners.size > 1 and not self.uncut_matrix

    @property
    def has_one_owner(self) -> bool:
        """Whether one of several owners has all rows, for an optimizer that works on matrices."""
        return self.uncut_matrix and self.cuts != cut_rows(self.parameter.shape, self.owners.size)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Gradients accumulate and are summed in fp32, in fp64 models in fp64: as the Engine found the parameter, so
        that ranks of which one has cast its model send messages of one size until they meet."""
        return torch.float64 if self.parameter.dtype == torch.float64 else torch.float32

    def rows(self, tensor: Tensor, owner: int | None = None) -> Tensor:
        """The owner's rows (mine when left out) of a tensor shaped like the parameter."""
        owner = self.owner if owner is None else owner
        tensor = tensor.view(1) if tensor.dim() == 0 else tensor
        return tensor[self.cuts[owner] : self.cuts[owner + 1]]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Slots that travel together, in the order backward is expected to reach them."""

    number: int  # its place among the buckets of its owners, the same on each of them
    slots: tuple[Slot, ...]

    @property
    def owners(self) -> Group:
        """The ranks that hold copies of its parameters."""
        return self.slots[0].owners


@dataclass(frozen=True, eq=False)
class Plan:
    """How a model's parameters are cut into rows, and in which buckets their gradients travel."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def owners(self) -> tuple[Group, ...]:
        """The groups of owners of rows, in an order that is the same on all ranks of a stage."""
        axes = {slot.contract.data: slot.owners for slot in self.slots}
        return tuple({axes[name].ranks: axes[name] for name in sorted(axes)}.values())

    def fingerprint(self, axes: str) -> str:
        """Of the parameters that owe `axes`; of DATA, of all: what owes other axes may have other shapes there."""
        chosen = sorted(
            (s.name, tuple(s.parameter.shape), s.cuts, str(s.dtype), s.contract.partial_over)
            for s in self.slots
            if axes in (s.contract.data, *s.contract.partial_over)
        )
        others = sorted((s.name, s.contract) for s in self.slots if axes == DATA != s.contract.data)
        return hashlib.sha256(repr((chosen, others)).encode()).hexdigest()


def slot_of(record: ContractRow, mesh: Mesh, owner: int | None = None, *, uncut_matrix: bool = False) -> Slot:
    """`owner`: the one of the owners that has all rows; None cuts them, `uncut_matrix`: at matrices of a stack."""
    group, shape = mesh.group(record.contract.data), record.parameter.shape
    if owner is None:
        cuts = cut_rows(shape, group.size)
    else:
        cuts = tuple(shape[0] if end > owner else 0 for end in range(group.size + 1))
    return Slot(record.name, record.parameter, record.contract, cuts, group, uncut_matrix or owner is not None)


def make_plan(
    table: ContractTable,
    mesh: Mesh,
    bucket_bytes: int,
    homes: Mapping[int, nn.Module] | None = None,
    owners: Mapping[str, int | None] | None = None,
) -> Plan:
    """`homes`: parameters (ids) of different modules do not travel together. `owners`: of matrices that stay whole, and
    None for a stack of matrices, of which a row is one."""
    owners = owners or {}
    trained = [record for record in table if record.parameter.requires_grad]
    slots = [slot_of(r, mesh, owners.get(r.name), uncut_matrix=r.name in owners) for r in trained]
    buckets = []
    for ranks in dict.fromkeys(slot.owners.ranks for slot in slots):
        theirs = [slot for slot in slots if slot.owners.ranks == ranks]
        buckets += [Bucket(n, tuple(members)) for n, members in enumerate(_buckets(theirs, bucket_bytes, homes or {}))]
    place = {slot: number for number, slot in enumerate(slots)}
    return Plan(tuple(slots), tuple(sorted(buckets, key=lambda bucket: -place[bucket.slots[-1]])))


def _buckets(slots: list[Slot], limit: int, homes: Mapping[int, nn.Module]) -> list[list[Slot]]:
    """Reverse order of registration: about the order in which backward finishes. One dtype in each."""
    buckets: list[list[Slot]] = []
    last, size = None, 0
    for slot in reversed(slots):
        bytes_here = slot.parameter.numel() * slot.dtype.itemsize
        kind = slot.parameter.dtype, homes.get(id(slot.parameter)), slot.has_one_owner
        if kind != last or size + bytes_here > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(slot)
        last, size = kind, size + bytes_here
    return buckets


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists and sequences of modules that have parameters."""
    members = [m for m in model.children() if any(True for _ in m.parameters())]
    if isinstance(model, CONTAINERS) and len(members) > 1:
        return members
    return [block for child in model.children() for block in repeated_blocks(child)]


def homes(blocks: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """The block of each parameter (by id) that only one block holds: it has its gradient when that one is done."""
    pairs = [(id(p), block) for block in dict.fromkeys(blocks) for p in dict.fromkeys(block.parameters())]
    holders = Counter(key for key, _ in pairs)
    return {key: block for key, block in pairs if holders[key] == 1}
