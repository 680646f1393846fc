"""Muon, Shampoo and SOAP: optimizers that step matrices and not elements.

A row shard of a matrix has other singular vectors than the matrix, so such an optimizer must never step a piece.

- `Engine(matrices=[...])` names matrices that keep one data rank each as the owner of all their rows (`owners`). The
  experts of a layer are a stack of matrices, of which a row is one: any cut by rows leaves each with one owner.
- Of a matrix that tp cuts, one tp rank of the owner steps the uncut matrix (`TensorParallelMatrices`).
- `Muon` is torch's Muon for stacks of matrices too.
- `ChainedOptimizer` makes one optimizer of several: Muon for matrices, AdamW for the rest.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.core.contract_table import ContractTable
from isograd.core.mesh import DATA, Mesh
from isograd.engine.plan import Slot
from isograd.errors import EngineError

BY_MATRIX = ("muon", "shampoo", "soap")  # in the name of an optimizer's class, or of one that it is made from


class ChainedOptimizer(torch.optim.Optimizer):
    """Several torch optimizers as one: `step` steps each of them.

        ig.ChainedOptimizer(torch.optim.Muon(shards.matrices, lr=2e-2), torch.optim.AdamW(shards.rest, lr=3e-4))

    It has the groups and the state of all: learning-rate schedulers, checkpoints and `zero_grad` see one optimizer.
    """

    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for member in optimizers for group in member.param_groups], {})
        self.optimizers = optimizers
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, which a load ends with: the members have the groups and the state of the chain."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for member in self.optimizers:
            its = list(islice(groups, len(member.param_groups)))
            member.__setstate__({"param_groups": its, "state": self.state})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each optimizer; the closure, if there is one, runs once before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.optimizers:
            member.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: no member would step the new group."""
        if self.optimizers:
            seen = f"add_param_group on {' and '.join(type(o).__name__ for o in self.optimizers)}"
            raise EngineError("IG530", seen=seen)
        super().add_param_group(param_group)


def members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a chain consists of, or the optimizer alone."""
    inner = getattr(optimizer, "optimizers", None)
    return [optimizer] if inner is None else [one for each in inner for one in members(each)]


class Muon(torch.optim.Muon):
    """torch's Muon, to which a parameter of three dimensions is as many matrices as it has rows: experts. The momentum,
    the orthogonalisation and the rate of each are its own."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        """`params`: parameters, or groups of them. `options`: those of torch's Muon."""
        super().__init__([nn.Parameter(torch.empty(0, 0))], **options)  # torch's refuses three dimensions here alone
        self.param_groups.clear()
        given = list(params)
        for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

    def _init_group(
        self, group: Any, params_with_grad: list[Tensor], grads: list[Tensor], muon_momentum_bufs: list[Tensor]
    ) -> bool:
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        is_complex = super()._init_group(group, *found)
        for target, tensors in zip((params_with_grad, grads, muon_momentum_bufs), found, strict=True):
            target += [matrix for t in tensors for matrix in (t.unbind() if t.dim() == 3 else (t,))]
        return is_complex


def owners(table: ContractTable, mesh: Mesh, patterns: Sequence[str]) -> dict[str, int | None]:
    """The data rank that owns each trainable matrix (2 dims) whose name matches; None for a stack of matrices, whose
    rows are cut as those of any parameter. A function of names and shapes, so that all ranks agree.

    A matrix tied to another pipeline stage, which has other matrices, goes where its name says.
    """
    trained = [record for record in table if record.parameter.requires_grad]
    matrices = [record for record in trained if record.parameter.dim() == 2 + record.contract.per_expert]
    chosen = [r for r in matrices if any(fnmatchcase(r.name, pattern) for pattern in patterns)]
    idle = [p for p in patterns if not any(fnmatchcase(record.name, p) for record in chosen)]
    if idle and mesh.size("pp") == 1:
        examples = [r.name for r in matrices][:3]
        raise EngineError("IG528", where=mesh.describe_rank(), patterns=list(patterns), idle=idle, examples=examples)
    single = [record for record in chosen if not record.contract.per_expert]
    cut = [r.name for r in single if [shard.axis for shard in r.contract.shards] not in ([], ["tp"])]
    if cut:
        seen = f"{cut[:4]}{' ...' if len(cut) > 4 else ''} under {str(mesh.layout)!r}"
        raise EngineError("IG529", seen=seen, where=mesh.describe_rank())
    ranks = mesh.group(DATA).size
    tied = {r.name: zlib.crc32(r.name.encode()) % ranks for r in single if r.contract.ties}
    found: dict[str, int | None] = {record.name: None for record in chosen if record.contract.per_expert}
    return found | _least_loaded({r.name: math.prod(r.contract.shape) for r in single}, ranks, tied)


