"""A DeepSpeed config as a run's config (`isograd config from ds_config.json`), with the fate of every key.

Defaults are DeepSpeed's, so that what the file leaves out stays as it was.
"""

from __future__ import annotations

from typing import Any

from isograd.core.layout import Layout
from isograd.errors import IntegrationError
from isograd.integrations.deepspeed.keys import KeyOutcome, Keys, opened


def convert(values: object, ranks: int | None) -> tuple[dict[str, Any], list[KeyOutcome]]:
    """The fields of a run's config, and every key of the file with its fate. ranks: that the run will have."""
    keys, _, stage = opened(values)
    cp, tp = cut_sizes(keys, Layout())
    batch, micro, ranks = batch_of(keys, ranks, tp * cp)
    cuts = (f" cp{cp} ulysses" if cp > 1 else "") + (f" tp{tp}" if tp > 1 else "")
    layout = Layout.parse(f"dp{ranks // (tp * cp)}{cuts} zero{stage}")
    dtype = dtype_of(keys)
    optimizer, steps = _optimizer(keys)
    clip = keys.number("gradient_clipping", "optimizer.clip", 0.0)
    log = {"every": keys.positive_int("steps_per_print", "log.every", 10)}
    board = keys.section("tensorboard")
    if board.flag("enabled", "log.tensorboard"):
        log["tensorboard"] = True
    wandb = keys.section("wandb")
    if wandb.flag("enabled", "log.wandb"):
        log["wandb"] = wandb.take("project", "text", lambda v: isinstance(v, str) and bool(v), "deepspeed", "log.wandb")
    wandb.values.pop("project", None)
    keys.rest()
    return {
        "version": 1,
        "run": "runs/deepspeed",
        "layout": str(layout),
        "model": {"path": "models/base", "dtype": dtype},
        "data": {"sources": [{"path": "data/mine"}], "length": 1024},
        "optimizer": optimizer | {"clip": clip or None},
        "steps": steps or max(1000, optimizer["warmup"]),
        "batch": batch,
        "micro_batches": micro,
        "accumulate": "sharded" if layout.zero > 1 and micro > 1 else "local",  # ZeRO 2 keeps no whole gradients
        "log": log,
    }, keys.rows


def cut_sizes(keys: Keys, asked: Layout) -> tuple[int, int]:
    """The sizes of cp and tp. asked: what was asked for beside the config, which must not contradict it."""
    cut = keys.section("tensor_parallel")
    cp = keys.positive_int("sequence_parallel_size", "layout: cp ulysses", asked.cp)
    tp = cut.positive_int("autotp_size", "layout: tp", asked.tp)
    for name, size, other in (("sequence_parallel_size", cp, asked.cp), ("autotp_size", tp, asked.tp)):
        if other not in (1, size):
            keys.row(name, size, "refused", f"is not the {other} of layout, mpu or mesh_param")
    return cp, tp


