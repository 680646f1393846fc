"""Small parameters as one tensor: each owner's part is its rows of each of them, and whole tensors come back."""

from __future__ import annotations

import pytest
import torch

from isograd.engine.bundle import SMALL, Bundle
from isograd.engine.plan import cut_rows

SHAPES = [(1,), (), (0, 4), (3, 0), (7, 13), (129, 1), (5, SMALL), (64,), (200, 3), (2, 3, 5), (17,), (), (SMALL,)]


@pytest.mark.parametrize("owners", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [3, len(SHAPES)])
def test_a_bundle_holds_each_owners_rows_of_every_small_tensor(owners: int, count: int) -> None:
    shapes = SHAPES[:count]
    cuts = [cut_rows(f"p{i}", shape, owners) for i, shape in enumerate(shapes)]
    values = [torch.arange(torch.Size(s).numel()).view(s) + 10_000 * i for i, s in enumerate(shapes)]
    for owner in range(owners):
        bundle = Bundle(list(range(count)), values, cuts, owner)  # type: ignore[arg-type]
        packed = bundle.pack(values)
        bundled = owners > 1 and count > 8
        assert len(packed) == len(bundle.slots) == (2 if bundled else count)
        mine = [
            slot.rows(t) if not isinstance(slot, int) else _rows(t, cuts[slot], owner)
            for slot, t in zip(bundle.slots, packed, strict=True)
        ]
        for i, found in enumerate(bundle.rows(mine)):
            assert torch.equal(found, _rows(values[i], cuts[i], owner))
        if bundled:
            assert [len(bundle.slots[-1].rows(packed[-1], o)) for o in range(owners)] == [
                sum(_rows(v, c, o).numel() for v, c in zip(values, cuts, strict=True) if v.numel() <= SMALL)
                for o in range(owners)
            ]
        into = [torch.zeros_like(v) if v.numel() <= SMALL and bundled else v.clone() for v in values]
        bundle.unpack(packed, into)
        assert all(torch.equal(a, b) for a, b in zip(into, values, strict=True))


def _rows(tensor: torch.Tensor, cuts: tuple[int, ...], owner: int) -> torch.Tensor:
    return (tensor.view(1) if tensor.dim() == 0 else tensor)[cuts[owner] : cuts[owner + 1]]
