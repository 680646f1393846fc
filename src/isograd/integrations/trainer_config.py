"""The argument names of transformers, TRL, peft and axolotl as a run's config (`isograd config from args.yaml`).

Defaults are the Trainer's, so that what the file leaves out stays as it was.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from isograd.integrations.deepspeed.keys import KeyOutcome, Keys

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}  # fmt: skip
ADAMW = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw")
ADAMW |= dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw_8bit")
PACKINGS = {"bfd": "whole", "bfd_split": "documents", "wrapped": "stream"}
LOSSES = {"sigmoid": "dpo", "ipo": "ipo"}  # of TRL's DPO; "nll" is that of its SFT
AXOLOTL = {  # its name for an argument of the Trainer
    "micro_batch_size": "per_device_train_batch_size", "num_epochs": "num_train_epochs", "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type", "sample_packing": "packing", "lora_target_linear": "target_modules",
    "datasets": "dataset_name",
}  # fmt: skip
COUNTS = {  # whole numbers from 1 that are fields as they are
    "logging_steps": "log.every", "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "evaluate.every", "early_stopping_patience": "evaluate.patience", "lora_r": "adapter.rank",
}  # fmt: skip
NUMBERS = {
    "learning_rate": ("optimizer.lr", 5e-5), "weight_decay": ("optimizer.weight_decay", 0.0),
    "adam_epsilon": ("optimizer.eps", 1e-8), "lora_alpha": ("adapter.alpha", None),
    "lora_dropout": ("adapter.dropout", None),
}  # fmt: skip
FLAGS = {
    "gradient_checkpointing": "model.recompute", "torch_compile": "model.compile", "use_rslora": "adapter.rslora",
    "use_dora": "adapter.dora",
}  # fmt: skip
SEEDS = ("data_seed", "seed")  # the first that is there
LENGTHS = ("max_length", "max_seq_length", "cutoff_len", "sequence_len")
IDLE = {  # without meaning here
    "per_device_eval_batch_size": "evaluations have the batch of a step", "do_train": "it trains",
    "do_eval": "evaluate.every", "save_strategy": "checkpoint.every", "eval_strategy": "evaluate.every",
    "logging_strategy": "log.every", "overwrite_output_dir": "--resume never",
    "remove_unused_columns": "only text is read",
    "dataloader_num_workers": "a thread reads ahead", "dataloader_pin_memory": "a thread reads ahead",
    "ddp_find_unused_parameters": "unused parameters are found", "logging_dir": "the run's folder",
    "push_to_hub": "isograd ckpt convert --push-to-hub", "hub_model_id": "isograd ckpt convert --push-to-hub",
    "run_name": "the run's folder", "disable_tqdm": "--log-format", "logging_first_step": "it is always shown",
    "save_safetensors": "there is nothing else", "tf32": "torch's own switch", "metric_for_best_model": "eval_loss",
    "greater_is_better": "eval_loss", "use_liger_kernel": "heads are computed in chunks", "strict": "every key is read",
    "attn_implementation": "chosen by the layout", "flash_attention": "chosen by the layout",
    "ddp_timeout": "safety.stall_s",
    "gradient_checkpointing_kwargs": "model.recompute",
    "average_tokens_across_devices": "losses are means of all tokens",
    "dataset_num_proc": "isograd data build --workers", "padding_free": "rows are packed", "lora_task_type": "task",
    "eval_packing": "evaluations pack as steps do",
}  # fmt: skip
OPEN = {  # to be set by hand
    "num_train_epochs": "set steps", "train_file": "set data.sources", "dataset_name": "set data.sources",
    "dataset_config": "set data.sources", "dataset_train_split": "set data.sources", "beta": "set preference.beta",
    "dataset_test_split": "set data.sources", "dataset_text_field": "isograd data build --text-key",
    "evals_per_epoch": "set evaluate.every", "saves_per_epoch": "set checkpoint.every",
    "fsdp": "--layout 'dpN zero3'", "fsdp_config": "--layout 'dpN zero3'", "deepspeed": "isograd config from FILE",
}  # fmt: skip


def convert(values: dict[str, Any], ranks: int | None) -> tuple[dict[str, Any], list[KeyOutcome]]:
    """The fields of a run's config, and every argument with its fate."""
    values = {name: value for name, value in values.items() if value is not None}
    spelled = {theirs: name for name, theirs in AXOLOTL.items() if name in values and theirs not in values}
    keys = Keys({AXOLOTL.get(n, n) if n in spelled.values() else n: v for n, v in values.items()}, [], spelled=spelled)
    ranks = ranks or 1
    each = keys.positive_int("per_device_train_batch_size", "batch", 8)
    parts = keys.positive_int("gradient_accumulation_steps", "micro_batches", 1)
    found: dict[str, Any] = {"version": 1, "run": _text(keys, "output_dir", "run", "runs/trainer"),
                             "layout": f"dp{ranks}", "batch": each * parts * ranks, "micro_batches": parts}  # fmt: skip
    found["steps"] = steps = keys.take("max_steps", "a number of steps", lambda v: type(v) is int, -1, "steps")
    if steps < 1:
        keys.row("max_steps", steps, "open", "set steps: epochs are not counted here")
        found["steps"] = steps = 1000
    for name, (field, default) in NUMBERS.items():
        if (number := keys.number(name, field, default)) is not None:
            _put(found, field, number)
    for name, field in COUNTS.items():
        if (count := keys.positive_int(name, field)) is not None:
            _put(found, field, count)
    for name, field in FLAGS.items():
        if keys.flag(name, field):
            _put(found, field, True)
    betas = [keys.number("adam_beta1", "optimizer.betas", 0.9), keys.number("adam_beta2", "optimizer.betas", 0.999)]
    _put(found, "optimizer.name", keys.word("optim", "optimizer.name", ADAMW, "adamw_torch"))
    _put(found, "optimizer.betas", betas)
    _put(found, "optimizer.schedule", keys.word("lr_scheduler_type", "optimizer.schedule", SCHEDULES, "linear"))
    _put(found, "optimizer.clip", keys.number("max_grad_norm", "optimizer.clip", 1.0) or None)
    warmup, ratio = (keys.number(name, "optimizer.warmup", 0) for name in ("warmup_steps", "warmup_ratio"))
    share = warmup if 0 < warmup < 1 else 0 if warmup else ratio  # below 1 it is a share of the steps
    _put(found, "optimizer.warmup", math.ceil(steps * share) if share else int(warmup))
    half = {name: keys.flag(name, "model.dtype") for name in ("bf16", "fp16")}
    _put(found, "model.dtype", next((name for name, on in half.items() if on), "fp32"))
    names = [n for n in ("model_name_or_path", "base_model") if n in keys.values]
    place = _text(keys, names[0], "model.path", "") if names else "models/base"
    _put(found, "model.path", f"hf://{place}" if "/" in place and not Path(place).exists() and names else place)
    lengths = [n for n in LENGTHS if n in keys.values]
    _put(found, "data.length", keys.positive_int(lengths[0], "data.length") if lengths else 1024)
    _put(found, "data.sources", [{"path": "data/mine"}])
    seeds = [keys.take(n, "a number", lambda v: type(v) is int and v >= 0, None, "data.seed") for n in SEEDS]
    _put(found, "data.seed", next((seed for seed in seeds if seed is not None), 42))
    if keys.flag("load_best_model_at_end", "checkpoint.keep_best: eval_loss"):
        _put(found, "checkpoint.keep_best", "eval_loss")
    targets = [n for n in ("lora_target_modules", "target_modules") if n in keys.values]
    if targets:
        layers = keys.take(targets[0], "names", lambda v: isinstance(v, list | str | bool), None, "adapter.targets")
        _put(found, "adapter.targets", "all-linear" if layers is True else layers)
    _learned(keys, found)
    _data(keys, found)
    trackers = keys.take("report_to", "names", lambda v: isinstance(v, list | str), [], "log")
    for name in [trackers] if isinstance(trackers, str) else trackers:
        if name in ("wandb", "mlflow", "trackio", "tensorboard"):
            _put(found, f"log.{name}", True if name == "tensorboard" else "isograd")
    keys.classify_rest(IDLE, OPEN)
    return found, keys.rows


