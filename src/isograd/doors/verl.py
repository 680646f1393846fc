"""verl's training engine, on ours: verl finds it by the entry point `verl.plugins`, as the backend `isograd`.

    EngineOptions(layout="zero1", micro_batch_size_per_gpu=2, use_dynamic_bsz=False)      # the engine's config

verl's workers call `train_batch(data, loss_function)` and `infer_batch`, which come here as `forward_backward_batch`. A
loss function of verl's divides its sum by the tokens of the whole batch and multiplies by the data ranks, so that an
average over ranks is the mean. Here a step's gradient is the sum of these losses over micro-batches and ranks, divided
once by the ranks. A loss function that returns (mean, weight) or `ig.Terms`, as those of `ig.losses`, is a mean over
all that was weighed: then nothing has to know how many tokens other ranks have.

The model is a whole one of transformers, on dp with zero0 to zero3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.workers.config.engine import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from isograd.checkpoint import Keeper
from isograd.comm import raw
from isograd.doors.world import mesh_of
from isograd.engine import Engine
from isograd.engine.dropped import is_dropped
from isograd.errors import DoorError
from isograd.terms import Terms


@dataclass
class EngineOptions(EngineConfig):  # type: ignore[misc]
    """verl's config of an engine, with a layout. Its `dtype` of autocast is not used: `model_dtype` is computed in."""

    strategy: str = "isograd"
    layout: str | None = None  # of dp and zero
    model_dtype: str = "float32"


