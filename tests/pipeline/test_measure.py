"""Measured costs: the same numbers on every rank, a dear layer dearer than a cheap one, and nothing left behind."""

from __future__ import annotations

import torch
from torch import nn

import isograd as ig
from isograd.pipeline import Stages, balanced, measure


class Pair(nn.Module):
    """Passes on two tensors, of which one carries no gradient."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.dropout(x, 0.5, train=True), torch.arange(len(x))


class Take(nn.Module):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows]


def modules() -> list[nn.Module]:
    wide = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40)))
    return [Pair(), Take(), wide, nn.Identity(), nn.Linear(256, 3)]


def on_rank() -> tuple[list[float], tuple[int, ...], bool]:
    mesh = ig.Mesh("pp2")
    mine = modules()
    before = torch.random.get_rng_state()
    costs = measure(mine, torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), mesh, repeats=3)
    untouched = torch.equal(before, torch.random.get_rng_state()) and all(
        p.grad is None for m in mine for p in m.parameters()
    )
    model = Stages(mine, mesh, loss=lambda out, _: (out.mean(), len(out)), costs=costs)
    return costs, tuple(len(part) for part in model.parts), untouched


def test_all_ranks_learn_the_same_costs_and_cut_alike(worlds) -> None:
    first, second = worlds(2).run(on_rank)
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert len(first[0]) == 5
    assert all(cost > 0 for cost in first[0])
    assert first[2] and second[2], "gradients or random numbers were left behind"


def test_forty_layers_cost_more_than_none(worlds) -> None:
    """The only comparison of times here: a factor of hundreds."""
    costs = worlds(2).run(on_rank)[0][0]
    assert costs[2] == max(costs)


def test_with_several_stages_a_rank_the_ranks_are_evened_out_before_the_stages() -> None:
    def dearest(split: tuple[int, ...], ranks: int) -> float:
        costs = [*split[:-1], split[-1] + 4.0]
        return max(sum(costs[rank::ranks]) for rank in range(ranks))

    stages_only = balanced([1.0] * 96, 32, last=4.0)
    split = balanced([1.0] * 96, 32, last=4.0, ranks=8)
    assert sum(split) == 96
    assert min(split) >= 1
    assert dearest(stages_only, 8) > dearest(split, 8) == 13.0  # 100 / 8, in whole layers
    assert balanced([1.0] * 9, 4, last=1.0, ranks=4) == balanced([1.0] * 9, 4, last=1.0)
