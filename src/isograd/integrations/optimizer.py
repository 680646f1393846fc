"""The user's own optimizer on an engine's row shards, and the optimizer that a foreign loop then steps.

A script builds `AdamW(model.parameters(), ...)` before any engine is there. `on_shards` gives the engine that same
optimizer with each parameter replaced by the tensor which this rank steps for it: options, groups and schedulers made
with it stay. `EngineOptimizer` is what the loop gets back: its `step` is the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from isograd.checkpoint import CheckpointManager
from isograd.comm.consensus import raise_on_all_ranks
from isograd.core.mesh import Mesh
from isograd.engine import Engine, Shards, Stats
from isograd.errors import IntegrationError
from isograd.integrations.weights import LabelCounter
from isograd.integrations.world import name_failed_rank, name_failed_rank_in_forward


def on_shards(
    optimizer: torch.optim.Optimizer, model: nn.Module, mesh: Mesh
) -> Callable[[Shards], torch.optim.Optimizer]:
    """What `Engine(optimizer=...)` takes, of an optimizer that was built on the model's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in names for parameter in given)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(trained - {names.get(id(parameter), "") for parameter in given})
    error = None
    if foreign or missing:
        seen = (
            f"tensors that are not the model's: {foreign}; parameters that it does not have: {missing[:8]}"
            f"{' ...' if len(missing) > 8 else ''}"
        )
        error = IntegrationError("IG851", seen=seen, where=mesh.describe_rank())
    raise_on_all_ranks(error, mesh, IntegrationError)  # an exception may have left one rank's parameters frozen

    def rebuilt(shards: Shards) -> torch.optim.Optimizer:
        own = dict(shards.named())
        moved = [n for p in given if (n := names[id(p)]) in own and own[n] is not p and optimizer.state.get(p)]
        if moved:
            seen = f"{type(optimizer).__name__} with state of {moved[:4]} under {str(mesh.layout)!r}"
            raise IntegrationError("IG852", seen=seen, where=mesh.describe_rank())
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
        on_step: Callable[[Stats], None] | None = None,
        on_zero_grad: Callable[[], None] | None = None,
    ) -> None:
        """on_step: is called with what each step was; on_zero_grad: when gradients are zeroed."""
        self.engine, self._on_step, self._on_zero_grad = engine, on_step, on_zero_grad
        self.stats: Stats | None = None  # of the last step
        self._is_accelerate_prepared = True  # accelerate wraps it no further

    def __getattr__(self, name: str) -> Any:  # param_groups, state and defaults among them
        if "engine" not in self.__dict__:  # a copy under way
            raise AttributeError(name)
        return getattr(self.engine.optimizer, name)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out on all ranks, because its gradients were not finite."""
        return self.stats is not None and self.stats.skipped

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The engine's step."""
        if closure is not None:
            self._refuse("step(closure)", "an optimizer that is stepped once for each gradient")
        with name_failed_rank(self.engine.mesh):
            self.stats = self.engine.step()
        if self._on_step is not None:
            self._on_step(self.stats)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing after a step. In the middle of one: the step's gradients are dropped, which all ranks do together."""
        if self._on_zero_grad is not None:
            self._on_zero_grad()
        if not self.engine.step_state.empty:
            self.engine.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the engine has planned who owns what."""
        self._refuse("add_param_group", "all groups before the engine is made")

    def state_dict(self) -> dict[str, Any]:
        """Of whole parameters only; of rows it would be one rank's part."""
        return self._of_whole("state_dict").state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into whole parameters only."""
        self._of_whole("load_state_dict").load_state_dict(state_dict)

    def _of_whole(self, called: str) -> torch.optim.Optimizer:
        if self.engine.mesh.layout.zero:
            self._refuse(called, "what all ranks save and load: the integration's, or ig.checkpoint.CheckpointManager")
        return self.engine.optimizer

    def _refuse(self, called: str, expected: str) -> NoReturn:
        seen = f"optimizer.{called} under {str(self.engine.mesh.layout)!r}"
        raise IntegrationError("IG853", seen=seen, expected=expected, where=self.engine.mesh.describe_rank())


@dataclass
class TrainedModule:
    """A module that was set up, and the engine of its optimizer, when that was set up, too."""

    module: nn.Module
    label_counter: LabelCounter
    engine: Engine | None = None
    norm: Tensor | None = None  # what was returned when the loop asked to clip: the step fills it
    must_be_finite: bool = False
    steps: int = 0  # that the engine has taken, or skipped

    @property
    def drops(self) -> int:
        """The steps that were dropped."""
        return 0 if self.engine is None else self.engine.step_state.now.ended - self.steps

    def clips(self, max_norm: float, must_be_finite: bool = False) -> Tensor:
        """The next step clips to max_norm. The tensor returned is NaN until then, when it gets the norm."""
        assert self.engine is not None
        self.engine.clip, self.must_be_finite = max_norm, must_be_finite
        self.norm = torch.full((), math.nan, dtype=torch.float64)
        return self.norm

    def stepped(self, stats: Stats) -> None:
        """Fills the norm, and ends the clipping that was asked for one step."""
        assert self.engine is not None
        norm, strict, self.steps = self.norm, self.must_be_finite, self.steps + 1
        self.zeroed()
        if norm is not None:
            norm.fill_(stats.grad_norm)
        if strict and stats.skipped:
            raise IntegrationError("IG869", seen=stats.nonfinite, where=self.engine.mesh.describe_rank())

    def zeroed(self) -> None:
        """Nothing is left of clipping that was asked for gradients that are gone."""
        assert self.engine is not None
        self.engine.clip, self.norm, self.must_be_finite = None, None, False


def engine_optimizer(
    optimizer: torch.optim.Optimizer, trained: Sequence[TrainedModule], mesh: Mesh, elementwise: bool
) -> EngineOptimizer | None:
    """What steps the engine of the module whose parameters the optimizer has; the engine is made here. None: they are
    of several of these modules, of none, or of one that has an engine."""
    steps = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = [one for one in trained if steps & {id(parameter) for parameter in one.module.parameters()}]
    if len(own) != 1 or own[0].engine is not None:
        return None
    (one,) = own
    one.engine = Engine(one.module, mesh, on_shards(optimizer, one.module, mesh), elementwise=elementwise)
    name_failed_rank_in_forward(one.engine)
    return EngineOptimizer(one.engine, one.stepped, one.zeroed)


def full_parameters(engine: Engine | None) -> AbstractContextManager[Any]:
    """Every parameter is whole on this rank in here; at ZeRO 3 all ranks come together."""
    return nullcontext() if engine is None else engine.full_parameters()


def save_state(engine: Engine, place: Path, step: int = 1, extra: Mapping[str, Any] | None = None) -> None:
    """The engine's state, into a folder that any layout loads; all ranks come here."""
    with CheckpointManager(place, engine, keep_last=1) as keeper:
        keeper.save(step, extra)


def load_state(engine: Engine, place: Path, name: str = "", fix: str = "") -> Mapping[str, Any] | None:
    """From such a folder: what was saved beside the state. None: there is no checkpoint in it. name, fix: of a
    checkpoint of another library's that has no such folder."""
    if name:
        require_state(place, name, fix, engine.mesh)
    with CheckpointManager(place, engine, keep_last=1) as keeper:
        found = keeper.load("auto")
    return None if found is None else found.extra


def require_state(place: Path, name: str, fix: str, mesh: Mesh) -> None:
    """Refuse a checkpoint of another library's, of this name, without the folder of an engine's state."""
    if not place.is_dir():
        raise IntegrationError("IG867", name=name, seen=f"no folder {place}", fix=fix, where=mesh.describe_rank())
