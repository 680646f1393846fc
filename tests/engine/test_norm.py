"""The global norm: plain torch's number, the same however rows are spread, and one wait for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isograd import models
from isograd.comm.raw import Group
from isograd.engine import Engine, norm
from isograd.mesh import DATA, Mesh

from . import toys

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
    monkeypatch.setattr(norm.raw, "gather_list", lambda tensor, _: [tensor] * 64)
    with Waits() as waits:
        found = of(find, [torch.ones(9).double(), torch.ones(5, 3).double()], Group("world", tuple(range(64)), 0))
    assert waits.count == 0
    assert math.isclose(found, (64 * 24) ** 0.5)


def test_a_norm_is_read_once_until_its_rows_change() -> None:
    norms, rows = norm.Norms(), [torch.ones(4), torch.ones(9), torch.ones(0), torch.ones(32).split(16)[1]]
    first = norms.take(rows)
    assert [float(found) for found in first] == [2.0, 3.0, 0.0, 4.0]
    assert all(again is found for again, found in zip(norms.of(rows), first, strict=True))
    rows[0].mul_(2.0)
    rows[1] = torch.ones(4)  # the memory of the one before may be taken again
    found = norms.of(rows)
    assert [float(one) for one in found] == [4.0, 2.0, 0.0, 4.0]
    assert found[3] is first[3]
    with torch.inference_mode():
        uncounted = torch.ones(4)
        norms.take([uncounted])
        uncounted.mul_(2.0)
        assert float(norms.of([uncounted])[0]) == 4.0
    norms.clear()
    assert not norms._known


def norms_on_the_way(layout: str) -> list[int]:
    """After each of three backwards, of which the second is not synced: how many norms are known since rows landed.
    All that the step would use are the norms of the rows as they are."""
    mesh = Mesh(layout)
    if mesh.layout.tp == mesh.layout.pp == 1:
        model, backwards = toys.Toy().double(), 3
    else:
        config = models.TransformerConfig(vocab=19, hidden=8, layers=2, heads=2, mlp=8, tied=True)
        model, backwards = models.Transformer(config, mesh).double(), 1 if mesh.layout.pp > 1 else 3
    engine, known = Engine(model, mesh, toys.sgd), []
    paid, norms = engine.ledger.paid, engine.ledger.flights.norms
    for number in range(backwards):
        with engine.no_sync() if number == 1 else nullcontext():
            if isinstance(model, toys.Toy):
                x, y = toys.micro_batch(0, mesh.index(DATA) + 2 * number)
                engine.backward(toys.loss_of(model, x, y), weight=len(x))
            else:
                tokens = torch.arange(12).reshape(2, 6) + number
                engine.accumulate((tokens, tokens % 7), 2)
        if number != 1:
            for _ in engine.grads():
                pass
        rows = list(paid.values())
        known.append(sum(norms._find(row) is not None for row in rows))
        assert torch.equal(torch.stack(norms.of(rows)), torch.stack([row.norm() for row in rows])), number
        norms.clear()
    engine.step()
    return known


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "dp2 zero3", "tp2 sp", "pp2"])
def test_norms_taken_as_rows_land_are_those_of_the_step_s_rows(worlds, layout: str) -> None:
    for first, *later in worlds(2).run(norms_on_the_way, layout):
        assert first > 0
        assert not any(later)
