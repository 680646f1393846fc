"""A DeepSpeed config as layout and settings of `initialize`, whose loop keeps its own model, data and steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LambdaLR

from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import IntegrationError
from isograd.integrations.deepspeed.config import batch_of, cut_sizes, dtype_of
from isograd.integrations.deepspeed.keys import KeyOutcome, Keys, opened

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
    layout: str  # in words; dp has the ranks that are left
    offload: bool
    bf16: bool
    clip: float
    optimizer: Callable[[Any], torch.optim.Optimizer] | None  # made of parameters
    schedule: Callable[[torch.optim.Optimizer], LambdaLR] | None
    drop_last: bool
    elementwise: bool  # as the user says of an optimizer that is not torch's
    unused: tuple[str, ...]  # monitors that nothing writes to


def read(values: object, ranks: int, words: str = "") -> Settings:
    """The settings, or IG863, IG864, or IG865 with all keys that would train otherwise. words: those of layout, of mpu
    or of mesh_param."""
    keys, zero, stage = opened(values)
    asked = Layout.parse(words)
    if "zero" in words and stage not in (0, asked.zero):
        zero.row("stage", stage, "refused", f"is not the zero{asked.zero} of layout")
    stage = stage or asked.zero
    offload = [_offloads(zero.section(name)) for name in ("offload_optimizer", "offload_param")]
    bf16 = dtype_of(keys) == "bf16"
    clip = keys.number("gradient_clipping", "clip", 0.0)
    keys.number("steps_per_print", "nothing", 10)
    drop_last = keys.flag("dataloader_drop_last", "the loader")
    untested = keys.flag("zero_allow_untested_optimizer", "Engine(elementwise=True)")
    monitors = {name: keys.values.pop(name, None) for name in MONITORS}
    unused = tuple(name for name, value in monitors.items() if isinstance(value, dict) and value.get("enabled"))
    optimizer, schedule = _optimizer(keys.section("optimizer")), _schedule(keys.section("scheduler"))
    cp, tp = cut_sizes(keys, asked)
    words += f" cp{cp} ulysses" if cp > asked.cp else ""
    words += f" tp{tp}" if tp > asked.tp else ""
    words += f" zero{stage}" if "zero" not in words else ""
    shared = cp * tp * asked.pp  # ranks that have the same rows
    batch, steps, _ = batch_of(keys, ranks, shared)
    keys.rest()
    wrong = [row for row in keys.rows if row.fate in ("refused", "open")]
    if any(offload) and not stage:
        wrong.append(KeyOutcome("zero_optimization.offload_optimizer", "cpu", "refused", "needs stage 1, 2 or 3"))
    if wrong:
        raise IntegrationError(
            "IG865",
            f"{len(wrong)} keys of the DeepSpeed config cannot be kept",
            seen="; ".join(f"{row.key} {row.why}" for row in wrong[:8]),
            expected="keys that isograd keeps, or that have no meaning here; no 'auto'",
            fix="change or remove them: 'isograd config from FILE' lists every key",
        )
    micro = batch // (ranks // shared * steps)
    own = optimizer, schedule, drop_last, untested, unused
    return Settings(batch, micro, steps, stage, words, any(offload), bf16, clip, *own)


def refuse(seen: str, expected: str, mesh: Mesh | None = None) -> NoReturn:
    """Raise IG868, what a loop or a layer of DeepSpeed's cannot be asked here."""
    where = None if mesh is None else mesh.describe_rank()
    raise IntegrationError("IG868", seen=seen, expected=expected, where=where)


def _offloads(keys: Keys) -> bool:
    """offload_optimizer or offload_param: to the host's memory, or not at all."""
    device = keys.word("device", "Engine(offload=True)", ("none", "cpu"), "none")
    for name in OFFLOADED:
        keys.values.pop(name, None)
    return bool(device == "cpu")


def _optimizer(keys: Keys) -> Callable[[Any], torch.optim.Optimizer] | None:
    if not keys.values:
        return None
    name = keys.word("type", "optimizer", tuple(OPTIMIZERS))
    params = keys.section("params")
    options = {"lr": params.number("lr", "optimizer", 1e-3)}
    kind = OPTIMIZERS.get(name, torch.optim.AdamW)
    if name in ("Adam", "AdamW"):
        decays = params.flag("adam_w_mode", "optimizer", True)
        kind = torch.optim.Adam if name == "Adam" and not decays else torch.optim.AdamW
        params.take("bias_correction", "true: Adam has it", lambda v: v is True, True, "optimizer")
        options |= {"weight_decay": 0.01 if params.values.get("torch_adam") and kind is torch.optim.AdamW else 0.0}
    known = ("betas", "eps", "weight_decay", "momentum", "nesterov", "alpha", "lr_decay", "centered", "dampening")
    defaults = kind([torch.nn.Parameter(torch.zeros(1))]).defaults
    for option in known:
        if option in params.values and option in defaults:
            options[option] = params.values.pop(option)
    params.asked += known
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    return lambda parameters: kind(parameters, **options)


def _schedule(keys: Keys) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """DeepSpeed's three schedules with a warmup, step for step as DeepSpeed 0.19 has them: its count begins behind the
    first optimizer step, so the first two steps are at the least rate."""
    if not keys.values:
        return None
    name = keys.word("type", "the schedule", ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
    params, cosine = keys.section("params"), name == "WarmupCosineLR"
    warmup = max(2, params.positive_int("warmup_num_steps", "the schedule", 1000))
    rises_by_log = params.word("warmup_type", "the schedule", ("log", "linear"), "log") == "log"
    params.values.pop("last_batch_iteration", None)
    low = params.number("warmup_min_ratio" if cosine else "warmup_min_lr", "the schedule", 0.0)
    end = params.number("cos_min_ratio", "the schedule", 1e-4) if cosine else 1.0
    high = None if cosine else params.number("warmup_max_lr", "the schedule", None if name == "WarmupLR" else 1e-3)
    if name != "WarmupLR" and "total_num_steps" not in params.values:
        params.row("total_num_steps", None, "refused", "is not there")
    total = 0 if name == "WarmupLR" else params.positive_int("total_num_steps", "the schedule", 1)

    def factor(least: float, epoch: int) -> float:
        step = epoch - 1
        if step < 0:
            return 0.0 if cosine else least
        if step < warmup:
            share = math.log(step + 1) / math.log(warmup) if rises_by_log else step / warmup
        elif cosine:
            done = min(1.0, (step - warmup + 1) / max(1, total - warmup))
            return float(max(0.0, end + (1 - end) * (1 + math.cos(math.pi * done)) / 2))
        else:
            share = max(0.0, (total - step) / max(1, total - warmup)) if total else 1.0
        return least + (1 - least) * share

    def made(optimizer: torch.optim.Optimizer) -> LambdaLR:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = group["lr"] if high is None else high
        least = [low if cosine or not group["lr"] else low / group["lr"] for group in optimizer.param_groups]
        return LambdaLR(optimizer, [partial(factor, low) for low in least])

    return made
