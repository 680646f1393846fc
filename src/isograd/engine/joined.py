"""Several torch optimizers as one, such as Muon for matrices and AdamW for the rest.

    ig.Joined(torch.optim.Muon(shards.whole, lr=2e-2), torch.optim.AdamW(shards.rest, lr=3e-4))

Groups and state of its members are its own: learning-rate schedulers, checkpoints and `zero_grad` see one optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isograd.errors import EngineError


class Joined(torch.optim.Optimizer):
    """Several torch optimizers as one: `step` steps each of them."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for member in optimizers for group in member.param_groups], {})
        self.optimizers = optimizers
        self._share()

    def _share(self) -> None:
        """The same groups and the same state, seen by the members and from here."""
        first = 0
        for member in self.optimizers:
            count = len(member.param_groups)
            member.param_groups = self.param_groups[first : first + count]
            member.state = self.state
            first += count

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each optimizer; the closure, if there is one, runs once before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.optimizers:
            member.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the joined optimizers then share the loaded state."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once optimizers are joined: none of them would step the new group."""
        if self.optimizers:
            raise EngineError(
                "IG530",
                "a group was added to joined optimizers, and none of them would step it",
                seen=f"add_param_group on {' and '.join(type(o).__name__ for o in self.optimizers)}",
                expected="groups given to one of them before they are joined",
            )
        super().add_param_group(param_group)
