"""What one step did, as `Engine.step` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isograd.engine.nonfinite import NonFiniteReport
from isograd.engine.term_weights import Mean


@dataclass(frozen=True)
class Stats:
    """What one step did; equal on all ranks."""

    loss: float  # sum of weighted losses / global weight: the number that was optimized
    grad_norm: float  # of the mean gradient, before clipping
    weight: float  # global: all tokens (rows, ...) of the step; of several terms, the first one's that has any
    skipped: bool  # the norm was not finite: no rank stepped
    loss_scale: float
    terms: Mapping[str, Mean] = field(default_factory=dict)  # of a step of several; `loss` is their weighted sum
    nonfinite: NonFiniteReport | None = None  # where, in a step that was skipped
