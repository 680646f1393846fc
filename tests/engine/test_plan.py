"""Which rows of a parameter each data rank owns: all of them once, cut where a vector lane ends."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine.plan import ALIGN, cut_rows, make_plan, slot_of

SHAPES = st.lists(st.integers(0, 200), max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 9))
def test_every_row_has_one_owner_in_rank_order(shape: tuple[int, ...], owners: int) -> None:
    cuts = cut_rows(shape, owners)
    assert len(cuts) == owners + 1
    assert (cuts[0], cuts[-1]) == (0, shape[0] if shape else 1)
    assert list(cuts) == sorted(cuts)


@given(SHAPES, st.integers(1, 9))
def test_a_shard_begins_where_a_vector_lane_does_and_the_first_one_is_the_largest(
    shape: tuple[int, ...], owners: int
) -> None:
    """A shard begins at the end of the tensor (it is empty) or at a multiple of 64 elements."""
    cuts = cut_rows(shape, owners)
    width = torch.Size(shape[1:]).numel()
    rows = cuts[-1]
    unit = next(n for n in range(1, ALIGN + 1) if n * width % ALIGN == 0)
    assert all(cut == rows or cut * width % ALIGN == 0 for cut in cuts)
    units = [-(-(stop - start) // unit) for start, stop in pairwise(cuts)]
    assert units[0] == -(-rows // (unit * owners)) and units == sorted(units, reverse=True)  # as torch.chunk has them
    assert len({count for count in units if count == units[0]} | {0}) <= 2 and sum(0 < n < units[0] for n in units) <= 1


def sizes_of(cuts: tuple[int, ...]) -> list[int]:
    return sorted(stop - start for start, stop in pairwise(cuts))


def test_cuts_by_hand() -> None:
    assert sizes_of(cut_rows((), 2)) == [0, 1]  # one number has one owner
    assert cut_rows((5, 128), 1) == (0, 5)
    assert sizes_of(cut_rows((5, 128), 3)) == [1, 2, 2]
    assert cut_rows((100,), 3) == (0, 64, 100, 100)
    assert sizes_of(cut_rows((7, 0), 2)) == [3, 4]  # rows without elements are cut as well


def test_a_slots_rows_are_views_and_make_up_the_tensor() -> None:
    """With cut rows, with one owner of all rows, and for one number."""
    layer = nn.Linear(3, 130)
    layer.register_parameter("gain", nn.Parameter(torch.tensor(2.0)))
    mesh = Mesh.unbound("dp3", rank=1)
    for record in contracts(layer, mesh):
        for owner in (None, 2) if record.parameter.dim() == 2 else (None,):
            slot, x = slot_of(record, mesh, owner), torch.randn_like(record.parameter)
            parts = [slot.rows(x, member) for member in range(3)]
            assert torch.equal(torch.cat(parts), x.view(1) if x.dim() == 0 else x)
            assert torch.equal(slot.rows(x), parts[1])
            assert all(p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)
            assert owner is None or [len(p) for p in parts] == [0, 0, 130]


def test_a_bucket_keeps_to_its_size_its_dtype_and_its_module() -> None:
    mesh = Mesh.unbound("dp2")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8), nn.Linear(8, 8))
    homes = {id(p): module for module in model for p in module.parameters()}
    names = [
        [slot.name for slot in bucket.slots] for bucket in make_plan(contracts(model, mesh), mesh, 1 << 20).buckets
    ]
    assert names == [["3.bias", "3.weight", "2.bias", "2.weight"], ["1.bias", "1.weight"], ["0.bias", "0.weight"]]
    apart = make_plan(contracts(model, mesh), mesh, 1 << 20, homes)
    assert [len(bucket.slots) for bucket in apart.buckets] == [2, 2, 2, 2]
    small = make_plan(contracts(model, mesh), mesh, 8 * 4 + 8 * 8 * 4)  # bytes of one layer in fp32
    assert all(sum(s.parameter.numel() for s in b.slots) <= 72 for b in small.buckets)
    assert sum(len(bucket.slots) for bucket in small.buckets) == 8
