"""transformers' Trainer on the engine: `Trainer = ig.integrations.trainer(Trainer)`, and nothing else changes.

The model is not wrapped: it takes the Trainer's path for models that reduce their own gradients, without its average of
parameters. A micro-batch's loss is the mean over its own labels, whatever the step's others have, with their number as
its weight. The balance loss of a model with experts is a term of its own (`ig.Terms`). docs/integrations/trainer.md.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm.consensus import all_gather_object
from isograd.core.attributes import set_attributes
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine import Engine, Stats
from isograd.errors import EngineError, IntegrationError, IsogradError
from isograd.hf import shard
from isograd.hf.context_parallel import scores_rows
from isograd.hf.export import export_hf
from isograd.hf.losses import KEYS
from isograd.integrations.log_probs import SharedLoss, has_shared_loss
from isograd.integrations.optimizer import EngineOptimizer, full_parameters, load_state, on_shards, save_state
from isograd.integrations.shared_rows import (
    cut_whole_model,
    cuts_model,
    evaluated,
    follow_cut,
    gather_by_data_rank,
    prepare_data_loader,
    reasons_of_shared_rows,
)
from isograd.integrations.weights import labels_in, routed_in, rows_in, shifts_labels
from isograd.integrations.world import layout_of_parallelism, mesh_for, refuse, rejoin, reports_failures, store_failure

FOLDER = "isograd"  # of the engine's state, inside the Trainer's folder of a checkpoint
STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
_Base: Any = object


class EngineTrainerMixin(_Base):  # type: ignore[misc]
    """What `trainer` puts before a Trainer class."""

    isograd_layout: str | None = None
    model_axes = "dp cp tp ep pp"  # of a layout
    args: Any
    optimizer: Any
    lr_scheduler: Any
    _signature_columns: list[str]
    loss_is_scaled_for_ga = True  # "do not divide by accumulation steps"
    divides_by_step = True  # whether a loss that says this of itself divides by counts of the whole step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given: Any = kwargs.get("args", args[1] if len(args) > 1 else None)
        layout, parallelism = self.isograd_layout, getattr(given, "parallelism_config", None)
        if parallelism is not None:
            layout = layout_of_parallelism(parallelism, layout)
            without = copy(given)
            without.parallelism_config = None  # accelerate would wrap the model by it
            args, kwargs = (args[0], without, *args[2:]) if len(args) > 1 else args, dict(kwargs)
            kwargs |= {"args": without} if "args" in kwargs else {}
        super().__init__(*args, **kwargs)
        self.mesh: Mesh = mesh_for(layout, self.model_axes)
        self.args = copy(self.args)  # the script's own may be another Trainer's, too
        self.args.average_tokens_across_devices = False  # no factor of ranks in a loss: the engine divides, once
        self.loss_is_scaled_for_ga = True
        self._refuse_arguments()
        replaced = cut_whole_model(self.model, self.mesh)
        if self.optimizer is not None:  # the script's own
            follow_cut(self.optimizer, replaced)
        self.accelerator.backward = self._backward
        if self._shares_rows:
            self.accelerator.prepare_data_loader = partial(prepare_data_loader, self.accelerator, self.mesh)
            gather_by_data_rank(self.accelerator, self.mesh)
        around = SharedLoss(self, self.mesh).in_stages if self.shares_loss else nullcontext
        self._in_stages: Callable[[list[Any]], AbstractContextManager[Any]] = around  # a pipeline of micro-batches
        self._micros: list[Any] = []  # of the step under way
        self._waiting: list[Any] = []  # those of them that a pipeline has not run yet
        self._weight: float | Tensor = 0.0  # of the micro-batch under way
        self._routed_tokens: float | Tensor = 0.0
        self._router_losses: list[Mapping[str, Any]] = []  # what its forwards said beside the loss
        self._forward_hook: Any = None
        self._loss_before: Tensor | None = None  # the Trainer's sum of losses when the step began
        self._rows_said = False
        self._computes_loss = any(
            "compute_loss" in vars(kind) and kind.__module__.partition(".")[0] not in ("transformers", "trl", "isograd")
            for kind in type(self).__mro__
        )  # in the script, perhaps without the count that it is given
        self._weighs = False  # while a training_step of this integration runs

    @property
    def _shares_rows(self) -> bool:
        """Whether several ranks work on the same rows: those of a cp, tp or pp group."""
        return self.mesh.size("cp") * self.mesh.size("tp") * self.mesh.size("pp") > 1

    @property
    def shares_loss(self) -> bool:
        """Whether the ranks that share rows, or a model, all compute one loss of whole rows: of TRL, or of scores."""
        scored = self.mesh.size("pp") == 1 and scores_rows(self.model)
        shares = self._shares_rows or cuts_model(self.mesh)
        return shares and (scored or has_shared_loss(type(self), self.mesh))

    @property
    def engine(self) -> Engine:
        """The engine of this Trainer, made when training begins."""
        assert isinstance(self.optimizer, EngineOptimizer), "no training has begun"
        return self.optimizer.engine

    def _refuse_arguments(self) -> None:
        refuse(
            self._reasons(),
            "this Trainer reduces, steps or divides by itself",
            "leave it out: --isograd 'zero3' takes the place of fsdp and deepspeed, and ig.losses in your own loop "
            "that of a loss that divides by itself",
            self.mesh,
        )

    def _reasons(self) -> dict[str, Any]:
        """What is refused, and whether it is so."""
        args, others = self.args, [kind for kind in type(self).__mro__ if kind is not EngineTrainerMixin]
        says = next((kind for kind in others if "loss_is_scaled_for_ga" in vars(kind)), object)
        of_step = self.divides_by_step and vars(says).get("loss_is_scaled_for_ga") is True
        optim = str(getattr(args.optim, "value", args.optim))
        return {
            **(reasons_of_shared_rows(self, others) if self._shares_rows else {}),
            "load_best_model_at_end with tp or ep: load the checkpoint in a new run": cuts_model(self.mesh)
            and args.load_best_model_at_end,
            "fsdp": args.fsdp,
            "deepspeed": self.is_deepspeed_enabled,
            "a model loaded with DistributedConfig": self.is_distributed_loading_by_transformers,
            "several GPUs in one process": args.n_gpu > 1,
            "a model over several devices": self.is_model_parallel,
            "fp16 (bf16 works)": args.mixed_precision == "fp16",
            "auto_find_batch_size": args.auto_find_batch_size,
            f"optim={optim!r}, which steps inside backward": any(w in optim for w in STEPS_IN_BACKWARD),
            f"{says.__name__}, whose loss is divided by counts of the whole step": of_step,
            "sync_ref_model with zero3, which has no whole weights to mix in": self._syncs_reference
            and self.mesh.layout.zero == 3,
        }

    @property
    def _syncs_reference(self) -> bool:
        """Whether TRL mixes the weights into its reference model from time to time."""
        return bool(getattr(self.args, "sync_ref_model", False))

    def create_optimizer(self, model: Any = None) -> Any:
        """The Trainer's own, on the engine's row shards."""
        if isinstance(self.optimizer, EngineOptimizer):
            return self.optimizer
        super().create_optimizer(model)
        optimizer = on_shards(self.optimizer, self.model, self.mesh)
        try:
            engine = Engine(self.model, self.mesh, optimizer, clip=self.args.max_grad_norm or None)
        except EngineError as error:
            if error.code != "IG542":
                raise
            optim = str(getattr(self.args.optim, "value", self.args.optim))  # in the words of a script
            raise EngineError(
                "IG542",
                error.what,
                seen=f"optim={optim!r} under {str(self.mesh.layout)!r}; {error.seen}",
                expected="an elementwise optimizer, such as optim='adamw_torch' or 'sgd'; or whole parameters",
                fix="--isograd zero0 steps whole parameters with any optimizer; or another optim",
                where=self.mesh.describe_rank(),
            ) from None
        self.optimizer = EngineOptimizer(engine, self._stepped)
        self.model._isograd_trained_by = id(engine)
        if self._forward_hook is not None:
            self._forward_hook.remove()
        self._forward_hook = self.model.register_forward_hook(self._record_forward)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's."""
        schedule = super().create_scheduler(*args, **kwargs)
        kind = type(schedule)
        if kind.__name__ == "AdafactorSchedule" and kind.get_lr is not _rates_of_adafactor:
            # Its class, not an attribute: a checkpoint has all attributes of a schedule.
            schedule.__class__ = type(kind.__name__, (kind,), {"get_lr": _rates_of_adafactor})
        return schedule

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. Where an exception has ended a training, all ranks begin anew, with another engine."""
        if rejoin():
            self.mesh, self.lr_scheduler = Mesh(self.mesh.layout), None
            self.optimizer = None if isinstance(self.optimizer, EngineOptimizer) else self.optimizer
        with reports_failures(self.mesh, self._others_know):
            return super().train(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._loss_before, self._waiting = None, []
        if isinstance(self.optimizer, EngineOptimizer):  # a further train()
            if getattr(self.model, "_isograd_trained_by", None) != id(self.engine):
                raise IntegrationError("IG858", where=self.mesh.describe_rank())
            self.engine.discard()
        with set_attributes(self, is_distributed_loading_by_transformers=True):  # models that reduce by themselves
            return super()._prepare_for_training(*args, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The Trainer's. A checkpoint from which a run would go on otherwise than without the cut is refused."""
        epochs, micros = super()._init_training_state(*args, **kwargs)
        for what, fix in self._not_saved(micros).items() if self.state.global_step else ():
            step, where = self.state.global_step, self.mesh.describe_rank()
            raise IntegrationError("IG873", fix=fix, where=where, how=what, step=step)
        return epochs, micros

    def _not_saved(self, micros: int) -> dict[str, str]:
        """What a run goes on with behind so many micro-batches of an epoch that no checkpoint has, and what to do."""
        start = "begin a new run from the checkpoint's weights"
        return {"training goes on with the mixed reference of sync_ref_model": start} if self._syncs_reference else {}

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Nothing: the engine made the copies equal, and sums their gradients."""

    def get_cp_size(self) -> int:
        """How many ranks share their rows: the Trainer counts a step's rows by it."""
        return self.mesh.size("cp")

    def get_tp_size(self) -> int:
        """The same, of tp and pp."""
        return self.mesh.size("tp") * self.mesh.size("pp")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The Trainer's. At zero3 the engine fills a model of `ig.hf.load`; to accelerate's "cpu:0" all is copied."""
        if not any(p.is_meta or p.device.type == device.type == "cpu" for p in model.parameters()):
            super()._move_model_to_device(model, device)

    def _set_signature_columns_if_needed(self) -> None:
        """The Trainer's, which drops columns that a forward does not name; the forward of a stage names none."""
        super()._set_signature_columns_if_needed()
        if self.mesh.size("pp") > 1:
            self._signature_columns = [*self._signature_columns, *KEYS]

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kw: Any) -> Any:
        """The Trainer's. Of cut sequences: the loss is the mean over the labels of all parts, and logits are of all."""
        if not self._shares_rows or (self.shares_loss and self.mesh.size("pp") == 1):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kw)
        inputs = self._prepare_inputs(inputs)
        if self.mesh.size("pp") > 1:
            with self._in_stages([inputs]):
                return torch.tensor(self.engine.evaluate([inputs]).loss, device=self.args.device), None, None
        with self.compute_loss_context_manager():
            loss, logits = evaluated(model, inputs, self.mesh, logits=not prediction_loss_only)
        return loss, logits, None if prediction_loss_only else inputs.get("labels")

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's: all micro-batches of a step."""
        self._micros, count = super().get_batch_samples(*args, **kwargs)
        return self._micros, count

    def loss_weight(self, inputs: Mapping[str, Any]) -> float | Tensor:
        """How many things the loss of a micro-batch is the mean of: its labels, without any its rows. Override this
        for a loss that is the mean of something else."""
        labels = labels_in(inputs, shifted=shifts_labels(self.model))
        if labels is not None:
            return labels
        if not self._rows_said and self.mesh.rank == 0:
            print("isograd: batches have no 'labels': losses are weighed by their rows", file=sys.stderr)
        self._rows_said = True
        return rows_in(inputs) or 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch; the loss returned is the mean over its own labels."""
        if self._loss_before is None:
            self._loss_before = self._tr_loss.clone()
        if self.mesh.size("pp") > 1:
            return self._training_step_of_stages(inputs)
        self._router_losses = []
        self._routed_tokens = routed_in(inputs) if isinstance(inputs, Mapping) else 0
        logs = self.shares_loss
        cuts = self._shares_rows and not logs
        if cuts:
            part = shard(self._prepare_inputs(inputs), self.mesh)
            inputs, self._weight = part.inputs, part.weight
            num_items_in_batch = None if num_items_in_batch is None else part.weight.clamp(min=1)
        else:
            self._weight = self.loss_weight(inputs)
        if num_items_in_batch is not None and not cuts:
            # Of GPT-2 and others the Trainer counts each row's first label, too, and divides by that count.
            own = None if self._computes_loss or logs else self._get_num_items_in_batch([inputs], self.args.device)
            self._weight = num_items_in_batch = self._weight if own is None else own
        self.current_gradient_accumulation_steps = 1  # TRL divides its balance loss by it
        self._weighs = True
        try:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        finally:
            self._router_losses, self._weighs = [], False

    def _training_step_of_stages(self, inputs: Any) -> Tensor:
        """Behind the last micro-batch of a step all of them run; the loss that is logged is that of the step."""
        self.model.train()
        self._waiting.append(self._prepare_inputs(inputs))
        if self.accelerator.sync_gradients:
            micros, self._waiting = self._waiting, []
            with self._in_stages(micros):
                self.engine.accumulate(micros)
        return torch.zeros((), device=self.args.device)

    def _others_know(self, error: BaseException) -> bool:
        """Tell the other ranks that this one failed, where they come to their step next: they have all of its
        micro-batches, and no layer or loss that communicates may have them wait elsewhere."""
        plain = not self.mesh.layers_wait and type(self).compute_loss.__module__ == "transformers.trainer"
        if not isinstance(self.optimizer, EngineOptimizer) or not self._micros:
            return isinstance(error, IsogradError)  # refused on all ranks
        step_state = self.engine.step_state
        if plain and isinstance(error, Exception) and not step_state.already_discarded:
            store_failure(self.mesh.rank, error)  # at ZeRO 3 the others meet this rank before their step
            step_state.fail(error)
            with suppress(IsogradError):  # of a connection that is lost
                self.engine.discard()
        return step_state.already_discarded

    def _backward(self, loss: Tensor, **_: Any) -> None:
        """In the place of accelerate's: no division, and a weight."""
        engine = self.engine
        if not self._weighs:
            seen = f"{type(self).__name__}.training_step without super().training_step"
            raise IntegrationError("IG871", seen=seen, where=self.mesh.describe_rank())
        last = self.accelerator.sync_gradients
        with nullcontext() if last else engine.no_sync():
            engine.backward(self._with_balance(loss), self._weight)

    def _record_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """What a forward of a training step says beside its loss."""
        if self.model.training and torch.is_grad_enabled() and isinstance(output, Mapping):
            said = {n: v for n, v in output.items() if n.endswith(("aux_loss", "z_loss")) and isinstance(v, Tensor)}
            self._router_losses += [said] if any(value.requires_grad for value in said.values()) else []

    def _with_balance(self, loss: Tensor) -> Tensor | Terms:
        """The loss in two terms, where a balance loss is in it: that one is a mean over routed tokens, not labels."""
        named = [(name, value) for said in self._router_losses for name, value in said.items() if value.requires_grad]
        shares = torch.autograd.grad(loss, [v for _, v in named], retain_graph=True, allow_unused=True) if named else []
        parts = [(n, v, float(share)) for (n, v), share in zip(named, shares, strict=True) if share is not None]
        parts = [part for part in parts if part[2]]
        if not parts:
            return loss
        if [name for name, _, _ in parts] != ["aux_loss"] or self._shares_rows:
            seen = ", ".join(f"{share:g} * {name}" for name, _, share in parts)
            raise IntegrationError("IG859", seen=seen, where=self.mesh.describe_rank())
        (_, balance, share) = parts[0]
        if self.engine.step_state.now.term_weights.expected is None:
            rest = self._micros or []
            self.engine.begin(
                lm=sum(float(self.loss_weight(micro)) for micro in rest),
                balance=sum(float(routed_in(micro)) for micro in rest),
            )
        return Terms(lm=(loss - share * balance, self._weight), balance=(balance, self._routed_tokens, share))

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The engine's step clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Known when the engine has stepped."""

    def _stepped(self, stats: Stats) -> None:
        """The sum that the Trainer logs from gets the loss of the step, as it is on one device."""
        before, self._loss_before, self._micros = self._loss_before, None, []
        if before is not None:
            steps = 1 + self.state.global_step - self._globalstep_last_logged
            shown = (
                stats.loss
                if math.isfinite(stats.loss) or not self.args.logging_nan_inf_filter
                else float(before) / steps
            )
            self._tr_loss.copy_(before + shown)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        stats = self.optimizer.stats
        super()._maybe_log_save_evaluate(tr_loss, None if stats is None else stats.grad_norm, *args, **kwargs)

    def _full_parameters(self) -> AbstractContextManager[Any]:
        return full_parameters(self.engine if isinstance(self.optimizer, EngineOptimizer) else None)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's; of a model that tp or ep cuts, `ig.checkpoint.export_hf` into the folder."""
        if cuts_model(self.mesh):
            export_hf(self.engine, args[0] if args else kwargs.get("output_dir") or self.args.output_dir)
            return
        with self._full_parameters():
            super().save_model(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._full_parameters():
            super()._load_best_model()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if cuts_model(self.mesh):
            return  # the engine's state has all weights
        with self._full_parameters():
            super()._load_from_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        save_state(self.engine, Path(output_dir) / FOLDER, self.state.global_step, extra)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        place = Path(checkpoint) / FOLDER
        there, foreign = all_gather_object([place.is_dir(), (Path(checkpoint) / "optimizer.pt").exists()], self.mesh)[0]
        if not there and foreign:
            raise IntegrationError(
                "IG860", seen="optimizer.pt, which is a pickle, and no folder 'isograd'", place=Path(checkpoint).name,
                fix="start a new run from its weights: from_pretrained(checkpoint), and train() without resuming",
                where=self.mesh.describe_rank(),
            )  # fmt: skip
        if not there:
            warnings.warn(f"isograd: {Path(checkpoint).name} has weights only: the optimizer starts anew", stacklevel=2)
            return
        found = load_state(self.engine, place)
        assert found is not None, "a folder of a checkpoint without one"
        self.lr_scheduler.load_state_dict(found["scheduler"])


def _rates_of_adafactor(schedule: Any) -> list[Any]:
    """Those by which Adafactor steps, for the log. transformers' schedule takes a gradient for the sign of a step; the
    engine has dropped gradients by then, and the optimizer's state says it."""
    adafactor, first = schedule.optimizer, [group["params"][0] for group in schedule.optimizer.param_groups]
    groups = zip(adafactor.param_groups, first, strict=True)
    return [float(adafactor._get_lr(group, adafactor.state[p])) for group, p in groups if p in adafactor.state] or list(
        schedule.base_lrs
    )