@EngineRegistry.register(model_type="language_model", backend="isograd", device=["cuda", "cpu"])
class IsogradEngine(BaseEngine):  # type: ignore[misc]
    """A language model of verl's in an engine of isograd's."""

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None

    def initialize(self) -> None:
        """Load the model, and make the engine with AdamW and its schedule."""
        given, options = self.engine_config, self.optimizer_config
        self.mesh = mesh_of(given.layout)
        self._refuse_options()
        self.module = self.model().to(self.mesh.device)
        self.engine = Engine(
            self.module,
            self.mesh,
            lambda groups: torch.optim.AdamW(
                groups, lr=options.lr, betas=tuple(options.betas), weight_decay=options.weight_decay
            ),
            clip=options.clip_grad,
        )
        self.schedule = self._schedule()

    def _refuse_options(self) -> None:
        """What verl's own engines do, and what would be left out here without a word."""
        given, model, options = self.engine_config, self.model_config, self.optimizer_config

        def said(config: Any, name: str, default: Any = None) -> Any:
            return getattr(config, name, default)

        if options is None or given.forward_only:
            raise self._refused("an engine without an optimizer", "forward_only")
        wrong = {
            "param_offload": given.param_offload,
            "optimizer_offload": given.optimizer_offload,
            "LoRA (lora_rank, lora_adapter_path)": said(model, "lora_rank", 0) or said(model, "lora_adapter_path"),
            "multi-token prediction (mtp)": said(said(model, "mtp"), "enable", False),
            "external_lib": said(model, "external_lib"),
            "router_replay": said(said(given, "router_replay"), "mode", "disabled") != "disabled",
            f"optimizer {said(options, 'optimizer')}": said(options, "optimizer", "AdamW").lower() != "adamw",
            "override_optimizer_config": said(options, "override_optimizer_config"),
            f"lr_scheduler_type {said(options, 'lr_scheduler_type')}": said(options, "lr_scheduler_type", "constant")
            not in ("constant", "cosine"),
        }
        if found := [name for name, is_set in wrong.items() if is_set]:
            raise self._refused("a config that asks for more than this engine has", ", ".join(found))

    def _schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        """verl's own, of the optimizer's config."""
        from verl.utils import torch_functional as theirs

        options, optimizer = self.optimizer_config, self.engine.optimizer
        steps = int(getattr(options, "total_training_steps", -1))
        warmup = int(getattr(options, "lr_warmup_steps", None) or -1)
        if warmup <= 0:
            warmup = int(getattr(options, "lr_warmup_steps_ratio", 0.0) * steps)
        if getattr(options, "lr_scheduler_type", "constant") == "constant":
            constant: torch.optim.lr_scheduler.LambdaLR = theirs.get_constant_schedule_with_warmup(
                optimizer, num_warmup_steps=warmup
            )
            return constant
        cosine: torch.optim.lr_scheduler.LambdaLR = theirs.get_cosine_schedule_with_warmup(
            optimizer, num_warmup_steps=warmup, num_training_steps=steps,
            min_lr_ratio=getattr(options, "min_lr_ratio", None), num_cycles=getattr(options, "num_cycles", 0.5),
            zero_indexed_step=getattr(options, "zero_indexed_step", True),
        )  # fmt: skip
        return cosine

    def model(self) -> nn.Module:
        """The model of transformers in `model_config.local_path`, with the changes of its `override_config`."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from verl.utils.model import update_model_config

        given = self.model_config
        changes = dict(getattr(given, "override_config", None) or {})
        changes = dict(changes.get("model_config", changes))
        attention = {name: changes.pop(name) for name in ("attn_implementation",) if name in changes}
        config = AutoConfig.from_pretrained(given.local_path)
        update_model_config(config, override_config_kwargs=changes)
        found: nn.Module = AutoModelForCausalLM.from_pretrained(
            given.local_path, config=config, dtype=getattr(torch, self.engine_config.model_dtype), **attention
        )
        return found

    # -- a step

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Forward, and backward, of this rank's batch in verl's micro-batches; what verl's own engines return."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

        tokens = data["loss_mask"].sum().double().reshape(1).to(self.mesh.device)
        tu.assign_non_tensor(
            data, sp_size=1, dp_size=self.mesh.size("dp"),
            batch_num_tokens=raw.all_reduce(tokens, self.mesh.group("dp")).item(),
        )  # fmt: skip
        micros, indices = prepare_micro_batches(
            data=data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True
        )
        outputs = []
        try:
            for micro in micros:
                with torch.set_grad_enabled(not forward_only):
                    loss, output = self.forward_step(micro, loss_function, forward_only)
                if not forward_only:
                    output.pop("model_output")
                    self._backward(loss, len(micros))
                outputs.append(output)
        except Exception as error:  # the other ranks, which wait at their step, hear of it and drop theirs
            if not forward_only and not is_dropped(self.engine.ledger):
                self.engine.ledger.fail(error)
                self.engine.discard()
            raise
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _backward(self, loss: Any, micros: int) -> None:
        if isinstance(loss, Tensor):  # the weights of a rank add up to 1, so the step divides the sum by the ranks
            loss = (loss * micros, 1.0 / micros)
        self.engine.backward(*((loss,) if isinstance(loss, Terms) else loss))

    def forward_step(
        self, micro: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Any, dict[str, Any]]:
        """(the loss of a micro-batch, what verl keeps of it)."""
        made = self._outputs(micro)
        if loss_function is None:
            if not forward_only:
                raise self._refused("a backward without a loss function", "loss_function=None")
            return None, {"model_output": made, "loss": 1.0, "metrics": {}}
        found, metrics = loss_function(model_output=made, data=micro, dp_group=self.get_data_parallel_group())
        kept = {name: value.detach() for name, value in made.items()}
        return found, {"model_output": kept, "loss": _number(found), "metrics": metrics}

    def _outputs(self, micro: Any) -> dict[str, Tensor]:
        """log_probs, and the entropy where it is asked for, of nested sequences; at each place of the token after it,
        as verl has them."""
        from verl.utils import tensordict_utils as tu

        inputs = micro["input_ids"].to(self.mesh.device)
        if not inputs.is_nested:
            raise self._refused("sequences that are padded", "pad_mode other than no_padding")
        lengths = inputs.offsets().diff().tolist()
        rows = torch.nn.utils.rnn.pad_sequence(list(inputs.unbind()), batch_first=True)
        there = torch.arange(rows.shape[1], device=rows.device) < torch.tensor(lengths, device=rows.device)[:, None]
        logits = self.module(input_ids=rows, attention_mask=there.long(), use_cache=False).logits
        temperature = tu.get_non_tensor_data(data=micro, key="temperature", default=1.0)
        scores = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
        found = {"log_probs": scores.gather(-1, rows.roll(-1, 1)[..., None])[..., 0]}
        if tu.get_non_tensor_data(data=micro, key="calculate_entropy", default=False):
            found["entropy"] = -(scores.exp() * scores).sum(-1)
        return {
            name: torch.nested.nested_tensor_from_jagged(values[there], inputs.offsets())
            for name, values in found.items()
        }

    def optimizer_zero_grad(self) -> None:
        """A step begins with nothing: the one before it has ended, or was dropped by its exception."""

    def optimizer_step(self) -> float:
        """The gradient's norm before clipping; a step that is not finite is skipped on all ranks."""
        return self.engine.step().grad_norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step."""
        self.schedule.step()
        return float(self.schedule.get_last_lr()[0])

    # -- modes, ranks, weights, files

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        """In training mode inside."""
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        """In evaluation mode inside."""
        return _Mode(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing is moved between devices."""
        if torch.device(device).type != self.mesh.device.type and (model or optimizer or grad):
            raise self._refused("moving a model or an optimizer to another device", f"to({device!r})")

    def get_data_parallel_size(self) -> int:
        """The number of data ranks."""
        return self.mesh.size("dp")

    def get_data_parallel_rank(self) -> int:
        """This one's number."""
        return self.mesh.index("dp")

    def get_data_parallel_group(self) -> Any:
        """The world's group, as torch names it: None."""
        return None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whole models have outputs on every rank."""
        return True

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Whole weights by transformers' names, one after another; all ranks take all of them."""
        return self._weights(), None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.engine.full_parameters():
            state = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        yield from state.items()

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:  # fmt: skip
        """A folder `isograd`, which every layout and number of ranks loads."""
        if hdfs_path is not None:
            raise self._refused("a checkpoint on HDFS", hdfs_path)
        extra = {"schedule": self.schedule.last_epoch}
        with Keeper(Path(local_path) / "isograd", self.engine, keep_last=max_ckpt_to_keep or 1) as keeper:
            keeper.save(global_step, extra)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """From such a folder, which is left where it is."""
        with Keeper(Path(local_path) / "isograd", self.engine, keep_last=1) as keeper:
            found = keeper.load("auto")
        if found is not None:
            self.schedule.last_epoch = int(found.extra["schedule"]) - 1
            self.schedule.step()

    def _refused(self, what: str, seen: str) -> DoorError:
        return DoorError(
            "IG872", f"{what} is not for the backend isograd of verl", seen=seen,
            expected="a loss function, nested sequences without padding, no offload, local folders",
            fix="docs/doors.md says what this backend has", where=self.mesh.where(),
        )  # fmt: skip


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    def __init__(self, engine: IsogradEngine, mode: str, **kwargs: Any) -> None:
        super().__init__(engine, mode, **kwargs)

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")


def _number(found: Any) -> float:
    """The value of a loss, for verl's logs."""
    if isinstance(found, Terms):
        return sum(float(term.value.detach()) * term.coefficient for term in found.values())
    return float((found if isinstance(found, Tensor) else found[0]).detach())
