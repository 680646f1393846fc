"""FAILURES C: accelerate's own script about gradient synchronisation, with ig.DataParallel in the place of DDP.

The functions are those of accelerate/test_utils/scripts/test_sync.py as installed: they compare a wrapped model on two
ranks with a plain one that sees all rows, with and without no_sync, trigger_sync_in_backward and accumulate.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from torch import nn

import isograd as ig
from isograd.comm import raw


def triggered() -> torch.Tensor:
    """What accelerate's trigger_sync_in_backward does to DDP: three forwards under no_sync, then three backwards of
    which the last one syncs."""
    rank, _ = raw.world()
    torch.manual_seed(0)
    model = ig.DataParallel(nn.Linear(3, 1).double())
    with model.no_sync():
        losses = [model(rows(rank, step)).square().mean() for step in range(3)]
        for loss in losses[:2]:
            loss.backward()
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        losses[2].backward()
        model.require_backward_grad_sync, model.require_forward_param_sync = before
    gradient = model.module.weight.grad
    assert gradient is not None
    return gradient.clone()


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def test_a_sync_that_is_triggered_between_forward_and_backward_reduces_all_backwards(worlds) -> None:
    """FAILURES C: `require_backward_grad_sync`, and the two other names that accelerate uses, were missing."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 1).double()
    for step in range(3):
        plain(torch.cat([rows(rank, step) for rank in range(2)])).square().mean().backward()
    for gradient in worlds(2).run(triggered):
        assert torch.allclose(gradient, plain.weight.grad, rtol=1e-12, atol=1e-14)


def scripts() -> list[str]:
    """The names of the functions that ran to their end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.test_utils.scripts import test_sync

    rank, ranks = raw.world()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # the world is there already
    done = []
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}),
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", ig.DataParallel),
    ):
        try:
            accelerator = Accelerator()
            wrapped = test_sync.get_training_setup(accelerator)[1]
            assert isinstance(wrapped, ig.DataParallel)
            assert accelerator.num_processes == ranks
            for function in (test_sync.test_distributed_sync, test_sync.test_distributed_sync_multiple_fwd):
                function(accelerator)
                done.append(function.__name__)
            for split, dispatch, each in ((True, False, False), (False, True, True)):
                test_sync.test_gradient_accumulation(split, dispatch, each)
                test_sync.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, each)
                done.append(f"accumulation {split} {dispatch} {each}")
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
    return done


@pytest.mark.slow
def test_accelerates_script_about_synchronisation_passes_with_data_parallel_in_the_place_of_ddp(worlds) -> None:
    pytest.importorskip("accelerate")
    for done in worlds(2).run(scripts):
        assert len(done) == 4
