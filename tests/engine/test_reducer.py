"""Rows travel to their owners and back: whole numbers, so that sums are exact, in sizes that nobody would choose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isograd.comm.group import Group
from isograd.comm.transport import Nccl
from isograd.core.contract_table import contracts
from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine
from isograd.engine.packing import Buffers, gather_rows, packing_of, reduce_rows
from isograd.engine.plan import Slot, slot_of
from isograd.engine.tree import tree_sum

# Fewer units of 64 elements than ranks, one number, no rows, no elements, odd rows, large and small ones.
SHAPES = [(1,), (), (0, 4), (3, 0), (7, 13), (129, 1), (32773,), (67, 1000), (3, 16385), (128, 64)]


def slots_of(mesh: Mesh) -> tuple[list[Slot], list[Slot]]:
    """Slots that are cut by rows, and matrices that have one owner each."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)
    cut = [slot_of(record, mesh) for record in contracts(model, mesh)]
    matrices = [r for r in contracts(model, mesh) if r.parameter.dim() == 2 and r.parameter.numel()]
    last = mesh.size(DATA) - 1
    return cut, [slot_of(r, mesh, owner=max(0, last - i % 2)) for i, r in enumerate(matrices)]


def numbers(slots: list[Slot], rank: int) -> list[Tensor]:
    """Different in each element, slot and rank."""
    return [
        (torch.arange(s.parameter.numel()) % 1009 + 100 * i + 7 * rank).view(s.parameter.shape).float()
        for i, s in enumerate(slots)
    ]


def there_and_back(layout: str, native: bool) -> list[str]:
    """What is wrong, on this rank, in reduced rows and in what is gathered of them."""
    mesh, wrong = Mesh(layout), list[str]()
    group, before = mesh.group(DATA), mesh.group(DATA).transport
    if native:
        group.connections = Nccl(before.process_group, before.ranks, before.index)
    try:
        for slots in slots_of(mesh):
            packing = packing_of(slots)
            sums = [sum(parts) for parts in zip(*(numbers(slots, r) for r in range(group.size)), strict=True)]
            for tree in (False, True):
                mine = numbers(slots, group.index)
                rows = reduce_rows(packing, packing.pack(mine, Buffers()), group, tree=tree, number=3).wait()
                for slot, found, exact in zip(slots, rows, sums, strict=True):
                    if not torch.equal(found, slot.rows(exact)):
                        wrong.append(f"{slot.name} {tuple(slot.parameter.shape)} tree {tree}: sum of rows")
                if any(not torch.equal(a, b) for a, b in zip(mine, numbers(slots, group.index), strict=True)):
                    wrong.append("gradients were overwritten")
            full = [torch.full_like(exact, -1.0) for exact in sums]
            full[-1] = full[-1].t().contiguous().t()  # not contiguous
            gather_rows(packing, [s.rows(t) for s, t in zip(slots, sums, strict=True)], full, group).wait()
            wrong += [f"{s.name}: gathered" for s, w, t in zip(slots, full, sums, strict=True) if not torch.equal(w, t)]
            for slot, exact in zip(slots, sums, strict=True):  # alone: straight into its memory where it fits
                target = torch.full_like(exact, -1.0)
                gather_rows(packing_of([slot]), [slot.rows(exact)], [target], group).wait()
                wrong += [] if torch.equal(target, exact) else [f"{slot.name}: gathered alone"]
    finally:
        group.connections = before
    return wrong


