"""FAILURES C: what accelerate does to DDP by its attributes, done to ig.DataParallel; scripts: tests/integrations."""

from __future__ import annotations

import torch
from torch import nn

import isograd as ig
from isograd.comm import world


def triggered() -> torch.Tensor:
    """What accelerate's trigger_sync_in_backward does to DDP: three forwards under no_sync, then three backwards of
    which the last one syncs."""
    rank, _ = world.world()
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
