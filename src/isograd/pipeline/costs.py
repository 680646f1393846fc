"""Measured costs of layers, for splits that a count of matrix elements would get wrong.

    costs = ig.pipeline.measure(modules, inputs, mesh)               # seconds, the same numbers on every rank
    model = ig.pipeline.Stages(modules, mesh, loss=loss, costs=costs)

Rank 0 runs the modules, each on the output of the one before, and sends its times to the others: if each rank measured
for itself, they would cut the model at different places. Gradients and random numbers stay as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.comm import raw
from isograd.core.mesh import Mesh


def measure(modules: Sequence[nn.Module], inputs: Any, mesh: Mesh, *, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each module: the median of `repeats` passes, after one pass to warm up.

    `inputs`: the arguments of the first module; a tuple is unpacked, as between stages. All ranks call this together;
    only rank 0 runs the modules.
    """
    costs = torch.zeros(len(modules), dtype=torch.float64, device=mesh.device)
    if mesh.rank == 0:
        with torch.random.fork_rng():
            passes = [_through(modules, inputs, mesh.device) for _ in range(repeats + 1)]
        costs += costs.new_tensor([median(times) for times in zip(*passes[1:], strict=True)])
    raw.broadcast_(costs, mesh.group("world"))
    return [float(cost) for cost in costs]


def _through(modules: Sequence[nn.Module], x: Any, device: torch.device) -> list[float]:
    found = []
    for module in modules:
        x = tree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
        given = [t for t in tree.tree_leaves(x) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [*given, *(p for p in module.parameters() if p.requires_grad)]
        began = _now(device)
        with torch.enable_grad():
            x = module(*x) if isinstance(x, tuple) else module(x)
        made = [t for t in tree.tree_leaves(x) if isinstance(t, Tensor) and t.requires_grad]
        if made and wanted:
            torch.autograd.grad(made, wanted, [torch.ones_like(t) for t in made], allow_unused=True)
        found.append(_now(device) - began)
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