def _learned(keys: Keys, found: dict[str, Any]) -> None:
    """Which tokens are learned from, by which loss, and in which parameters."""
    answers = [keys.flag(name, "task: chat") for name in ("assistant_only_loss", "completion_only_loss")]
    if any(answers) or not keys.flag("train_on_inputs", "task", True):
        found["task"] = "chat"
    if loss := keys.word("loss_type", "preference.loss", {**LOSSES, "nll": None}):
        found["task"] = "preference"
        _put(found, "preference.loss", loss)
        _put(found, "preference.beta", keys.number("beta", "preference.beta", 0.1))
    kind = keys.word("adapter", "adapter", ("lora", "qlora"))
    wanted = keys.flag("use_peft", "adapter", "adapter" in found)
    bits = [bits for bits in (4, 8) if keys.flag(f"load_in_{bits}bit", "adapter.base_bits")]
    if kind or bits or wanted:
        found.setdefault("adapter", {})
    elif found.pop("adapter", None):
        keys.row("use_peft", False, "meaningless", "arguments of LoRA are left out with it")
    if bits or kind == "qlora":
        _put(found, "adapter.base_bits", bits[0] if bits else 4)


def _data(keys: Keys, found: dict[str, Any]) -> None:
    """What else is said of rows."""
    strategy = keys.word("packing_strategy", "data.packing", PACKINGS, "bfd")
    if keys.values.get("packing") is False:
        keys.row("packing", keys.values.pop("packing"), "open", "set batch: it counts sequences of packed rows")
    elif keys.flag("packing", "data.packing"):
        _put(found, "data.packing", strategy)
    if (held := keys.number("val_set_size", "data.held_out")) is not None:
        _put(found, "data.held_out", held)


def _text(keys: Keys, name: str, sets: str, default: str) -> str:
    return str(keys.take(name, "a text", lambda v: isinstance(v, str) and bool(v), default, sets))


def _put(found: dict[str, Any], field: str, value: Any) -> None:
    part, _, name = field.partition(".")
    found.setdefault(part, {})[name] = value
