"""A loop that was written for DeepSpeed's engine, on isograd's.

At stages 2 and 3 each micro-batch's gradients are reduced at once, into their owners' rows; at 0 and 1 those of a whole
step are reduced once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from isograd.checkpoint import SavedWeights
from isograd.comm.consensus import all_gather_object, run_or_raise_on_all_ranks
from isograd.core.attributes import set_attributes
from isograd.core.contract import Contract, contract_of
from isograd.core.mesh import Mesh
from isograd.engine import Engine, Stats
from isograd.errors import IntegrationError, headline
from isograd.integrations.deepspeed.settings import Settings, read, refuse
from isograd.integrations.optimizer import EngineOptimizer, load_state, on_shards, save_state
from isograd.integrations.shared_rows import CutModels, whole_state
from isograd.integrations.weights import LabelCounter
from isograd.integrations.world import mesh_for, name_failed_rank, name_failed_rank_in_forward
from isograd.io.atomic import replace_text
from isograd.io.untrusted import CONFIG, read_json, read_text

FOLDER, LATEST = "isograd", "latest"  # of a checkpoint's folder: the engine's state; and of all: the newest one's name


def init_distributed(*_: Any, **__: Any) -> None:
    """Joins the world that torchrun has started, as `initialize` does; the arguments are DeepSpeed's."""
    mesh_for(None)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """DeepSpeed's options of a command line: --deepspeed, --deepspeed_config FILE."""
    group = parser.add_argument_group("DeepSpeed", "with isograd.integrations.deepspeed")
    group.add_argument("--deepspeed", action="store_true", help="taken, and of no effect")
    group.add_argument("--deepspeed_config", type=str, default=None, help="DeepSpeed's JSON file")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    *,
    layout: str | None = None,
) -> tuple[LoopEngine, EngineOptimizer, DataLoader[Any] | None, Any]:
    """(engine, optimizer, loader, scheduler), as deepspeed.initialize; the arguments are the same.

    The config's ZeRO stage is the layout, over all ranks that torchrun has started, and the sizes of its
    sequence_parallel_size and autotp_size, of an mpu, or of a mesh_param. layout: "dp2 tp2 sp zero1" and the like says
    the same in isograd's words, and dp, cp, tp and ep. What cannot be kept is refused.
    """
    mesh = mesh_for(None)
    choices = config, config_params, getattr(args, "deepspeed_config", None)
    given = next((one for one in choices if one is not None), None)

    def check_locally() -> tuple[type[LoopEngine], Settings, str]:
        if not isinstance(given, str | Path | Mapping):
            refuse(
                f"a {type(given).__name__} as config", "config=..., a file or a dict; or args.deepspeed_config", mesh
            )
        if not isinstance(model, nn.Module) or hasattr(model, "mpu"):
            refuse(
                f"a {type(model).__name__} as model", "an nn.Module, or a PipelineModule of deepspeed.pipe here", mesh
            )
        values = dict(given if isinstance(given, Mapping) else read_json(given, CONFIG, follow=True))
        values = {str(key): value for key, value in values.items()}
        words, axes = _layout_of_groups(layout, mpu, mesh_param, mesh), "dp cp tp ep"
        kind: type[LoopEngine] | None = getattr(
            model, "engine_class", None
        )  # of a PipelineModule, which is cut already
        if kind is not None and words:
            refuse("layout, mpu or mesh_param with a PipelineModule", "PipelineModule(..., topology=...)", mesh)
        if kind is not None:
            words, axes = str(model.mesh.layout) if mesh.layout.world_size > 1 else "", "dp tp pp"
        settings = read(values, mesh.layout.world_size, words)
        if kind is not None and settings.stage > 1:
            seen = f"stage {settings.stage} with a PipelineModule, whose gradients add up whole over its micro-batches"
            refuse(seen, '"zero_optimization": {"stage": 1}', mesh)
        return kind or LoopEngine, settings, axes

    def spelled(error: Exception) -> IntegrationError:
        where, expected = mesh.describe_rank(), "the arguments of deepspeed.initialize"
        return IntegrationError("IG868", seen=headline(error), expected=expected, where=where)

    kind, settings, axes = run_or_raise_on_all_ranks(check_locally, mesh, IntegrationError, spelled)
    assert model is not None
    mesh = mesh_for(settings.layout, axes)
    for axis, names in GROUPS.items():
        rank = _ask(mpu, names, "rank")
        if rank not in (None, mesh.index(axis)):
            seen = f"an mpu whose {names[0]} groups are not those of {str(mesh.layout)!r}: it is rank {rank} of one"
            refuse(seen, f"rank {mesh.index(axis)}, as tp ranks are neighbours, and then cp ranks", mesh)
    engine = kind(model, settings, mesh, optimizer, model_parameters, lr_scheduler)
    loader = None if training_data is None else engine.deepspeed_io(training_data, collate_fn=collate_fn)
    engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