def batch_of(keys: Keys, ranks: int | None, tp: int) -> tuple[int, int, int]:
    """(rows of a step, micro-batches, ranks): DeepSpeed's three numbers, of which any may be left out. tp: how many
    ranks share their rows."""
    whole = keys.positive_int("train_batch_size", "batch")
    each = keys.positive_int("train_micro_batch_size_per_gpu", "batch, micro_batches")
    steps = keys.positive_int("gradient_accumulation_steps", "micro_batches")
    if ranks is None and whole and each and whole % (each * (steps or 1)) == 0:
        ranks = whole // (each * (steps or 1)) * tp
    ranks = ranks or tp
    data = max(1, ranks // tp)
    if whole and each and steps is None and whole % (each * data) == 0:
        steps = whole // (each * data)
    steps = steps or 1
    whole = whole or (each or 1) * steps * data
    if ranks % tp or whole % (data * steps) or (each and whole != each * steps * data):
        raise IntegrationError("IG864", whole=whole, each=each, steps=steps, ranks=ranks, shared=tp)
    return whole, steps, ranks


def dtype_of(keys: Keys) -> str:
    """ "bf16" or "fp32"; fp16 is refused."""
    dtype = "fp32"
    if "bf16" in keys.values and "bfloat16" in keys.values:  # DeepSpeed reads the first of its two spellings
        keys.row("bfloat16", keys.values.pop("bfloat16"), "meaningless", "bf16 is said")
    for name in ("bf16", "bfloat16"):
        bf16 = keys.section(name)
        if bf16.flag("enabled", "model.dtype"):
            dtype = "bf16"
    fp16 = keys.section("fp16")
    if fp16.values.get("enabled") in (False, None):
        reason = ("meaningless", "is off")
    elif fp16.values["enabled"] == "auto":
        reason = ("open", "set model.dtype to fp16 or bf16")
    else:
        reason = ("refused", "take it out of the file, and set model.dtype fp16, with a loss scale of isograd's")
    for name, value in fp16.values.items():
        fp16.row(name, value, *reason)
    fp16.values.clear()
    kinds = keys.section("data_types")
    kinds.word("grad_accum_dtype", "nothing: sums are fp32", ("fp32",))
    return dtype


def _optimizer(keys: Keys) -> tuple[dict[str, Any], int | None]:
    """`optimizer` of a run, and its steps, if the schedule says them."""
    if "optimizer" not in keys.values:
        keys.row("optimizer", None, "open", "set optimizer, which the program has made")
    given = keys.section("optimizer")
    name = given.word("type", "optimizer.name: adamw", ("Adam", "AdamW"))
    params = given.section("params")
    lr = params.number("lr", "optimizer.lr", 1e-3)
    eps = params.number("eps", "optimizer.eps", 1e-8)
    torchs = params.values.get("torch_adam") and (name == "AdamW" or params.values.get("adam_w_mode", True))
    decay = params.number("weight_decay", "optimizer.weight_decay", 0.01 if torchs else 0.0)  # as torch's AdamW has it

    def pair(value: Any) -> bool:
        return (
            isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) and 0 <= v < 1 for v in value)
        )

    betas = params.take("betas", "two numbers from 0 to 1", pair, [0.9, 0.999], "optimizer.betas")
    params.take("bias_correction", "true: Adam has it here", lambda v: v is True, True, "AdamW")
    decoupled = lambda v: v is True or (v is False and (name == "AdamW" or not decay))  # noqa: E731
    params.take("adam_w_mode", "true: Adam with L2 decay is not here", decoupled, True, "AdamW")
    plan = keys.section("scheduler")
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = plan.word("type", "optimizer.schedule", tuple(kinds))
    rest = plan.section("params")
    warmup, steps, low = 0, None, 0.0
    if kind is not None:
        steps = rest.positive_int("total_num_steps", "steps")
        warmup = rest.positive_int("warmup_num_steps", "optimizer.warmup", 1000)
        shape = rest.values.pop("warmup_type", "log")
        fate = ("taken", "optimizer.warmup") if shape == "linear" else ("refused", "a warmup here is linear: say so")
        rest.row("warmup_type", shape, *fate)
        for name in ("warmup_min_lr", "warmup_min_ratio"):
            rest.take(name, "0, where a warmup begins here", lambda v: v == 0, 0, "optimizer.warmup")
        if kind == "WarmupCosineLR":
            low = lr * rest.number("cos_min_ratio", "optimizer.min_lr", 1e-4)
        else:
            own = kind == "WarmupLR" or rest.values.get("warmup_max_lr") == "auto"
            lr = rest.number("warmup_max_lr", "optimizer.lr", lr if own else 1e-3)
    made = {"name": "adamw", "lr": lr, "min_lr": low, "warmup": warmup}
    made |= {"schedule": kinds.get(kind, "constant"), "betas": [float(beta) for beta in betas], "eps": eps}
    return made | {"weight_decay": decay}, steps