def all_ways(layout: str) -> list[str]:
    return [f"native {native}: {line}" for native in (False, True) for line in there_and_back(layout, native)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_owners_get_the_sum_of_their_rows_and_all_get_them_back(worlds, ranks: int) -> None:
    """By gloo's messages and by native collectives, in rank order and in a tree."""
    assert worlds(ranks).run(all_ways, f"dp{ranks}") == [[]] * ranks


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_block_is_packed_by_as_many_calls_for_8_owners_as_for_256() -> None:
    """An 8B block (without its memory): FSDP2 packs it by a constant number of calls, too."""
    wide, narrow = (14336, 4096), (1024, 4096)
    shapes = [(4096, 4096), narrow, narrow, (4096, 4096), wide, wide, (4096, 14336), (4096,), (4096,)]
    counts = []
    for owners in (8, 64, 256):
        group = Group("dp", tuple(range(owners)), 0)
        mesh = Mesh.unbound(f"dp{owners}")
        with torch.device("meta"):
            model = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        slots = [slot_of(record, mesh) for record in contracts(model, mesh)]
        assert slots[0].owners.size == group.size
        packing, tensors = packing_of(slots), [p.data for p in model]
        with Calls() as calls:
            flat = packing.pack(tensors, Buffers())
            chunk = flat.new_empty(packing.sizes[0])
            packing.pack_rows(packing.rows(torch.empty_like(chunk)), chunk)
            packing.unpack(flat, tensors)
        assert flat.numel() - sum(t.numel() for t in tensors) <= 0.01 * flat.numel()  # padding
        counts.append(calls.counts.total())  # a norm has fewer units of 64 elements than there are owners: it is padded
    assert max(counts) <= 1.3 * min(counts) and max(counts) < 12 * len(shapes), counts


def test_a_tree_adds_neighbours_first() -> None:
    """((0 + 1) + (2 + 3)) + 4, seen in fp32: 1 is lost beside 2**24, unless another 1 was added to it before."""
    large, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    order = [one.clone(), one.clone(), large.clone(), -large, one.clone()]
    assert float(tree_sum(order)) == 3.0
    assert float(order[0]) == 1.0
    assert float(tree_sum([one.clone(), large.clone(), one.clone(), -large])) == 1.0  # only one of the two is lost


def memory_of_steps(layout: str) -> list[set[int]]:
    """Where the flat tensors of each of four steps lie."""
    mesh, taken = Mesh(layout), list[Tensor]()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    engine = Engine(model, mesh, lambda shards: torch.optim.SGD(shards, lr=0.1), bucket_mb=0.3)
    assert [len(bucket.slots) for bucket in engine.plan.buckets] == [3, 2, 2, 1]
    buffers = engine.step_state.reducer.buffers
    take = buffers.take
    buffers.take = lambda *of: taken.append(take(*of)) or taken[-1]  # type: ignore[method-assign]
    steps = []
    for _ in range(4):
        engine.backward(model(torch.full((2, 256), float(mesh.rank))).square().mean(), weight=2)
        engine.step()
        steps.append({flat.data_ptr() for flat in taken})
        assert len(taken) == 6  # three buckets, there and back; a parameter alone travels in its own memory
        taken.clear()
    return steps


@pytest.mark.parametrize("layout", ["dp2 zero0", "dp2 zero1"])
def test_flat_tensors_use_the_memory_of_earlier_ones_again(worlds, layout: str) -> None:
    for steps in worlds(2).run(memory_of_steps, layout):
        assert len(set.union(*steps)) <= 3, steps


def free_buffers(options: dict[str, Any]) -> list[int]:
    """How many flat tensors are kept after each of four steps of a model with matrices that have one owner each."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.01 * number)
    engine = Engine(model, Mesh("dp2 zero1"), lambda shards: torch.optim.SGD(shards, lr=0.1), **options)
    counts = []
    for _ in range(4):
        engine.backward(model(torch.ones(2, 64)).square().mean(), weight=2)
        engine.step()
        counts.append(sum(map(len, engine.step_state.reducer.buffers._free.values())))
    return counts


@pytest.mark.parametrize("options", [{}, {"matrices": ["*"]}])
def test_no_more_flat_tensors_are_kept_from_step_to_step(worlds, options: dict[str, Any]) -> None:
    for counts in worlds(2).run(free_buffers, options):
        assert counts == [counts[0]] * 4