def _least_loaded(sizes: Mapping[str, int], ranks: int, fixed: Mapping[str, int]) -> dict[str, int]:
    """The rank of each name: the largest first, to the rank that has least so far."""
    loads, found = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = fixed.get(name, loads.index(min(loads)))
        loads[found[name]] += sizes[name]
    return found


class TensorParallelMatrices:
    """The uncut matrices of those that tp cuts, for an optimizer that works on matrices.

    The data rank that owns such a matrix has a part of it on each of its tp ranks. One of these, the home, has the
    momentum and steps the matrix:

    1. `collect`: the other tp ranks send their parts of the parameter and of its finished gradient, so that an edited
       part is what is stepped. Of replicas (key and value heads fewer than tp ranks) the first is sent.
    2. The home steps the uncut matrix.
    3. `spread`: the home sends each tp rank its new part. From there they travel to the other data ranks.

    All ranks of a tp group call these about the same matrices in the same order.
    """

    def __init__(self, slots: Sequence[Slot], mesh: Mesh, owners: Mapping[str, int | None], stage: int) -> None:
        """`owners`: the data rank of each. At stage 0 all data ranks step."""
        self.group = mesh.group("tp")
        named = [slot for slot in slots if slot.name in owners and not slot.contract.per_expert]
        cut = {slot: slot.contract.shards[0] for slot in named if slot.contract.shards}
        self._homes: dict[str, int] = {}
        for owner in {owners[slot.name] for slot in cut}:
            sizes = {s.name: math.prod(s.contract.shape) for s in cut if owners[s.name] == owner}
            self._homes |= _least_loaded(sizes, self.group.size, {})
        self._cuts = {slot: s for slot, s in cut.items() if stage == 0 or owners[slot.name] == slot.owner}

    def __contains__(self, slot: Slot) -> bool:
        return slot.name in self._homes

    @property
    def slots(self) -> list[Slot]:
        """Those of which this data rank's tp group steps the uncut matrix."""
        return list(self._cuts)

    def is_home(self, slot: Slot) -> bool:
        """Whether this rank steps the matrix."""
        return slot in self._cuts and self._homes[slot.name] == self.group.index

    def collect(self, parts: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """Uncut matrices at their homes, of my parts of these slots."""
        if not parts:
            return {}
        sent, received = [], []
        matrices: dict[Slot, Tensor] = {}
        for slot, part in parts.items():
            ranges, me = self._cuts[slot].ranges, self.group.index
            if self.is_home(slot):
                matrices[slot] = part.new_empty(slot.contract.shape)
                self._part(matrices[slot], slot, me).copy_(part)
                firsts = [m for m in range(self.group.size) if ranges.index(ranges[m]) == m != me]
                received += [(m, self._part(matrices[slot], slot, m)) for m in firsts]
            elif ranges.index(ranges[me]) == me:
                sent.append((self._homes[slot.name], part))
        self._exchange(sent, received)
        return matrices

    def spread(self, matrices: Mapping[Slot, Tensor], targets: Mapping[Slot, Tensor]) -> None:
        """The parts of stepped matrices, from their homes into `targets`."""
        if not targets:
            return
        sent, received = [], []
        for slot, target in targets.items():
            if not self.is_home(slot):
                received.append((self._homes[slot.name], target))
                continue
            for member in range(self.group.size):
                part = self._part(matrices[slot], slot, member)
                if member == self.group.index:
                    target.copy_(part)
                else:
                    sent.append((member, part.to(target.dtype)))
        self._exchange(sent, received)

    def _part(self, matrix: Tensor, slot: Slot, member: int) -> Tensor:
        shard = self._cuts[slot]
        start, stop = shard.ranges[member]
        return matrix.narrow(shard.dim, start, stop - start)

    def _exchange(self, sent: Iterable[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Tensors to members of the tp group, and from them into these places."""
        out: list[list[Tensor]] = [[] for _ in self.group.ranks]
        into: list[list[Tensor]] = [[] for _ in self.group.ranks]
        for member, tensor in sent:
            out[member].append(tensor.contiguous())
        for member, place in received:
            into[member].append(torch.empty_like(place, memory_format=torch.contiguous_format))
        raw.exchange(out, into, self.group).wait()
        arrived = [iter(tensors) for tensors in into]
        for member, place in received:
            place.copy_(next(arrived[member]))
