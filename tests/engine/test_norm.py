"""The global norm: plain torch's number, the same however rows are spread, and one wait for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isograd.comm.group import Group
from isograd.engine import norm

ALONE, CPU = Group("world", (0,), 0), torch.device("cpu")
NORMS = [norm.global_norm, norm.reproducible_norm]


def of(find: Callable[..., float], rows: list[Tensor], world: Group = ALONE) -> float:
    filled = [row for row in rows if row.numel()]
    return find([row.norm() for row in filled] if find is norm.global_norm else filled, world, CPU)


@pytest.mark.parametrize("find", NORMS)
@pytest.mark.parametrize("size", [1e-280, 1e-20, 1.0, 1e20, 1e150])
def test_the_norm_is_that_of_all_elements(find: Callable[..., float], size: float) -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    rows = [values[:3], values[3:3], values[3:150_000].view(-1, 3), values[150_000:]]
    if size != 1e-280 or find is norm.reproducible_norm:  # squares of 1e-280 are zero in fp64
        assert math.isclose(of(find, rows), size * float((values / size).norm()), rel_tol=1e-9)
    assert of(find, []) == of(find, [torch.zeros(5)]) == 0.0


def test_the_reproducible_norm_has_the_same_bits_for_every_split() -> None:
    values = torch.randn(150_001, generator=torch.Generator().manual_seed(1))
    assert (
        len({of(norm.reproducible_norm, list(values.split(size))) for size in (7_001, 65_536, 100_000, 150_001)}) == 1
    )


@pytest.mark.parametrize("find", NORMS)
def test_not_a_number_and_infinity_are_told_apart(find: Callable[..., float]) -> None:
    one, bad = torch.ones(3), torch.ones(4)
    bad[2] = math.inf
    assert of(find, [one, bad]) == math.inf
    bad[1] = math.nan
    assert math.isnan(of(find, [bad, one]))


class Waits(TorchDispatchMode):
    """Counts reads of single values: on a GPU each waits for all that was queued."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("find", NORMS)
def test_the_norm_reads_all_ranks_parts_at_once(find: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of the list of all ranks' parts; it was one read for each rank, and two for each parameter."""
    monkeypatch.setattr(norm.raw, "gather", lambda tensor, _: torch.stack([tensor] * 64))
    with Waits() as waits:
        found = of(find, [torch.ones(9).double(), torch.ones(5, 3).double()], Group("world", tuple(range(64)), 0))
    assert waits.count == 0
    assert math.isclose(found, (64 * 24) ** 0.5)
