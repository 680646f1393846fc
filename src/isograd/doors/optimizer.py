"""The user's own optimizer on an engine's row shards, and the optimizer that a foreign loop then steps.

A script builds `AdamW(model.parameters(), ...)` before any engine is there. `onto_shards` gives the engine that same
optimizer with each parameter replaced by the tensor which this rank steps for it: options, groups and schedulers made
with it stay. `EngineOptimizer` is what the loop gets back: its `step` is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from isograd.doors.world import names_lost
from isograd.engine import Engine, Shards, Stats
from isograd.errors import DoorError
from isograd.mesh import Mesh


def onto_shards(
    optimizer: torch.optim.Optimizer, model: nn.Module, mesh: Mesh
) -> Callable[[Shards], torch.optim.Optimizer]:
    """What `Engine(optimizer=...)` takes, of an optimizer that was built on the model's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter in given)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(trained - {names.get(id(parameter), "") for parameter in given})
    if foreign or missing:
        raise DoorError(
            "IG851",
            "the optimizer does not step exactly the trainable parameters of the model",
            seen=f"tensors that are not the model's: {foreign}; parameters that it does not have: {missing[:8]}"
            f"{' ...' if len(missing) > 8 else ''}",
            expected="an optimizer of all parameters of the model that require a gradient",
            fix="freeze what should not train with requires_grad_(False); an optimizer of two models needs two engines",
            where=mesh.where(),
        )

    def rebuilt(shards: Shards) -> torch.optim.Optimizer:
        own = dict(shards.named())
        moved = [n for p in given if (n := names[id(p)]) in own and own[n] is not p and optimizer.state.get(p)]
        if moved:
            raise DoorError(
                "IG852",
                "the optimizer has state already, of whole parameters",
                seen=f"{type(optimizer).__name__} with state of {moved[:4]} under {str(mesh.layout)!r}",
                expected="an optimizer that has not stepped, and that makes its state in its first step",
                fix="build it anew; to continue a run, load a checkpoint that isograd has saved; or take zero0",
                where=mesh.where(),
            )
        for group in optimizer.param_groups:
            group["params"][:] = [own[names[id(p)]] for p in group["params"] if names[id(p)] in own]
        return optimizer

    return rebuilt


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for an engine where a loop expects an optimizer: `step` settles, clips and steps on all ranks.

    Its groups are the torch optimizer's, so schedulers and callbacks see and set what is stepped with.
    """

    def __init__(
        self,
        engine: Engine,
        told: Callable[[Stats], None] | None = None,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """told: is called with what each step was; dropped: when gradients are zeroed."""
        self.engine, self._told, self._dropped = engine, told, dropped
        self.stats: Stats | None = None  # of the last step
        self._is_accelerate_prepared = True  # accelerate wraps it no further

    def __getattr__(self, name: str) -> Any:
        if "engine" not in self.__dict__:  # a copy under way
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Of the torch optimizer."""
        return self.engine.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of the torch optimizer: this rank's rows."""
        return self.engine.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Of the torch optimizer."""
        return self.engine.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out on all ranks, because its gradients were not finite."""
        return self.stats is not None and self.stats.skipped

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The engine's step."""
        if closure is not None:
            self._refuse("step(closure)", "an optimizer that is stepped once for each gradient")
        with names_lost(self.engine.mesh):
            self.stats = self.engine.step()
        if self._told is not None:
            self._told(self.stats)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing after a step. In the middle of one: the step's gradients are dropped, which all ranks do together."""
        if self._dropped is not None:
            self._dropped()
        if not self.engine.ledger.empty:
            self.engine.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine has planned who owns what."""
        self._refuse("add_param_group", "all groups before the engine is made")

    def state_dict(self) -> dict[str, Any]:
        """Of whole parameters only; of rows it would be one rank's part."""
        if self.engine.mesh.layout.zero:
            self._refuse(
                "state_dict", "a checkpoint of all ranks' rows: the door's own saving, or ig.checkpoint.Keeper"
            )
        return self.engine.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into whole parameters only."""
        if self.engine.mesh.layout.zero:
            self._refuse("load_state_dict", "a checkpoint that all ranks load: the door's, or ig.checkpoint.Keeper")
        self.engine.optimizer.load_state_dict(state_dict)

    def _refuse(self, called: str, expected: str) -> NoReturn:
        raise DoorError(
            "IG853",
            "this cannot be asked of an optimizer whose steps are an engine's",
            seen=f"optimizer.{called} under {str(self.engine.mesh.layout)!r}",
            expected=expected,
            where=self.engine.mesh.where(),
        )
