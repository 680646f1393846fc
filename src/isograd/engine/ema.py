"""Averages of the weights: an exponential moving one (EMA) beside the masters, and that of a schedule-free optimizer.

One device, after every step: average = decay * average + (1 - decay) * weights, from the weights before the first step.
torch's own function for averaged models computes it, on each rank for the rows that it steps, in fp32 at least. A step
that is skipped leaves it as it is. Checkpoints hold it as "ema/NAME", which loads under any layout (state.py).

A schedule-free optimizer takes gradients at one point and is evaluated, saved and shown at another, the average of its
steps. Its methods `eval` and `train` move the masters from one to the other: `averaged` and `switch` call them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from isograd.engine.muon import members
from isograd.errors import IsogradError

if TYPE_CHECKING:
    from isograd.engine.engine import Engine


class WeightAverage:
    """The averages of the tensors that this rank steps, by parameter: a hook of the engine's optimizer."""

    def __init__(self, engine: Engine, decay: float) -> None:
        """All ranks make it together, and the engine keeps it."""
        self._optimizer = engine._sharded_optimizer
        wide = {n: torch.promote_types(m.dtype, torch.float32) for n, m in self._optimizer.masters.items()}
        self.rows = {n: torch.empty_like(m, dtype=wide[n]) for n, m in self._optimizer.masters.items()}
        self._update = get_ema_multi_avg_fn(decay)
        self.restart()
        hooks = engine.optimizer._optimizer_step_post_hooks
        for number in [number for number, hook in hooks.items() if isinstance(hook, WeightAverage)]:
            del hooks[number]  # an earlier one: the newest is kept
        engine.optimizer.register_step_post_hook(self)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are; all ranks call it."""
        if self._optimizer.zero3 is None:
            self._optimizer.take_edits()
        self._optimizer._collect_edits()
        for name, master in self._optimizer.masters.items():
            self.rows[name].copy_(master.detach())

    @torch.no_grad()
    def __call__(self, *_: object) -> None:
        """After a step."""
        masters = [self._optimizer.masters[name].data for name in self.rows]
        if masters:
            self._update(list(self.rows.values()), masters, 0)


def average_of(engine: Engine) -> WeightAverage | None:
    """The one that the engine keeps, if there is one."""
    return next((h for h in engine.optimizer._optimizer_step_post_hooks.values() if isinstance(h, WeightAverage)), None)


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """Inside, the model has the weights that a schedule-free optimizer has averaged; under others nothing changes. All
    ranks enter and leave."""
    switch(engine, "eval")
    try:
        yield
    except BaseException as error:  # the other ranks may be elsewhere, but for errors that all of them raise
        alike = isinstance(error, IsogradError) and engine.mesh.group("world").transport is not None
        switch(engine, "train", spread=alike or engine.mesh.size("world") == 1)
        raise
    switch(engine, "train")


@torch.no_grad()
def switch(engine: Engine, mode: Literal["eval", "train"], spread: bool = True) -> None:
    """The same for good: "eval", the average; "train", where the next gradient is taken. All ranks call it; without
    `spread` one may do so alone, and no step is taken until a checkpoint is loaded."""
    switches = [getattr(one, mode) for one in members(engine.optimizer) if hasattr(one, "eval")]
    for each in switches:
        each()
    if switches and spread:
        engine._sharded_optimizer.moved(engine.step_state)
    elif switches:
        engine.step_state.mark_inconsistent("an exception left the averaged weights in the model")
