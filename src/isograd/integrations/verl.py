"""verl's training engine, on ours: verl finds it by the entry point `verl.plugins`, as the backend `isograd`.

verl's workers call `train_batch(data, loss_function)` and `infer_batch`, which come here as `forward_backward_batch`.
Each rank of a cp or tp group gets its part of the sequences and the numbers of all of them; all compute the same loss.
docs/integrations/verl.md says what the losses are the mean of.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.workers.config.engine import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from isograd.comm import raw
from isograd.comm.world import process_group_of
from isograd.core.contract import assemble, contract_of
from isograd.core.loss_terms import Terms
from isograd.engine import Engine
from isograd.errors import IntegrationError
from isograd.hf import attach
from isograd.hf.export import export_hf
from isograd.hf.loading import recompute_blocks
from isograd.integrations import verl_outputs
from isograd.integrations.optimizer import full_parameters, load_state, save_state
from isograd.integrations.shared_rows import cut_whole_model, cuts_model
from isograd.integrations.world import mesh_for

OURS, THEIRS = "isograd", "huggingface"  # in a checkpoint's folder
PARTS = frozenset(("model", "optimizer", "extra"))  # of a checkpoint, in verl's words
OF_COSINE = {"min_lr_ratio": None, "num_cycles": 0.5, "zero_indexed_step": True}  # verl's defaults
NOT_HERE = ("external_lib", "enable_activation_offload", "use_liger", "trust_remote_code")  # of a model's config
AXES = {  # a layout's words for those of verl's own engines
    "ulysses_sequence_parallel_size": "cp{} ulysses",
    "tensor_parallel_size": "tp{}",
    "tensor_model_parallel_size": "tp{}",
}


@dataclass
class EngineOptions(EngineConfig):  # type: ignore[misc]
    """verl's config of an engine, with a layout. Its `dtype` of autocast is not used: `model_dtype` is computed in."""

    strategy: str = "isograd"
    layout: str | None = None  # of dp, cp, tp, ep and zero
    model_dtype: str = "float32"
    ulysses_sequence_parallel_size: int = 1  # this and the following: as the words of a layout (AXES)
    tensor_parallel_size: int = 1
    tensor_model_parallel_size: int = 1


