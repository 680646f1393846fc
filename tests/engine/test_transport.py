"""Rows travel to their owners and back: whole numbers, so that sums are exact, in sizes that nobody would choose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.contract import contracts
from isograd.engine.plan import Slot, slot_of
from isograd.engine.transport import SMALL, gather_rows, reduce_rows, tree_sum
from isograd.mesh import DATA, Mesh

# Fewer units of 64 elements than ranks, one number, no rows, no elements, odd rows, slices beyond and below SMALL.
SHAPES = [(1,), (), (0, 4), (3, 0), (7, 13), (129, 1), (2 * SMALL + 5,), (67, 1000), (3, SMALL + 1)]


def slots_of(mesh: Mesh) -> list[Slot]:
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)
    cut = [slot_of(record, mesh) for record in contracts(model, mesh)]
    whole = [slot_of(r, mesh, owner=mesh.size(DATA) - 1) for r in contracts(model, mesh) if r.parameter.dim() == 2]
    return cut + whole


def numbers(slots: list[Slot], rank: int) -> list[Tensor]:
    """Different in each element, slot and rank."""
    return [
        (torch.arange(s.parameter.numel()) % 1009 + 100 * i + 7 * rank).view(s.parameter.shape).float()
        for i, s in enumerate(slots)
    ]


def there_and_back(layout: str, native: bool) -> list[str]:
    """What is wrong, on this rank, in reduced rows and in what is gathered of them."""
    mesh, wrong = Mesh(layout), list[str]()
    group, before = mesh.group(DATA), raw.native
    raw.native = (lambda _: True) if native else before
    try:
        slots = slots_of(mesh)
        sums = [sum(parts) for parts in zip(*(numbers(slots, r) for r in range(group.size)), strict=True)]
        for tree in (False, True):
            mine = numbers(slots, group.index)
            kept = [g.clone() for g in mine]
            rows = reduce_rows(slots, mine, group, tree=tree).wait()
            for slot, found, total in zip(slots, rows, sums, strict=True):
                if not torch.equal(found, slot.rows(total)):
                    wrong.append(f"{slot.name} {tuple(slot.parameter.shape)} tree {tree}: sum of rows")
            others = [m for m in range(group.size) if m != group.index]
            for slot, after, once in zip(slots, mine, kept, strict=True):
                if any(not torch.equal(slot.rows(after, m), slot.rows(once, m)) for m in others):
                    wrong.append(f"{slot.name}: rows that belong to others were overwritten")
        whole = [torch.full_like(total, -1.0) for total in sums]
        for slot, into, total in zip(slots, whole, sums, strict=True):
            slot.rows(into).copy_(slot.rows(total))
        gather_rows(slots, whole, group).wait()
        wrong += [f"{s.name}: gathered" for s, w, t in zip(slots, whole, sums, strict=True) if not torch.equal(w, t)]
    finally:
        raw.native = before
    return wrong


def all_ways() -> list[str]:
    return [f"native {native}: {line}" for native in (False, True) for line in there_and_back("dp2", native)]


def test_owners_get_the_sum_of_their_rows_and_all_get_them_back(worlds) -> None:
    """Both transports, in rank order and in a tree: gloo's and the packed one that NCCL takes."""
    assert worlds(2).run(all_ways) == [[], []]


def test_alone_a_rank_keeps_its_gradient() -> None:
    mesh = Mesh.unbound("dp1")
    slots = slots_of(mesh)
    mine = numbers(slots, 0)
    rows = reduce_rows(slots, mine, mesh.group(DATA), tree=False).wait()
    assert all(torch.equal(r, g.view(1) if g.dim() == 0 else g) for r, g in zip(rows, mine, strict=True))
    gather_rows(slots, mine, mesh.group(DATA)).wait()


def test_a_tree_adds_neighbours_first_and_never_in_the_memory_it_must_keep() -> None:
    """((0 + 1) + (2 + 3)) + 4, seen in fp32: 1 is lost beside 2**24, unless another 1 was added to it before."""
    large, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    order = [one.clone(), one.clone(), large.clone(), -large, one.clone()]
    keep = [order[0]]
    assert float(tree_sum([[t] if t is not order[0] else keep for t in order], keep)[0]) == 3.0
    assert float(order[0]) == 1.0
    lost = [one.clone(), large.clone(), one.clone(), -large]
    assert float(tree_sum([[t] for t in lost])[0]) == 1.0  # (1 + 2**24) + (1 - 2**24): only one of the two is lost
