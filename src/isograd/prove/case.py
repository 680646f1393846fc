"""A case: what is to be proven, as a function of a mesh.

The batch is the whole one, the same on every rank; the verifier cuts it along dim 0 into micro-batches of unequal sizes
and gives each data rank its own. `loss` returns the mean over a part's valid tokens, and how many there are (or only a
mean, over rows). Left out, the model does so itself, called with a part of the batch; then pipelines can be proven too.
Code that does not use isograd's engine gives `step` instead: it is called on every rank with the model, the whole batch
and the mesh, runs forward and backward of one step in its own way, and leaves the gradients in `.grad` of its
parameters (in one optimizer's, when it has one: `optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine.batches import call
from isograd.errors import VerifyError

Loss = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Tensor | int | float] | Terms"]


@dataclass
class Case:
    """What is to be proven: a model, a batch, and how a step is made of them."""

    model: nn.Module
    batch: Any  # tensors in any nest of dicts, lists and tuples; dim 0 is the sample
    loss: Loss | None = None
    step: Callable[[nn.Module, Any, Mesh], None] | None = None
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1)
    micro_batches: int = 2  # per data rank
    clip: float | None = 1.0
    steps: int = 2

    def __post_init__(self) -> None:
        if self.loss is not None and self.step is not None:
            raise VerifyError("IG730", seen=f"loss={self.loss}, step={self.step}")
        self.rows  # noqa: B018 (refuses a batch without rows)

    @property
    def rows(self) -> int:
        """The number of samples in the batch."""
        sizes = {t.shape[0] for t in tree.tree_leaves(self.batch) if isinstance(t, Tensor) and t.dim()}
        if len(sizes) != 1:
            raise VerifyError("IG731", seen=f"first dimensions {sorted(sizes)}")
        return int(sizes.pop())

    def to(self, dtype: torch.dtype) -> Case:
        """Model and batch in the precision of the proof."""
        self.model.to(dtype)
        self.batch = tree.tree_map(
            lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, self.batch
        )
        return self

    def parts(self, count: int) -> list[Any]:
        """The batch in `count` parts of rows, the first ones larger."""
        if count > self.rows:
            raise VerifyError("IG734", seen=f"{self.rows} rows for {count} parts", count=count)
        base, extra = divmod(self.rows, count)
        ends, at = [], 0
        for i in range(count):
            ends.append((at, at + base + (i < extra)))
            at = ends[-1][1]
        return [
            tree.tree_map(lambda t, a=a, b=b: t[a:b] if isinstance(t, Tensor) and t.dim() else t, self.batch)
            for a, b in ends
        ]

    def terms(self, part: Any) -> Terms:
        """The same of a loss with one weight: a single term."""
        result = self.mean(part)
        return result if isinstance(result, Terms) else Terms(loss=result)

    def mean(self, part: Any) -> tuple[Tensor, Tensor] | Terms:
        """(mean loss of a part, its weight), or the terms of its loss."""
        result = call(self.model, part) if self.loss is None else self.loss(self.model, part)
        if isinstance(result, Terms):
            return result
        if isinstance(result, tuple):
            return result[0], torch.as_tensor(result[1], dtype=torch.float64)
        rows = next(t.shape[0] for t in tree.tree_leaves(part) if isinstance(t, Tensor) and t.dim())
        return result, torch.as_tensor(rows, dtype=torch.float64)