GROUPS = {"cp": ("sequence",), "tp": ("tensor_model", "model"), "pp": ("pipeline_model", "pipe")}  # as an mpu has them


def _ask(mpu: Any, names: tuple[str, ...], what: str) -> int | None:
    """The rank or the world_size of this rank in one of an mpu's groups; None: it has no such groups."""
    asked = (getattr(mpu, f"get_{name}_parallel_{what}", None) for name in names)
    return next((int(ask()) for ask in asked if ask is not None), None)


def _layout_of_groups(layout: str | None, mpu: Any, mesh_param: Any, mesh: Mesh) -> str:
    """In words: a layout, or DeepSpeed's own: an mpu with groups, (data, sequence) sizes."""
    if (layout is not None) + (mpu is not None) + (mesh_param is not None) > 1:
        refuse("two of layout, mpu and mesh_param", "one of them, or the sizes in the config", mesh)
    if mesh_param is not None:
        return f"dp{int(mesh_param[0])} cp{int(mesh_param[1])}"
    sizes = {axis: _ask(mpu, names, "world_size") for axis, names in GROUPS.items()}
    if mpu is not None and (set(sizes.values()) == {None} or (sizes["pp"] or 1) > 1):
        expected = "get_sequence_parallel_world_size() or get_tensor_model_parallel_world_size()"
        refuse("an mpu without groups, or with a pipeline", expected, mesh)
    return layout or " ".join(f"{axis}{size}" for axis, size in sizes.items() if size is not None)


