"""accelerate's Accelerator, with `ig.DataParallel` where it wraps a model in DDP, and weights.

Under a ZeRO stage, tp or ep, `prepare(model, optimizer)` makes an `ig.Engine` of the two, as rows of a gradient are no
`.grad`. docs/integrations/accelerate.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from isograd.core.attributes import set_attributes
from isograd.engine import DataParallel, Engine
from isograd.errors import IntegrationError
from isograd.integrations.optimizer import (
    EngineOptimizer,
    TrainedModule,
    engine_optimizer,
    full_parameters,
    load_state,
    require_state,
    save_state,
)
from isograd.integrations.shared_rows import (
    CutModels,
    cuts_model,
    gather_data_ranks,
    prepare_data_loader,
    whole_state,
)
from isograd.integrations.weights import LabelCounter
from isograd.integrations.world import layout_of_parallelism, layout_option, mesh_for, name_failed_rank, refuse


class Prepared(DataParallel):
    """With the attributes of the module, which accelerate leaves bare in one process: `model.config`."""

    _is_accelerate_prepared: bool

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class NotLoaded(nn.Module):
    """In the place of a model that accelerate is not to load: takes nothing of a file."""

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """No name is missing, and none is unexpected."""
        return [], []


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Takes the place of accelerate's, with its arguments. docs/integrations/accelerate.md."""

    step: int  # accelerate's count of micro-batches
    _optimizers: list[Any]
    _models: list[Any]

    def __init__(self, *args: Any, layout: str | None = None, elementwise: bool = False, **kwargs: Any) -> None:
        """layout: dp, cp, tp, ep and a ZeRO stage; dp, without it; `--isograd LAYOUT` on the command line comes first.
        A ParallelismConfig is a layout, too. elementwise: as ig.Engine takes it."""
        layout, parallelism = layout_option(layout), kwargs.pop("parallelism_config", None)
        super().__init__(*args, **kwargs)
        mesh = mesh_for(layout if parallelism is None else layout_of_parallelism(parallelism, layout), "dp cp tp ep")
        self._mesh = mesh
        self._elementwise = elementwise
        self._by_engine = mesh.layout.zero > 0 or cuts_model(mesh)
        self._cut_models = CutModels(mesh)
        self._trained: list[TrainedModule] = []  # the models that engines train
        self._folder = ""  # of the state that is saved or loaded
        self.register_save_state_pre_hook(lambda models, weights, folder: self._note_folder(folder))
        self.register_load_state_pre_hook(lambda models, folder: self._note_folder(folder, loads=True))
        self._replicated: list[DataParallel] = []  # the models that this accelerator has wrapped
        self._rows_said = False
        self._drops = 0  # of all models, when the window under way began
        hook = getattr(getattr(self.ddp_handler, "comm_hook", None), "value", "no")
        kind = self.distributed_type.value
        refuse(
            {
                f"distributed type {kind}": kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP"),
                "parallelism_config of the environment": self.parallelism_config is not None,
                "cp or tp with dispatch_batches: set it to False": self._cut_models.shares_rows
                and self.dispatch_batches,
                f"comm_hook={hook!r}": hook != "no",
                "a loss scale (mixed_precision='bf16' has none)": self._by_engine and self.scaler is not None,
            },
            "this Accelerator reduces gradients by itself",
            "leave it out; a ZeRO stage stands in the layout: Accelerator(layout='zero3')",
            mesh,
        )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """accelerate's, with `ig.DataParallel` around a model that trains, in one process too."""
        if isinstance(model, DataParallel):  # prepared twice, or by another accelerator
            if not any(model is one for one in self._replicated):
                self._replicated.append(model)
                super().prepare_model(model.module, device_placement, evaluation_mode=True)
            return model
        if any(model is one.module for one in self._trained):  # prepared twice
            return model
        vars(model).pop("_is_accelerate_prepared", None)  # bare: by another accelerator, or for evaluation
        if any(p.is_meta or p.device.type == self.device.type == "cpu" for p in model.parameters()):
            device_placement = False  # rows of ig.hf.load at ZeRO 3 stay; to accelerate's "cpu:0" all is copied
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        self._cut_models.cut(model)
        if self._by_engine:
            self._trained.append(TrainedModule(model, LabelCounter(model, "accelerator.backward", self._mesh)))
            return model
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        wrapped = Prepared(model, **options)
        wrapped._is_accelerate_prepared = True
        self._replicated.append(wrapped)
        return wrapped

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """weight: how many labels (rows, ...) the loss is the mean of; then nothing divides it. Without one: rows."""
        if self._cut_models.shares_rows:
            weight = self._cut_models.weight_of(loss, weight, "accelerator.backward(model(**batch).loss)")
        if self._by_engine:
            one = self._one(
                [one for one in self._trained if one.label_counter.labels_of(loss) is not None] or self._trained
            )
            assert one.engine is not None
            if kwargs:
                raise self._unlike_engine(f"backward(..., {', '.join(kwargs)}=...)", "accelerator.backward(loss)")
            with name_failed_rank(self._mesh):
                one.engine.backward(loss, one.label_counter.weight_of(loss, weight, one.engine))
            return
        if weight is None:
            if not self._rows_said and self.is_main_process:
                print("isograd: accelerator.backward without weight=: losses weigh their rows", file=sys.stderr)
            self._rows_said = True
            with name_failed_rank(self._mesh):
                super().backward(loss, **kwargs)
            return
        if len(self._replicated) != 1:
            raise IntegrationError(
                "IG861",
                "accelerator.backward was given a weight, and not one model to which it belongs",
                seen=f"{len(self._replicated)} models that this accelerator has prepared for training",
                expected="one",
                fix="loss = model.weigh(loss, weight), times accelerator.gradient_accumulation_steps, which divide it",
                where=self._mesh.describe_rank(),
            )
        steps = self.gradient_accumulation_steps
        weighed = self._replicated[0].weigh(loss, weight)
        with name_failed_rank(self._mesh):
            super().backward(weighed * steps if steps > 1 else weighed, **kwargs)  # which divides by them

    def _unlike_engine(self, seen: str, expected: str) -> IntegrationError:
        return IntegrationError(
            "IG866", seen=f"{seen} under {str(self._mesh.layout)!r}", expected=expected,
            where=self._mesh.describe_rank(), loop="accelerate",
        )  # fmt: skip

    def _one(self, found: Sequence[TrainedModule]) -> TrainedModule:
        if len(found) != 1 or found[0].engine is None:
            raise self._unlike_engine(
                f"{len(found)} models that could be meant" if len(found) != 1 else "a model without its optimizer",
                "model, optimizer = accelerator.prepare(model, optimizer), of one model or a loss that it has returned",
            )
        return found[0]

    @property
    def engine(self) -> Engine:
        """The engine, of an accelerator that has prepared one model with its optimizer under a ZeRO stage or tp."""
        if not self._by_engine:
            raise self._unlike_engine("accelerator.engine", "a ZeRO stage, tp or ep: dp has ig.DataParallel alone")
        engine = self._one(self._trained).engine
        assert engine is not None
        return engine

    def _engine_of(self, optimizer: torch.optim.Optimizer) -> Any:
        """An engine of the model whose parameters the optimizer has, where accelerate expects the optimizer."""
        self._cut_models.follow(optimizer)
        found = engine_optimizer(optimizer, self._trained, self._mesh, self._elementwise)
        if found is None:
            raise self._unlike_engine(
                "an optimizer of several models, of none that was prepared, or a second one of a model",
                "accelerator.prepare(model, optimizer), in this order: one optimizer for each model",
            )
        made = AcceleratedOptimizer(found, device_placement=False)
        made._is_accelerate_prepared = True
        self._optimizers.append(made)
        return made

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """accelerate's. By an engine: the next step clips, and fills the tensor returned, which is NaN until then."""
        if not self._by_engine:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2 or not max_norm > 0:
            raise self._unlike_engine(f"clip_grad_norm_({max_norm}, norm_type={norm_type})", "a positive 2-norm")
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        return self._one([o for o in self._trained if given & {id(p) for p in o.module.parameters()}]).clips(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """accelerate's; refused where an engine has the gradients."""
        if self._by_engine:
            raise self._unlike_engine("clip_grad_value_", "accelerator.clip_grad_norm_(model.parameters(), max_norm)")
        super().clip_grad_value_(parameters, clip_value)

    @contextmanager
    def _full_parameters(self, model: nn.Module | None = None) -> Iterator[None]:
        """The parameters of this model, or of all, are whole in here."""
        with ExitStack() as stack:
            for one in self._trained:
                if model in (None, one.module):
                    stack.enter_context(full_parameters(one.engine))
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """accelerate's, of whole parameters at every stage; all ranks come here."""
        with self._full_parameters(model), torch.no_grad():
            return whole_state(super().get_state_dict(model, unwrap), model, self._mesh)

    def _note_folder(self, folder: str, loads: bool = False) -> None:
        self._folder = folder
        if loads and self._trained:
            fix = "load the weights before accelerator.prepare(model, optimizer)"
            require_state(Path(folder, "isograd"), Path(folder).name, fix, self._mesh)

    @contextmanager
    def _without_engines(self, loads: bool = False) -> Iterator[None]:
        """Around accelerate's saving and loading: models are whole, and it does not see the optimizers of engines. Nor
        does it load the models of engines, whose states have them; the others keep their places among the files."""
        optimizers = [o for o in self._optimizers if not isinstance(getattr(o, "optimizer", o), EngineOptimizer)]
        own = [one.module for one in self._trained if one.engine is not None] if loads else []
        models = [NotLoaded() if any(model is one for one in own) else model for model in self._models]
        while models and isinstance(models[-1], NotLoaded):
            models.pop()
        with set_attributes(self, _optimizers=optimizers, _models=models), self._full_parameters():
            yield

    def _engines(self) -> Iterator[tuple[Engine, Path]]:
        """Each engine, and the folder of its state."""
        for number, one in enumerate(self._trained):
            if one.engine is not None:
                yield one.engine, Path(self._folder, "isograd", str(number))

    def prepare_data_loader(self, loader: Any, device_placement: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """accelerate's; the ranks of a cp or tp group get the same rows."""
        if self._cut_models.shares_rows:
            return prepare_data_loader(self, self._mesh, loader, device_placement)
        return super().prepare_data_loader(loader, device_placement, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """accelerate's; rows that the ranks of a cp or tp group share are gathered once."""
        return gather_data_ranks(tensor, self._mesh) if self._cut_models.shares_rows else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """accelerate's; objects of rows that ranks share are gathered once, too."""
        if any(self._mesh.index(axis) for axis in ("cp", "tp")):  # a copy of another rank's rows
            try:
                recursively_apply(lambda leaf: leaf, input_data, error_on_other_type=True)
            except TypeError:  # as accelerate finds out
                use_gather_object = True
            input_data = [] if use_gather_object else input_data
        return super().gather_for_metrics(input_data, use_gather_object)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """accelerate's. Behind a step that has raised on some rank, backwards are refused on all: copies may differ."""
        if self._by_engine:
            given = getattr(optimizer, "optimizer", optimizer)
            return optimizer if isinstance(given, EngineOptimizer) else self._engine_of(optimizer)
        made = super().prepare_optimizer(optimizer, device_placement)
        inside = getattr(made, "optimizer", made)
        for handle in getattr(inside, "_isograd_counted", ()):  # by another accelerator, or prepared twice
            handle.remove()
        before, behind = inside.register_step_pre_hook(self._steps), inside.register_step_post_hook(self._has_stepped)
        inside._isograd_counted = (before, behind)
        return made

    def _steps(self, *_: Any) -> None:
        for model in self._replicated:
            model.begins_step()

    def _has_stepped(self, *_: Any) -> None:
        for model in self._replicated:
            model.has_stepped()

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """accelerate's. Behind a window that was dropped, all ranks begin a new one, each after other micro-batches."""
        drops = sum(model.drops for model in self._replicated) + sum(one.drops for one in self._trained)
        if drops != self._drops:
            self._drops, self.step = drops, self.step + -self.step % self.gradient_accumulation_steps
        with super().accumulate(*models):
            yield

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's, and the engines' state."""
        with self._without_engines():
            result = super().save_state(*args, **kwargs)
        for engine, place in self._engines():
            save_state(engine, place)
        return result

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's, and the engines' state; what an optimizer has spoiled is well again."""
        with self._without_engines(loads=True):
            result = super().load_state(*args, **kwargs)
        for engine, place in self._engines():
            load_state(engine, place)
        for model in self._replicated:
            model.is_restored()
        return result

    def no_sync(self, model: nn.Module) -> Any:
        """Backwards in here add up on this rank; the next one outside reduces all of them once."""
        engine = next((one.engine for one in self._trained if one.module is model), model)
        return getattr(engine, "no_sync", nullcontext)()

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Backwards in here reduce, though their forwards ran under `no_sync`."""
        wrapped = isinstance(model, DataParallel)
        return set_attributes(model, require_backward_grad_sync=True) if wrapped else nullcontext()

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Nothing where batches are even; else refused, as no rank would wait for the others."""
        if self.num_processes > 1 and not (self.even_batches and even_batches in (None, True)):
            seen = f"even_batches={even_batches} of an accelerator with even_batches={self.even_batches}"
            raise IntegrationError("IG862", seen=seen, where=self._mesh.describe_rank())
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The user's own module."""
        inside = model.module if isinstance(model, DataParallel) else model
        return super().unwrap_model(inside, *args, **kwargs)  # type: ignore[no-any-return]

    def free_memory(self, *objects: Any) -> Any:
        """accelerate's; the models that were prepared are forgotten."""
        self._replicated.clear()
        self._trained.clear()
        self._cut_models = CutModels(self._mesh)
        self._drops = 0
        return super().free_memory(*objects)
