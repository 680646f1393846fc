"""What a step means: the definition that the engine's steps, buckets, owners and stages are held to.

Every rank adds up the gradients of its weighted losses. At the step, every gradient is summed over all ranks that hold
other data, and divided once by the weight of all of them. A loss of several terms is the sum of such means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from isograd.comm import raw
from isograd.core.mesh import DATA, Mesh


def gradients(
    parameters: Mapping[str, nn.Parameter], losses: Sequence[tuple[Tensor, float]], mesh: Mesh
) -> dict[str, Tensor]:
    """Of the mean over all ranks' losses, by name. losses: this rank's (mean, weight), whose graphs are alive."""
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    weight = torch.zeros((), dtype=torch.float64)
    for loss, count in losses:
        weight += count
        if count:
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
            for sums, gradient in zip(total.values(), found, strict=True):
                if gradient is not None:
                    sums.add_(gradient, alpha=count)
    group = mesh.group(DATA)
    all_weight = sum(raw.gather_list(weight, group))
    return {name: raw.all_reduce(sums, group) / all_weight for name, sums in total.items()}


def gradients_of_terms(
    parameters: Mapping[str, nn.Parameter], terms: Sequence[tuple[float, Sequence[tuple[Tensor, float]]]], mesh: Mesh
) -> dict[str, Tensor]:
    """Of sum over terms of coefficient * mean. terms: (coefficient, this rank's losses) of each, on all ranks alike."""
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for coefficient, losses in terms:
        for name, mean in gradients(parameters, losses, mesh).items():
            total[name].add_(mean.nan_to_num(), alpha=coefficient)  # NaN: the mean over nothing, which adds nothing
    return total
