"""An exponential moving average of the weights (EMA), beside the masters and cut as they are.

One device, after every step: average = decay * average + (1 - decay) * weights, from the weights before the first step.
torch's own function for averaged models computes it, on each rank for the rows that it steps, in fp32 at least. A step
that is skipped leaves it as it is. Checkpoints hold it as "ema/NAME", which loads under any layout (state.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

if TYPE_CHECKING:
    from isograd.engine.engine import Engine


class WeightAverage:
    """The averages of the tensors that this rank steps, by parameter."""

    def __init__(self, engine: Engine, decay: float) -> None:
        """All ranks make it together, and the engine keeps it."""
        self._optimizer, self.rows = engine._sharded_optimizer, dict[str, Tensor]()
        self._update = get_ema_multi_avg_fn(decay)
        self.restart()
        self._optimizer.average = self

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are; all ranks call it."""
        if self._optimizer.units is None:
            self._optimizer.take_edits()
        self._optimizer._collect_edits()
        masters = {name: master.detach() for name, master in self._optimizer.masters.items()}
        wide = {name: torch.promote_types(master.dtype, torch.float32) for name, master in masters.items()}
        self.rows.update({name: master.to(wide[name], copy=True) for name, master in masters.items()})

    @torch.no_grad()
    def stepped(self) -> None:
        """After a step."""
        masters = [self._optimizer.masters[name].data for name in self.rows]
        if masters:
            self._update(list(self.rows.values()), masters, 0)