class LoopEngine(nn.Module):
    """What `initialize` returns first. `engine` is isograd's; what this has not is looked for in the module."""

    def __init__(
        self, model: nn.Module, settings: Settings, mesh: Mesh, optimizer: Any, parameters: Any, scheduler: Any
    ) -> None:
        super().__init__()
        self.settings, self.mesh = settings, mesh
        if not any(parameter.is_meta for parameter in model.parameters()):  # of ig.hf.load at ZeRO 3
            model.to(mesh.device, torch.bfloat16 if settings.bf16 else None)
        self.module, self._cut_models = model, CutModels(mesh)
        make = optimizer if optimizer is not None else settings.optimizer
        if make is None:
            refuse("no optimizer", "optimizer=..., or one in the config", mesh)
        ready = isinstance(make, torch.optim.Optimizer) or parameters is not None
        made = self._made(make, parameters) if ready else None
        if not hasattr(model, "engine_class"):
            self._cut_models.cut(model)
        if made is None:
            made = self._made(make, [p for p in model.parameters() if p.requires_grad])
        self._cut_models.follow(made)
        moved = on_shards(made, model, mesh)
        options: Any = {"clip": settings.clip or None, "offload": settings.offload, "elementwise": settings.elementwise}
        self.engine = Engine(model, mesh, moved, **options)
        name_failed_rank_in_forward(self.engine)
        self.optimizer = EngineOptimizer(self.engine, self._stepped, self._refuse_to_drop)
        plan = scheduler if scheduler is not None else settings.schedule
        self.lr_scheduler: Any = plan(self.engine.optimizer) if callable(plan) else plan
        self.training_dataloader: Any = None
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._of_step = (0, 0)  # the step under way, by the engine's count, and how many of its micro-batches are over
        self._boundary: bool | None = None  # as the loop has said; None: counted
        self._label_counter = LabelCounter(model, "engine.backward", mesh)
        self._syncing = True
        if settings.unused and mesh.rank == 0:
            print(f"isograd: of the DeepSpeed config nothing writes to {', '.join(settings.unused)}", file=sys.stderr)

    def _made(self, make: Any, parameters: Any) -> Any:
        try:
            return make if isinstance(make, torch.optim.Optimizer) else make(parameters)
        except (TypeError, ValueError) as error:
            refuse(f"an optimizer whose options torch refuses: {error}", "options of the right kinds", self.mesh)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if name in NOT_HERE:
                refuse(f"engine.{name}", "engine(...), engine.backward(loss, weight=...) and engine.step()", self.mesh)
            if name in OF_MESH:
                return OF_MESH[name](self.mesh)
            if name in SAID:
                return partial(SAID[name], self)
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Under cp and tp it is given whole rows, the same on the ranks of a group, and computes this
        rank's part of them: the loss is the mean over this part's labels."""
        if not self._cut_models.shares_rows:
            return self.module(*args, **kwargs)
        if args:
            refuse("positional arguments", "engine(input_ids=..., labels=..., attention_mask=...)", self.mesh)
        batch = {name: value.to(self.device) for name, value in kwargs.items() if isinstance(value, Tensor)}
        return self.module(**batch)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        weight: float | Tensor | None = None,
    ) -> Tensor:
        """weight: how many labels (rows, ...) the loss is the mean of. Nothing divides it."""
        if retain_graph or not scale_wrt_gas:
            seen = f"backward(retain_graph={retain_graph}, scale_wrt_gas={scale_wrt_gas})"
            refuse(seen, "the mean loss of a micro-batch, undivided, once", self.mesh)
        if self._cut_models.shares_rows:
            weight = self._cut_models.weight_of(loss, weight, "engine.backward(engine(**batch).loss)")
        reduces = self._syncing and (self.is_gradient_accumulation_boundary() or self.settings.stage > 1)
        with name_failed_rank(self.mesh), nullcontext() if reduces else self.engine.no_sync():
            self.engine.backward(loss, self._label_counter.weight_of(loss, weight, self.engine))
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here add up on this rank; `step` is refused in here."""
        return set_attributes(self, _syncing=False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether `step` will step the optimizer."""
        return self._micros_over() + 1 >= self.settings.steps if self._boundary is None else self._boundary

    def _micros_over(self) -> int:
        """Of the step under way. A step that was dropped on all ranks has ended, on each after other micro-batches."""
        step, over = self._of_step
        return over if step == self.engine.step_state.now.ended else 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the loop says where a step ends."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the boundary of an accumulation the engine's step, on all ranks; else only a count."""
        if not self._syncing:
            refuse("step inside no_sync", "step after the with block", self.mesh)
        over = self._micros_over() + 1
        if not self.is_gradient_accumulation_boundary():
            self._of_step = self.engine.step_state.now.ended, over
        else:
            self.optimizer.step()
            if self.lr_scheduler is not None and not self.optimizer.step_was_skipped:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        self.micro_steps += 1

    def _stepped(self, stats: Stats) -> None:
        self.global_steps += 1
        self.global_samples += self.settings.batch
        self.skipped_steps += stats.skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: after a step nothing is left. In the middle of one it is refused."""
        self.optimizer.zero_grad(set_to_none)

    def _refuse_to_drop(self) -> None:
        """DeepSpeed's own drops gradients at stage 0, keeps them at others, and counts micro-batches on at all."""
        if self._micros_over() or not self.engine.step_state.empty:
            expected = "none, as a step leaves no gradients; or engine.engine.discard(), which drops it on all ranks"
            refuse("zero_grad in the middle of a step", expected, self.mesh)

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None, num_local_io_workers: int = 0, shuffle: bool = True, **_: Any,
    ) -> DataLoader[Any]:  # fmt: skip
        """A loader of this rank's rows; `loader.sampler.set_epoch` shuffles anew, as DeepSpeed's does."""
        sampler = data_sampler or DistributedSampler(dataset, self.dp_world_size, self.mesh.index("dp"), shuffle)
        return DataLoader(
            dataset, batch_size or self.settings.micro, sampler=sampler, collate_fn=collate_fn,
            drop_last=self.settings.drop_last, num_workers=num_local_io_workers,
        )  # fmt: skip

    def module_state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """Whole parameters at every stage, under the module's own names; all ranks call it."""
        with self.engine.full_parameters():
            return whole_state(self.module.state_dict(), self.module, self.mesh)

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Into save_dir/tag, which every layout loads; between two steps, on all ranks. client_state is JSON."""
        tag = self._name_of(tag or f"global_step{self.global_steps}")
        counts = {name: getattr(self, name) for name in COUNTS}
        plan = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        extra = {"loop": counts, "scheduler": plan, "client": client_state or {}}
        save_state(self.engine, Path(save_dir) / tag / FOLDER, max(1, self.global_steps), extra)
        if save_latest and self.mesh.rank == 0:
            replace_text(Path(save_dir) / LATEST, tag)
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """(the path, client_state) of what `save_checkpoint` has saved, under any layout; (None, None): nothing there.

        Without the optimizer's state only weights are loaded, and no count.
        """
        if custom_load_fn is not None:
            refuse("custom_load_fn", "weights as they were saved", self.mesh)
        place = Path(load_dir)
        latest = place / LATEST
        tag = tag or all_gather_object(read_text(latest, 4096).strip() if latest.is_file() else None, self.mesh)[0]
        if tag is None:
            said = f"isograd: {place} has no file 'latest', and no tag was given: nothing is loaded"
            warnings.warn(said, stacklevel=2)
            return None, None
        place = place / self._name_of(tag)
        there, foreign = all_gather_object([(place / FOLDER).is_dir(), any(place.glob("*_states.pt"))], self.mesh)[0]
        if not there:
            seen = "DeepSpeed's files, which are pickles" if foreign else f"no folder {FOLDER!r} in it"
            raise IntegrationError("IG860", seen=seen, place=place.name, where=self.mesh.describe_rank())
        if load_module_only or not load_optimizer_states:
            self._load_weights(place / FOLDER)
            return str(place), {}
        found = load_state(self.engine, place / FOLDER)
        if found is None:
            return None, None
        for name in COUNTS:
            setattr(self, name, int(found["loop"][name]))
        if load_lr_scheduler_states and self.lr_scheduler is not None and found["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(found["scheduler"])
        return str(place), dict(found["client"])

    def _load_weights(self, place: Path) -> None:
        saved = SavedWeights(place)
        with self.engine.full_parameters() as module, torch.no_grad():
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                contract = contract_of(value) or Contract(tuple(value.shape))
                if saved.has(name, contract.shape):
                    value.copy_(saved.read(name, contract.shape, contract.local(self.mesh)))

    def _name_of(self, tag: object) -> str:
        """A tag is the name of a folder."""
        if not isinstance(tag, str) or tag in ("", ".", "..") or Path(tag).name != tag:
            refuse(f"the tag {tag!r} of a checkpoint", "the name of a folder, without a path", self.mesh)
        return tag


NOT_HERE = {"train_batch", "eval_batch", "save_16bit_model", "save_fp16_model", "allreduce_gradients"}
COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
OF_MESH: dict[str, Callable[[Mesh], Any]] = {  # its properties
    "device": lambda mesh: mesh.device,
    "global_rank": lambda mesh: mesh.rank,
    "local_rank": lambda mesh: int(os.environ.get("LOCAL_RANK", mesh.rank)),  # on this machine
    "world_size": lambda mesh: mesh.layout.world_size,
    "dp_world_size": lambda mesh: mesh.size("dp"),  # ranks, or groups of them, that have rows of their own
}
SAID: dict[str, Callable[[LoopEngine], Any]] = {  # methods without arguments
    "was_step_applied": lambda engine: engine.optimizer.stats is not None and not engine.optimizer.step_was_skipped,
    "get_global_grad_norm": lambda engine: engine.optimizer.stats and engine.optimizer.stats.grad_norm,  # not clipped
    "get_lr": lambda engine: [group["lr"] for group in engine.optimizer.param_groups],
    "get_mom": lambda engine: [group.get("betas", group.get("momentum")) for group in engine.optimizer.param_groups],
    "is_first_stage": lambda engine: engine.mesh.index("pp") == 0,
    "is_last_stage": lambda engine: engine.mesh.index("pp") == engine.mesh.layout.pp - 1,
    "destroy": lambda engine: None,  # the engine goes with its last reference
    "train_batch_size": lambda engine: engine.settings.batch,
    "train_micro_batch_size_per_gpu": lambda engine: engine.settings.micro,
    "gradient_accumulation_steps": lambda engine: engine.settings.steps,
    "gradient_clipping": lambda engine: engine.settings.clip,
    "zero_optimization_stage": lambda engine: engine.settings.stage,
    "zero_optimization": lambda engine: engine.settings.stage > 0,
    "bfloat16_enabled": lambda engine: engine.settings.bf16,
    "fp16_enabled": lambda engine: False,
}
