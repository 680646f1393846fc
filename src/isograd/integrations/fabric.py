"""Lightning's Fabric on the engine: `Fabric(strategy=ig.integrations.FabricStrategy("dp4 zero3"))`, or "isograd"."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isograd.core.attributes import set_attributes
from isograd.engine import Engine
from isograd.integrations.optimizer import (
    EngineOptimizer,
    TrainedModule,
    engine_optimizer,
    full_parameters,
    load_state,
    require_state,
    save_state,
)
from isograd.integrations.shared_rows import CutStrategy, part_of_state, whole_state
from isograd.integrations.weights import LabelCounter
from isograd.integrations.world import name_failed_rank, refuse

if "lightning_fabric" in sys.modules and "lightning" not in sys.modules:
    from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    from lightning_fabric.strategies.strategy import _BackwardSyncControl
else:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl

NAME = "isograd"


class FabricStrategy(CutStrategy, DDPStrategy):  # type: ignore[misc]
    """Takes the place of "ddp", "fsdp" and "deepspeed" in a Fabric: docs/integrations/lightning.md."""

    def __init__(self, layout: str | None = None, *, elementwise: bool = False, **kwargs: Any) -> None:
        """layout: "dp4 zero3" and the like; left out, dp over all ranks. kwargs: those of Lightning's DDPStrategy that
        say where ranks run, such as process_group_backend and timeout. elementwise: as ig.Engine takes it."""
        super().__init__(**kwargs)
        self.layout, self._elementwise = layout, elementwise
        self._trained: list[TrainedModule] = []
        self._saving = False  # a checkpoint
        self._backward_sync_control = _Sync(self)

    @property
    def engine(self) -> Engine:
        """The engine, of a Fabric that has set up one module with its optimizer."""
        return self._of(None)

    def module_to_device(self, module: nn.Module) -> None:
        """Lightning's. At zero3 the engine fills a model of `ig.hf.load`, which has no values before."""
        if not any(parameter.is_meta for parameter in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """The module itself. Under cp, tp and ep the model of transformers in it is attached or cut in place."""
        self._cut_models.cut(module)
        self._trained.append(TrainedModule(module, LabelCounter(module, "fabric.backward", self.mesh)))
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An engine of the module whose parameters it has."""
        mesh = self.mesh
        self._cut_models.follow(optimizer)
        refuse(
            {
                f"options of DDP: {self._ddp_kwargs}": self._ddp_kwargs,
                "a precision with a loss scale ('bf16-mixed' has none)": getattr(self.precision, "scaler", None),
            },
            "this Fabric reduces or scales gradients by itself",
            "leave it out: the engine reduces, and bf16 needs no scale",
            mesh,
        )
        made = engine_optimizer(optimizer, self._trained, mesh, self._elementwise)
        if made is None:
            self._refuse(
                "an optimizer of several modules, of none that was set up, or a second one of a module",
                "fabric.setup(model, optimizer): one optimizer for each module",
            )
        return made

    def _of(self, module: nn.Module | None) -> Engine:
        engine = self._one(module).engine
        if engine is None:
            self._refuse("a module without an optimizer", "fabric.setup(model, optimizer)")
        return engine

    def _one(self, module: nn.Module | None) -> TrainedModule:
        found = [one for one in self._trained if module is None or one.module is module]
        found = [one for one in found if module is not None or one.engine is not None]
        if len(found) != 1:
            self._refuse(
                f"{len(found)} modules that could be meant",
                "one module that was set up with its optimizer",
                "say which of several: fabric.backward(loss, model=model, weight=count)",
            )
        return found[0]

    def backward(
        self, tensor: Tensor, module: nn.Module | None, *args: Any, weight: float | Tensor | None = None, **kwargs: Any
    ) -> None:
        """weight: how many labels (rows, ...) the loss is the mean of. Nothing divides it."""
        if args or kwargs:
            self._refuse(f"backward with {', '.join(kwargs) or 'positions'}", "fabric.backward(loss, weight=count)")
        one, engine = self._one(module), self._of(module)
        if self._cut_models.shares_rows:
            weight = self._cut_models.weight_of(tensor, weight, "fabric.backward(model(**batch).loss)")
        self.precision.pre_backward(tensor, one.module)
        with name_failed_rank(engine.mesh):
            engine.backward(tensor, one.label_counter.weight_of(tensor, weight, engine))
        self.precision.post_backward(tensor, one.module)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """The next step clips to max_norm. The tensor returned is NaN until then, when it gets the norm."""
        if norm_type != 2 or not max_norm > 0:
            self._refuse(f"clip_gradients(max_norm={max_norm}, norm_type={norm_type})", "a positive 2-norm")
        self._of(module)
        return self._one(module).clips(max_norm, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refused."""
        self._refuse("clip_gradients(clip_val=...)", "fabric.clip_gradients(model, optimizer, max_norm=...)")

    def _full_parameters(self, module: nn.Module) -> AbstractContextManager[Any]:
        return full_parameters(next((one.engine for one in self._trained if one.module is module), None))

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole parameters, at every stage; all ranks come here."""
        with self._full_parameters(module):
            return whole_state(super().get_module_state_dict(module), module, self.mesh)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's, at every stage."""
        with self._full_parameters(module):
            super().load_module_state_dict(module, part_of_state(state_dict, module, self.mesh), strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """In a checkpoint nothing: all ranks save the state beside the file. Asked for by the script: the optimizer's,
        at zero0 (IG853)."""
        return {} if self._saving else dict(super().get_optimizer_state(optimizer))

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Fabric's file; and beside it the state of the engines whose optimizers are in it."""
        with set_attributes(self, _saving=True):
            super().save_checkpoint(path, state, storage_options, filter)
        for name, engine in _engines(state).items():
            save_state(engine, _state_folder(path, name))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fabric's; optimizers from the folder beside the file, under any layout."""
        if isinstance(state, torch.optim.Optimizer):
            self._refuse("a file of an optimizer alone", "fabric.load(path, {'optimizer': optimizer, ...})")
        engines = _engines(state) if isinstance(state, dict) else {}
        for name, engine in engines.items():
            if not Path(path).exists():
                raise FileNotFoundError(f"{path}: no such checkpoint of Fabric's")
            fix = "load the model alone: fabric.load(path, {'model': model}, strict=False)"
            require_state(_state_folder(path, name), Path(path).name, fix, engine.mesh)
        rest = {name: value for name, value in state.items() if name not in engines} if engines else state
        left: dict[str, Any] = super().load_checkpoint(path, rest, strict, weights_only)
        for name, engine in engines.items():
            state.update(rest)
            left.pop(name, None)
            load_state(engine, _state_folder(path, name))
        return left


class _Sync(_BackwardSyncControl):  # type: ignore[misc]
    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy._of(module).no_sync() if enabled else nullcontext()


def _engines(state: Mapping[str, Any]) -> dict[str, Engine]:
    """Of the optimizers in what is saved or loaded, by their names in it."""
    return {name: value.engine for name, value in state.items() if isinstance(value, EngineOptimizer)}


def _state_folder(path: Any, name: str) -> Path:
    return Path(f"{path}.isograd") / name


if NAME not in STRATEGY_REGISTRY:
    STRATEGY_REGISTRY.register(NAME, FabricStrategy, description="isograd: the gradient of one device, zero0 to zero3")
