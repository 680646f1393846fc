"""A DeepSpeed config as the settings of a loop that keeps its own model, data and steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from isograd.doors.deepspeed import schedules
from isograd.doors.deepspeed.config import batch_of, dtype_of
from isograd.doors.deepspeed.keys import Keys, Row, opened
from isograd.errors import DoorError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.AdamW,  # as DeepSpeed's, unless adam_w_mode is false
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
OFFLOADED = ("pin_memory", "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "ratio", "nvme_path",
             "pipeline_read", "pipeline_write")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What a DeepSpeed config says to a loop."""

    batch: int  # rows of a step, over all ranks
    micro: int  # rows of a micro-batch of one rank
    steps: int  # micro-batches of a step
    stage: int
    offload: bool
    bf16: bool
    clip: float
    optimizer: Callable[[Any], torch.optim.Optimizer] | None  # made of parameters
    schedule: Callable[[torch.optim.Optimizer], schedules.Warmup] | None
    drop_last: bool
    unused: tuple[str, ...]  # monitors that nothing writes to


def read(values: object, ranks: int) -> Settings:
    """The settings, or IG863, IG864, or IG865 with all keys that would train otherwise."""
    keys, zero, stage = opened(values)
    offload = [_offloads(zero.inside(name)) for name in ("offload_optimizer", "offload_param")]
    zero.rest()
    bf16 = dtype_of(keys) == "bf16"
    clip = float(keys.number("gradient_clipping", "clip", 0.0))
    keys.number("steps_per_print", "nothing", 10)
    drop_last = keys.flag("dataloader_drop_last", "the loader")
    unused = tuple(name for name in MONITORS if _enabled(keys.values.pop(name, None)))
    optimizer, schedule = _optimizer(keys.inside("optimizer")), _schedule(keys.inside("scheduler"))
    batch, steps, _ = batch_of(keys, ranks, 1)
    keys.rest()
    wrong = [row for row in keys.rows if row.fate in ("refused", "open")]
    if any(offload) and not stage:
        wrong.append(Row("zero_optimization.offload_optimizer", "cpu", "refused", "needs stage 1, 2 or 3"))
    if wrong:
        raise DoorError(
            "IG865",
            f"{len(wrong)} keys of the DeepSpeed config cannot be kept",
            seen="; ".join(f"{row.key} {row.why}" for row in wrong[:8]),
            expected="keys that isograd keeps, or that have no meaning here; no 'auto'",
            fix="change or remove them: 'isograd config from-deepspeed FILE' lists every key",
        )
    micro = batch // (ranks * steps)
    return Settings(batch, micro, steps, stage, any(offload), bf16, clip, optimizer, schedule, drop_last, unused)


def _enabled(value: object) -> bool:
    return isinstance(value, dict) and bool(value.get("enabled"))


def _offloads(keys: Keys) -> bool:
    """offload_optimizer or offload_param: to the host's memory, or not at all."""
    device = keys.word("device", "Engine(offload=True)", ("none", "cpu"), "none")
    for name in OFFLOADED:
        keys.values.pop(name, None)
    keys.rest()
    return bool(device == "cpu")


def _optimizer(keys: Keys) -> Callable[[Any], torch.optim.Optimizer] | None:
    if not keys.values:
        return None
    name = keys.word("type", "optimizer", tuple(OPTIMIZERS))
    params = keys.inside("params")
    options = {"lr": params.number("lr", "optimizer", 1e-3)}
    kind = OPTIMIZERS.get(name, torch.optim.AdamW)
    if name in ("Adam", "AdamW"):
        decays = params.flag("adam_w_mode", "optimizer", True)
        kind = torch.optim.Adam if name == "Adam" and not decays else torch.optim.AdamW
        params.take("bias_correction", "true: Adam has it", lambda v: v is True, True, "optimizer")
        options |= {"weight_decay": 0.0}
    known = ("betas", "eps", "weight_decay", "momentum", "nesterov", "alpha", "lr_decay", "centered", "dampening")
    for option in known:
        if option in params.values and option in torch_defaults(kind):
            options[option] = params.values.pop(option)
    params.rest(known)
    keys.rest()
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    return lambda parameters: kind(parameters, **options)


def torch_defaults(kind: Callable[..., torch.optim.Optimizer]) -> set[str]:
    """The options that an optimizer of torch has."""
    return set(kind([torch.nn.Parameter(torch.zeros(1))]).defaults)


def _schedule(keys: Keys) -> Callable[[torch.optim.Optimizer], schedules.Warmup] | None:
    if not keys.values:
        return None
    name = keys.word("type", "the schedule", ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
    params = keys.inside("params")
    warmup = params.whole("warmup_num_steps", "the schedule", 1000)
    kind = params.word("warmup_type", "the schedule", ("log", "linear"), "log")
    params.values.pop("last_batch_iteration", None)
    high: Any = None
    rate = schedules.to_constant(warmup, kind, 0.0)
    if name == "WarmupCosineLR":
        low = params.number("warmup_min_ratio", "the schedule", 0.0)
        steps, end = _total(params), params.number("cos_min_ratio", "the schedule", 1e-4)
        rate = schedules.to_cosine(warmup, kind, low, steps, end)
    elif name is not None:
        low = params.number("warmup_min_lr", "the schedule", 0.0)
        high = params.number("warmup_max_lr", "the schedule", None if name == "WarmupLR" else 1e-3)
        steps = _total(params) if name == "WarmupDecayLR" else 0
        rate = schedules.to_zero(warmup, kind, low, steps) if steps else schedules.to_constant(warmup, kind, low)
    params.rest()
    keys.rest()
    return lambda optimizer: schedules.Warmup(optimizer, rate, high)


def _total(params: Keys) -> int:
    if "total_num_steps" not in params.values:
        params.row("total_num_steps", None, "refused", "is not there")
    return int(params.whole("total_num_steps", "the schedule", 1))
