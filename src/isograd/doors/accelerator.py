"""accelerate's Accelerator, with `ig.DataParallel` where it wraps a model in DDP, and weights.

    accelerator = ig.doors.Accelerator(gradient_accumulation_steps=4)
    ...
    accelerator.backward(loss, weight=labels)       # how many labels the loss is the mean of

With a weight, `.grad` is the weighted mean over all ranks and all backwards since gradients were last cleared: nothing
is divided by accumulation steps, and a last window with fewer micro-batches is right. Without one a loss is taken for
the mean over the rows of its batch and is divided as accelerate divides it: its own gradients where all ranks have as
many rows, and the mean over all rows where they have not. Everything else is accelerate's: loaders, precision,
clipping, trackers, and the files of `save_state`, which have the module's own names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from isograd.doors.world import layout_said, mesh_of, names_lost, refuse
from isograd.engine import DataParallel
from isograd.errors import DoorError


class Prepared(DataParallel):
    """With the attributes of the module, which accelerate leaves bare in one process: `model.config`."""

    _is_accelerate_prepared: bool

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Takes the place of accelerate's; see the head of this file. The arguments are the same."""

    step: int  # accelerate's count of micro-batches

    def __init__(self, *args: Any, layout: str | None = None, **kwargs: Any) -> None:
        """layout: dp and zero0, as without it; `--isograd LAYOUT` on the command line comes first."""
        super().__init__(*args, **kwargs)
        mesh = mesh_of(layout_said(layout))
        if mesh.layout.zero:
            raise DoorError(
                "IG855",
                "this Accelerator keeps whole gradients in .grad, for the script's own optimizer and clipping",
                seen=str(mesh.layout),
                expected="zero0",
                fix="ZeRO: ig.doors.FabricStrategy, ig.doors.deepspeed or ig.doors.trainer; or ig.Engine in this loop",
                where=mesh.where(),
            )
        self._mesh = mesh
        self._replicated: list[DataParallel] = []  # the models that this accelerator has wrapped
        self._rows_said = False
        self._drops = 0  # of all models, when the window under way began
        hook = getattr(getattr(self.ddp_handler, "comm_hook", None), "value", "no")
        kind = self.distributed_type.value
        refuse(
            {
                f"distributed type {kind}": kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP"),
                "parallelism_config": self.parallelism_config is not None,
                f"comm_hook={hook!r}": hook != "no",
            },
            "this Accelerator reduces gradients by itself",
            "leave it out; for ZeRO: ig.doors.trainer, or ig.Engine in a loop of your own",
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
        vars(model).pop("_is_accelerate_prepared", None)  # bare: by another accelerator, or for evaluation
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        wrapped = Prepared(model, **options)
        wrapped._is_accelerate_prepared = True
        self._replicated.append(wrapped)
        return wrapped

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """weight: how many labels (rows, ...) the loss is the mean of; then nothing divides it. Without one: rows."""
        if weight is None:
            if not self._rows_said and self.is_main_process:
                print("isograd: accelerator.backward without weight=: losses weigh their rows", file=sys.stderr)
            self._rows_said = True
            with names_lost(self._mesh):
                super().backward(loss, **kwargs)
            return
        if len(self._replicated) != 1:
            raise DoorError(
                "IG861",
                "accelerator.backward was given a weight, and not one model to which it belongs",
                seen=f"{len(self._replicated)} models that this accelerator has prepared for training",
                expected="one",
                fix="loss = model.weigh(loss, weight), times accelerator.gradient_accumulation_steps, which divide it",
                where=self._mesh.where(),
            )
        steps = self.gradient_accumulation_steps
        weighed = self._replicated[0].weigh(loss, weight)
        with names_lost(self._mesh):
            super().backward(weighed * steps if steps > 1 else weighed, **kwargs)  # which divides by them

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """accelerate's. Behind a step that has raised on some rank, backwards are refused on all: copies may differ."""
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
        """accelerate's. Behind a window that was dropped on all ranks, on each after other micro-batches, all of them
        begin a new one."""
        drops = sum(model.drops for model in self._replicated)
        if drops != self._drops:
            self._drops, self.step = drops, self.step + -self.step % self.gradient_accumulation_steps
        with super().accumulate(*models):
            yield

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """accelerate's; what an optimizer has spoiled is well again."""
        result = super().load_state(*args, **kwargs)
        for model in self._replicated:
            model.is_restored()
        return result

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards in here add up on this rank; the next one outside reduces all of them once."""
        with getattr(model, "no_sync", nullcontext)():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Backwards in here reduce, though their forwards ran under `no_sync`."""
        if not isinstance(model, DataParallel):
            yield
            return
        before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Nothing where batches are even; else refused, as no rank would wait for the others."""
        if self.num_processes > 1 and not (self.even_batches and even_batches in (None, True)):
            raise DoorError(
                "IG862",
                "join_uneven_inputs is torch's Join, which knows DDP",
                seen=f"even_batches={even_batches} of an accelerator with even_batches={self.even_batches}",
                expected="ranks that run as many backwards, each with its weight",
                fix="for batch in model.together(loader): ranks without a batch get None, and call model.skip()",
                where=self._mesh.where(),
            )
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The user's own module."""
        inside = model.module if isinstance(model, DataParallel) else model
        return super().unwrap_model(inside, *args, **kwargs)  # type: ignore[no-any-return]

    def free_memory(self, *objects: Any) -> Any:
        """accelerate's; the models that were prepared are forgotten."""
        self._replicated.clear()
        self._drops = 0
        return super().free_memory(*objects)
