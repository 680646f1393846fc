"""Ranks that wait for a late one leave nothing in the store, however many steps they wait at."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed import distributed_c10d

from isograd import Engine, Mesh
from tests.engine import toys


def keys_after_each_step() -> list[int]:
    """How many names the store has; rank 1 is late at every step."""
    mesh, model = Mesh("dp2"), toys.Toy()
    engine, counts = Engine(model, mesh, toys.sgd), []
    for step in range(4):
        x, y = toys.micro_batch(step, 2)
        engine.backward(toys.loss_of(model, x, y), weight=len(x))
        time.sleep(1.3 * (mesh.rank == 1 and step > 0))
        engine.step()
        mesh_wide = torch.zeros(1)
        torch.distributed.all_reduce(mesh_wide)  # no rank is at its next step
        counts.append(distributed_c10d._get_default_store().num_keys())
        torch.distributed.all_reduce(mesh_wide)
    return counts


@pytest.mark.medium
def test_a_rank_that_is_late_at_every_step_costs_the_store_no_name(worlds) -> None:
    for counts in worlds(2).run(keys_after_each_step):
        assert len(set(counts)) == 1, counts
