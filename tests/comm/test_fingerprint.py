"""The fingerprint of a tensor changes with anything that changes in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isograd.comm.fingerprint import fingerprint

KINDS = (torch.uint8, torch.bool, torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.complex128)


def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(3, 5, dtype=dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_equal_tensors_have_one_fingerprint_and_one_element_changes_it(dtype: torch.dtype) -> None:
    first, other = ones(dtype), ones(dtype)
    assert fingerprint(first).dtype == torch.int64
    assert torch.equal(fingerprint(first), fingerprint(other.t().contiguous().t())), "memory format does not matter"
    other[2, 3] = 0
    assert not torch.equal(fingerprint(first), fingerprint(other))


def test_the_last_bit_place_and_shape_count() -> None:
    x = torch.arange(12.0, dtype=torch.float64)
    nudged = x.clone()
    nudged[7] = torch.nextafter(nudged[7], torch.tensor(100.0).double())
    others = [nudged, x.flip(0), x.view(3, 4), x.view(4, 3), x[:11], torch.zeros(0), torch.zeros(1), torch.zeros(2)]
    prints = [int(fingerprint(t)) for t in (x, *others)]
    assert len(set(prints)) == len(prints)