@EngineRegistry.register(model_type="language_model", backend="isograd", device=["cuda", "cpu"])
class IsogradEngine(BaseEngine):  # type: ignore[misc]
    """A language model of verl's in an engine of isograd's."""

    is_param_offload_enabled = False
    is_optimizer_offload_enabled = False
    engine: Engine | None = None  # none where only forward is asked for
    outputs = staticmethod(verl_outputs.of_language)  # what the model says of a micro-batch, for the loss function

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.mesh = mesh_for(layout_of(engine_config), "dp cp tp ep")  # verl asks for ranks before `initialize`
        self._saved: list[Path] = []
        self._weighs, self._loss = False, 0.0  # of the last step: whether its loss had weights, and what it was

    def initialize(self) -> None:
        """Load the model, and make the engine with AdamW and its schedule."""
        self._refuse_options()
        module: Any = self.model()
        self.module = module.to(self.mesh.device)
        cut_whole_model(self.module, self.mesh)
        if getattr(self.model_config, "enable_gradient_checkpointing", False):
            recompute_blocks(self.module)
        if self.engine_config.forward_only:
            return
        options = self.optimizer_config
        self.engine = Engine(
            self.module,
            self.mesh,
            lambda groups: torch.optim.AdamW(
                groups, lr=options.lr, betas=tuple(options.betas), weight_decay=options.weight_decay
            ),
            clip=options.clip_grad,
        )
        self.lr_scheduler = self._schedule()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's, whose groups verl's workers may change between steps."""
        return self._training("its optimizer").optimizer

    def _training(self, what: str) -> Engine:
        if self.engine is None:
            raise self._refused(f"{what}, of an engine that only looks forward", "forward_only=True")
        return self.engine

    def _refuse_options(self) -> None:
        """What verl's own engines do, and what would be left out here without a word."""
        given, model, options = self.engine_config, self.model_config, self.optimizer_config

        def said(config: Any, name: str, default: Any = None) -> Any:
            return getattr(config, name, default)

        if options is None and not given.forward_only:
            raise self._refused("an engine without an optimizer that is not forward_only", "optimizer_config=None")
        loads = set(said(self.checkpoint_config, "load_contents") or PARTS)
        wrong = {
            **{name: said(given, name) for name in ("param_offload", "optimizer_offload")},
            **{name: said(model, name) for name in NOT_HERE},
            "LoRA (lora_rank, lora_adapter_path)": said(model, "lora_rank", 0) or said(model, "lora_adapter_path"),
            "LoRA (lora.rank)": (said(model, "lora") or {}).get("rank", 0),
            "multi-token prediction (mtp)": said(said(model, "mtp"), "enable", False),
            "tiled_mlp": (said(model, "tiled_mlp") or {}).get("enabled", False),
            "router_replay": said(said(given, "router_replay"), "mode", "disabled") != "disabled",
            f"load_contents {sorted(loads)}": not loads >= PARTS,
            f"optimizer_impl {said(options, 'optimizer_impl')}": said(options, "optimizer_impl", "torch.optim")
            != "torch.optim",
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

        options, optimizer = self.optimizer_config, self.optimizer
        steps = int(getattr(options, "total_training_steps", -1))
        warmup = int(getattr(options, "lr_warmup_steps", None) or -1)
        if warmup <= 0:
            warmup = int(getattr(options, "lr_warmup_steps_ratio", 0.0) * steps)
        make, more = theirs.get_constant_schedule_with_warmup, {}
        if getattr(options, "lr_scheduler_type", "constant") == "cosine":
            make = theirs.get_cosine_schedule_with_warmup
            more = {name: getattr(options, name, default) for name, default in OF_COSINE.items()}
            more["num_training_steps"] = steps
        found: torch.optim.lr_scheduler.LambdaLR = make(optimizer, num_warmup_steps=warmup, **more)
        return found

    def model(self) -> nn.Module:
        """The model of transformers in `model_config.local_path`, with the changes of its `override_config`."""
        from transformers import AutoModelForCausalLM

        return self._loaded(AutoModelForCausalLM)

    def _loaded(self, kind: Any, **more: Any) -> nn.Module:
        from transformers import AutoConfig
        from verl.utils.model import update_model_config
        from verl.utils.torch_dtypes import PrecisionType

        given, dtype = self.model_config, self.engine_config.model_dtype
        changes = dict(getattr(given, "override_config", None) or {})
        changes = dict(changes.get("model_config", changes))
        attention = {name: changes.pop(name) for name in ("attn_implementation",) if name in changes}
        config = AutoConfig.from_pretrained(getattr(given, "local_hf_config_path", None) or given.local_path)
        update_model_config(config, override_config_kwargs=changes | more)
        kept = torch.float64 if dtype == "float64" else PrecisionType.to_dtype(dtype)
        found: nn.Module = kind.from_pretrained(given.local_path, config=config, dtype=kept, **attention)
        return found

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """verl's; the loss of a function that weighs is the mean over the whole step, on all ranks."""
        outputs = super().train_batch(data, loss_function)
        if self._weighs:
            outputs["loss"] = [self._loss]
        return outputs

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Forward, and backward, of this rank's batch in verl's micro-batches; what verl's own engines return."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

        if not forward_only:
            self._training("a backward")
        tokens = self._tokens(data, counted=loss_function is not None)
        tu.assign_non_tensor(data, sp_size=self.mesh.size("cp"), dp_size=self.mesh.size("dp"), batch_num_tokens=tokens)
        keeps = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        found: list[Terms] = []
        outputs = []
        try:
            micros, indices = prepare_micro_batches(
                data=data, dp_group=self.get_data_parallel_group(), same_micro_num_in_dp=True
            )
            for micro in micros:
                with torch.set_grad_enabled(not forward_only):
                    loss, output = self.forward_step(micro, loss_function, forward_only)
                if not forward_only:
                    self._backward(loss, len(micros))
                if not keeps:
                    output.pop("model_output")
                self._weighs = loss is not None and not isinstance(loss, Tensor)
                if self._weighs and forward_only:
                    found.append(loss if isinstance(loss, Terms) else Terms(loss=loss))
                outputs.append(output)
        except Exception as error:  # the other ranks, which wait at their step, hear of it and drop theirs
            if self.engine is not None and not forward_only and not self.engine.step_state.already_discarded:
                self.engine.step_state.fail(error)
                self.engine.discard()
            raise
        result = postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
        if found:
            result["loss"] = [self._mean(found)]
        return result

    def _tokens(self, data: Any, counted: bool) -> float:
        """How many tokens count in the batch of all ranks."""
        mask, inputs = data["loss_mask"], data["input_ids"]
        if not (mask.is_nested and inputs.is_nested):
            raise self._refused("sequences that are padded", "pad_mode other than no_padding")
        firsts = mask.values()[mask.offsets()[:-1][mask.offsets().diff() > 0]]
        mine = torch.stack([part.double() for part in (mask.values().sum(), (firsts != 0).sum())])
        tokens, wrong = raw.all_reduce(mine.to(self.mesh.device), self.mesh.group("dp")).tolist()
        if counted and wrong:
            raise self._refused(
                "a loss_mask that counts the first token of a sequence, which nothing predicts",
                f"{int(wrong)} sequences of this batch",
            )
        return float(tokens)

    def _backward(self, loss: Any, micros: int) -> None:
        if isinstance(loss, Tensor):  # the weights of a rank add up to 1, so the step divides the sum by the ranks
            loss = (loss * micros, 1.0 / micros)
        self._training("a backward").backward(*((loss,) if isinstance(loss, Terms) else loss))

    def forward_step(
        self, micro: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Any, dict[str, Any]]:
        """(the loss of a micro-batch, what verl keeps of it)."""
        micro = micro.to(self.mesh.device)
        made = self.outputs(self.module, micro, self.mesh, self._refused)
        kept = {name: value.detach() for name, value in made.items()}
        if loss_function is None:
            if not forward_only:
                raise self._refused("a backward without a loss function", "loss_function=None")
            return None, {"model_output": kept, "loss": 1.0, "metrics": {}}
        found, metrics = loss_function(model_output=made, data=micro, dp_group=self.get_data_parallel_group())
        if isinstance(found, Terms):
            value = sum(float(term.value.detach()) * term.coefficient for term in found.values())
        else:
            value = float((found if isinstance(found, Tensor) else found[0]).detach())
        return found, {"model_output": kept, "loss": value, "metrics": metrics}

    def _mean(self, found: Sequence[Terms]) -> float:
        """The loss of terms over all micro-batches and ranks."""
        sums = torch.zeros(2, len(found[0]), dtype=torch.float64)
        for terms in found:
            pairs = [(float(t.value), float(t.weight)) if t.weight else (0.0, 0.0) for t in terms.values()]
            sums += sums.new_tensor([[value * weight for value, weight in pairs], [weight for _, weight in pairs]])
        total, weights = raw.all_reduce(sums.to(self.mesh.device), self.mesh.group("dp")).cpu()
        means = total / torch.where(weights > 0, weights, torch.ones_like(weights))
        return float(sum(t.coefficient * mean for t, mean in zip(found[0].values(), means.tolist(), strict=True)))

    def optimizer_zero_grad(self) -> None:
        """Drop what backwards have gathered since the last step."""
        if self.engine is not None and not self.engine.step_state.empty:
            self.engine.discard()

    def optimizer_step(self) -> float:
        """The gradient's norm before clipping; a step that is not finite is skipped on all ranks."""
        stats = self._training("a step").step()
        self._loss = stats.loss
        return stats.grad_norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next step."""
        self._training("a schedule")
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        """In training mode inside."""
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[Any]:
        """In evaluation mode inside."""
        return _Mode(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing is moved between devices."""
        super().to(device, model, optimizer, grad)
        if torch.device(device).type != self.mesh.device.type and (model or optimizer or grad):
            raise self._refused("moving a model or an optimizer to another device", f"to({device!r})")

    def get_data_parallel_size(self) -> int:
        """The number of data ranks."""
        return self.mesh.size("dp")

    def get_data_parallel_rank(self) -> int:
        """This one's number."""
        return self.mesh.index("dp")

    def get_data_parallel_group(self) -> Any:
        """torch's group of the data ranks, over which verl averages losses and gathers metrics."""
        return process_group_of(self.mesh.group("dp"))

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Of a cp or tp group, whose ranks all have the same outputs, verl takes those of the first."""
        return self.mesh.index("cp") == self.mesh.index("tp") == 0

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Whole weights by the names of checkpoints, one after another; all ranks take all of them."""
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        found: Iterator[tuple[str, Tensor]] = unfuse_moe_params(self._weights(), self.module.config.model_type)
        return found, None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        from verl.utils.model import convert_weight_keys

        with full_parameters(self.engine):
            for name, value in convert_weight_keys(self.module.state_dict(keep_vars=True), self.module).items():
                part, contract = value.detach().clone(), contract_of(value)
                yield name, part if contract is None else assemble(part, contract, self.mesh).contiguous()

    def save_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, global_step: int = 0,
        max_ckpt_to_keep: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """A folder `isograd`, which every layout and number of ranks loads; beside it `huggingface` with config and
        tokenizer, and with the weights where `save_contents` has "hf_model"."""
        engine = self._training("a checkpoint")
        if hdfs_path is not None:
            raise self._refused("a checkpoint on HDFS", hdfs_path)
        if local_path is None:
            return
        place = Path(local_path)
        save_state(engine, place / OURS, global_step, {"schedule": self.lr_scheduler.last_epoch})
        self._describe(place / THEIRS)
        self._saved = [*(path for path in self._saved if path != place), place]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            old = self._saved.pop(0)
            if self.mesh.rank == 0:
                for part in (OURS, THEIRS):
                    shutil.rmtree(old / part, ignore_errors=True)
                with suppress(OSError):  # verl's loader has files of its own there
                    old.rmdir()
        raw.all_reduce(torch.zeros(1), self.mesh.host_group("world"))  # no rank goes on before

    def _describe(self, place: Path) -> None:
        model = self.module
        with_weights = "hf_model" in (getattr(self.checkpoint_config, "save_contents", None) or ())
        if with_weights and cuts_model(self.mesh):
            if self.mesh.rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            export_hf(self._training("an export"), place)
            model, with_weights = None, False
        with full_parameters(self.engine) if with_weights else nullcontext():
            if self.mesh.rank != 0:
                return
            if model is not None:
                (model if with_weights else model.config).save_pretrained(place)
            for words in ("processor", "tokenizer"):
                if (found := getattr(self.model_config, words, None)) is not None:
                    found.save_pretrained(place)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """From such a folder, which is left where it is."""
        engine = self._training("a checkpoint")
        if local_path is None:
            return
        place = Path(local_path) / OURS
        found = load_state(engine, place)
        if found is None:
            raise IntegrationError(
                "IG860", seen=f"no checkpoint in {place}", place=local_path,
                fix="resume_mode=disable, with the model's path at weights in transformers' format",
                where=self.mesh.describe_rank(),
            )  # fmt: skip
        self.lr_scheduler.last_epoch = int(found["schedule"]) - 1
        self.lr_scheduler.step()

    def _refused(self, what: str, seen: str) -> IntegrationError:
        return IntegrationError(
            "IG872", f"{what} is not for the backend isograd of verl", seen=seen,
            expected="a loss function, nested sequences without padding, no offload, local folders",
            fix="docs/integrations/verl.md says what this backend has", where=self.mesh.describe_rank(),
        )  # fmt: skip


@EngineRegistry.register(model_type="value_model", backend="isograd", device=["cuda", "cpu"])
class IsogradValueEngine(IsogradEngine):
    """A critic: one number at each token, of transformers' models for token classification."""

    outputs = staticmethod(verl_outputs.of_values)

    def model(self) -> Any:
        """Its dropout is off, as in verl. A head that the folder lacks is drawn, and rank 0's is everyone's."""
        from transformers import AutoModelForTokenClassification

        found: Any = self._loaded(AutoModelForTokenClassification, num_labels=1, classifier_dropout=0.0)
        group = self.mesh.group("world")
        for parameter in found.parameters():
            raw.broadcast_(parameter.data, group)
        if self.mesh.size("cp") > 1:  # without its head, whose own loss is not used, and is not of cut sequences
            found._isograd_attached = attach(found.base_model, self.mesh)._isograd_attached
        return found


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, at)


def layout_of(options: EngineOptions) -> str:
    """The layout of a config, with the axes that verl's own words name; one that is named twice is refused (IG101)."""
    sizes = [(words, int(getattr(options, name))) for name, words in AXES.items()]
    asked = " ".join(words.format(size) for words, size in sizes if size > 1).split()
    named = (options.layout or "").split()
    return " ".join([*named, *(word for word in dict.fromkeys(asked) if word not in named)])
