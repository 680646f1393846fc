"""Muon for experts: torch's Muon, which takes matrices alone, stepping stacks of matrices as well.

The experts of a layer are one parameter [experts, rows, columns], and a row shard of it is some experts, each whole
(engine/plan.py cuts dim 0). Each of them is a matrix to Muon: its momentum, orthogonalisation and rate are its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Muon(torch.optim.Muon):
    """torch's Muon, to which a parameter of three dimensions is as many matrices as it has rows."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        """`params`: parameters, or groups of them. `options`: those of torch's Muon."""
        super().__init__(
            [nn.Parameter(torch.empty(0, 0))], **options
        )  # which refuses three dimensions here, and only here
        self.param_groups.clear()
        given = list(params)
        for group in given if given and isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

    def _init_group(
        self, group: Any, params_with_grad: list[Tensor], grads: list[Tensor], muon_momentum_bufs: list[Tensor]
    ) -> bool:
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        is_complex = super()._init_group(group, *found)
        for target, tensors in zip((params_with_grad, grads, muon_momentum_bufs), found, strict=True):
            target += [matrix for t in tensors for matrix in (t.unbind() if t.dim() == 3 else (t,))]
        return is_complex
