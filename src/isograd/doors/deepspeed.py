"""`isograd config from-deepspeed ds_config.json`: a DeepSpeed config as a run's config, with the fate of every key.

    isograd config from-deepspeed ds_config.json run.yaml --ranks 8

A key is *taken*, and the field that it sets is named; *meaningless*, because it tunes what isograd does otherwise with
the same gradients; *open*, when its value is "auto"; or *refused*, because leaving it out would train otherwise. When
one is refused nothing is written. The defaults are DeepSpeed's, so that what the file leaves out stays as it was.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isograd.errors import DoorError, did_you_mean
from isograd.layout import Layout
from isograd.new import write
from isograd.outside import CONFIG, read_json

SUMS = "isograd sums gradients in fp32 and divides once"
BUCKETS = "isograd plans its own buckets"
PROFILES = "says how DeepSpeed measures and prints"
IDLE = {  # key: why it has no meaning here, whatever its value
    "prescale_gradients": SUMS, "gradient_predivide_factor": SUMS, "communication_data_type": SUMS,
    "seq_parallel_communication_data_type": SUMS, "disable_allgather": BUCKETS, "zero_allow_untested_optimizer": SUMS,
    "zero_force_ds_cpu_optimizer": "there is no optimizer on the host", "wall_clock_breakdown": PROFILES,
    "memory_breakdown": PROFILES, "dump_state": PROFILES, "flops_profiler": PROFILES, "comms_logger": PROFILES,
    "aio": "there is no offload to disks", "checkpoint": "checkpoints are isograd's: checkpoint.every",
    "activation_checkpointing": "set model.recompute", "csv_monitor": "every run writes its numbers into its folder",
    "zero_optimization.allgather_partitions": BUCKETS, "zero_optimization.allgather_bucket_size": BUCKETS,
    "zero_optimization.reduce_bucket_size": BUCKETS, "zero_optimization.reduce_scatter": BUCKETS,
    "zero_optimization.overlap_comm": "communication overlaps backward", "zero_optimization.sub_group_size": BUCKETS,
    "zero_optimization.contiguous_gradients": BUCKETS, "zero_optimization.round_robin_gradients": BUCKETS,
    "zero_optimization.stage3_max_live_parameters": BUCKETS, "zero_optimization.stage3_max_reuse_distance": BUCKETS,
    "zero_optimization.stage3_prefetch_bucket_size": BUCKETS,
    "zero_optimization.use_multi_rank_bucket_allreduce": BUCKETS,
    "zero_optimization.stage3_param_persistence_threshold": BUCKETS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "'isograd ckpt convert' exports from any stage",
    "zero_optimization.gather_16bit_weights_on_model_save": "'isograd ckpt convert' exports from any stage",
    "zero_optimization.stage3_module_granularity_threshold": BUCKETS,
    "zero_optimization.log_trace_cache_warnings": PROFILES,
    "zero_optimization.elastic_checkpoint": "every checkpoint loads under any layout",
    "zero_optimization.load_from_fp32_weights": "masters are in every checkpoint",
    "zero_optimization.ignore_unused_parameters": "unused parameters are found",
    "zero_optimization.memory_efficient_linear": BUCKETS, "zero_optimization.pipeline_loading_checkpoint": BUCKETS,
    "optimizer.params.torch_adam": "which kernel computes Adam", "optimizer.params.fused": "which kernel computes Adam",
    "bf16.auto_cast": "parameters are bf16, masters fp32", "bf16.immediate_grad_update": BUCKETS,
    "bf16.check_grad_overflow": "gradients that are not finite are found: safety.not_finite",
    "tensor_parallel.tp_grain_size": "rows are cut by isograd", "tensorboard.output_path": "the run's folder",
    "tensorboard.job_name": "the run's folder", "wandb.group": "see log.wandb", "wandb.team": "see log.wandb",
    "scheduler.params.last_batch_iteration": "a run resumes at its checkpoint",
}  # fmt: skip
OFF = {  # key: what a run would lose if it were left out while it is on
    "amp": "apex mixed precision: bf16 is supported", "sparse_gradients": "sparse gradients",
    "sparse_attention": "sparse attention changes the model", "autotuning": "autotuning: 'isograd plan' finds layouts",
    "elasticity": "elasticity: batch is fixed, and a run resumes on other numbers of ranks",
    "compression_training": "compression changes the model", "curriculum_learning": "curriculum learning",
    "data_efficiency": "data sampling and token dropping", "progressive_layer_drop": "dropping of layers",
    "eigenvalue": "quantisation by eigenvalues", "quantize_training": "quantised training",
    "pipeline": "pipelines by DeepSpeed",
    "hybrid_engine": "generation during training", "weight_quantization": "quantised weights", "nebula": "nebula",
    "sequence_parallel_size": "sequence parallelism: name it in the layout, as 'cp2 ulysses'", "comet": "Comet",
    "compile": "compilation", "zenflow": "ZenFlow", "torch_autocast": "autocast: bf16 is supported",
    "zero_optimization.offload_optimizer": "offload: ig.Engine(offload=True) has it, 'isograd train' has not",
    "zero_optimization.offload_param": "offload of parameters",
    "zero_optimization.cpu_offload": "offload: ig.Engine(offload=True) has it, 'isograd train' has not",
    "zero_optimization.zero_hpz_partition_size": "a secondary partition", "zero_optimization.mics_shard_size": "MiCS",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
    "zero_optimization.zero_quantized_weights": "quantised communication",
    "zero_optimization.zero_quantized_nontrainable_weights": "quantised communication",
    "zero_optimization.zero_quantized_gradients": "quantised communication",
    "zero_optimization.zenflow": "ZenFlow", "zero_optimization.super_offload": "offload",
    "optimizer.legacy_fusion": "an optimizer of DeepSpeed's own", "optimizer.params.amsgrad": "AMSGrad",
}  # fmt: skip
ON_WHEN_THERE = {"pipeline", "compression_training", "sparse_attention", "weight_quantization", "zenflow"}  # not empty
READ = (  # keys that `convert` asks for itself
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print", "optimizer", "scheduler", "zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel",
    "tensorboard", "wandb", "data_types",
)  # fmt: skip
HEAD = """# Written from {source} by 'isograd config from-deepspeed'. Set model, data and steps, which it does not have.
# AdamW decays matrices only here: norms and biases have no weight decay.
"""


@dataclass(frozen=True)
class Row:
    """A key of the file, and what became of it."""

    key: str
    value: object
    fate: str
    why: str


@dataclass
class _Keys:
    """A mapping of the file, whose keys are taken out one by one."""

    values: dict[str, Any]
    rows: list[Row]
    place: str = ""
    asked: list[str] = field(default_factory=list)

    def row(self, name: str, value: object, fate: str, why: str) -> None:
        self.rows.append(Row(self.place + name, value, fate, why))

    def take(self, name: str, what: str, fits: Callable[[Any], bool], default: Any, sets: str) -> Any:
        """The value of a key; `sets`: the field that it becomes. "auto" leaves it open."""
        self.asked.append(name)
        if name not in self.values:
            return default
        value = self.values.pop(name)
        if value == "auto":
            self.row(name, value, "open", f"set {sets}")
        elif not fits(value):
            self.row(name, value, "refused", f"is not {what}")
        else:
            self.row(name, value, "taken", sets)
            return value
        return default

    def whole(self, name: str, sets: str, default: int | None = None) -> Any:
        return self.take(name, "a whole number from 1", lambda v: type(v) is int and 0 < v < 1 << 40, default, sets)

    def number(self, name: str, sets: str, default: float | None = None) -> Any:
        def fits(value: Any) -> bool:
            return type(value) in (int, float) and math.isfinite(value) and value >= 0

        return self.take(name, "a number from 0", fits, default, sets)

    def word(self, name: str, sets: str, choices: tuple[str, ...], default: str | None = None) -> Any:
        return self.take(name, f"one of {', '.join(choices)}", lambda v: v in choices, default, sets)

    def flag(self, name: str, sets: str, default: bool = False) -> Any:
        return self.take(name, "true or false", lambda v: type(v) is bool, default, sets)

    def inside(self, name: str) -> _Keys:
        self.asked.append(name)
        value = self.values.pop(name, {})
        if not isinstance(value, dict):
            self.row(name, value, "refused", "is not a mapping")
            value = {}
        return _Keys(dict(value), self.rows, f"{self.place}{name}.")

    def rest(self, also: tuple[str, ...] = ()) -> None:
        """What nobody asked for: meaningless, off, or refused."""
        for name, value in self.values.items():
            key = self.place + name
            if key in IDLE:
                self.row(name, value, "meaningless", IDLE[key])
            elif key in OFF and _is_on(name, value):
                self.row(name, value, "refused", OFF[key])
            elif key in OFF:
                self.row(name, value, "meaningless", "is off")
            else:
                known = [k.removeprefix(self.place) for k in (*IDLE, *OFF) if k.startswith(self.place)]
                self.row(name, value, "refused", f"unknown{did_you_mean(name, [*known, *self.asked, *also])}")
        self.values = {}


def _is_on(name: str, value: Any) -> bool:
    """Whether a part of DeepSpeed is asked for: by `enabled`, by a device, by a size, or by being there."""
    if isinstance(value, dict) and name not in ON_WHEN_THERE:
        value = value.get("enabled", value.get("device", "none") != "none")
    elif name.endswith("_size") and value in (1, -1):
        return False
    return bool(value)


def convert(values: object, ranks: int | None) -> tuple[dict[str, Any], list[Row]]:
    """The fields of a run's config, and every key of the file with its fate. ranks: that the run will have."""
    if not isinstance(values, dict):
        raise DoorError(
            "IG863", "this is no DeepSpeed config", seen=type(values).__name__, expected="a mapping of keys"
        )
    rows: list[Row] = []
    keys = _Keys(dict(values), rows)
    zero = keys.inside("zero_optimization")
    stage = zero.take("stage", "0, 1, 2 or 3", lambda v: type(v) is int and 0 <= v <= 3, 0, "layout")
    zero.rest()
    cut = keys.inside("tensor_parallel")
    tp = cut.whole("autotp_size", "layout", 1)
    cut.rest()
    batch, micro, ranks = _batch(keys, ranks, tp)
    layout = Layout.parse(f"dp{ranks // tp}" + (f" tp{tp}" if tp > 1 else "") + f" zero{stage}")
    dtype = _dtype(keys)
    optimizer, steps = _optimizer(keys)
    clip = keys.number("gradient_clipping", "optimizer.clip", 0.0)
    log = {"every": keys.whole("steps_per_print", "log.every", 10)}
    board = keys.inside("tensorboard")
    if board.flag("enabled", "log.tensorboard"):
        log["tensorboard"] = True
    board.rest()
    wandb = keys.inside("wandb")
    if wandb.flag("enabled", "log.wandb"):
        log["wandb"] = wandb.take("project", "text", lambda v: isinstance(v, str) and bool(v), "deepspeed", "log.wandb")
    wandb.values.pop("project", None)
    wandb.rest()
    keys.rest(READ)
    return {
        "version": 1,
        "run": "runs/deepspeed",
        "layout": str(layout),
        "model": {"path": "models/base", "dtype": dtype},
        "data": {"sources": [{"path": "data/mine"}], "length": 1024},
        "optimizer": optimizer | {"clip": float(clip) or None},
        "steps": steps or max(1000, optimizer["warmup"]),
        "batch": batch,
        "micro_batches": micro,
        "log": log,
    }, rows


def _batch(keys: _Keys, ranks: int | None, tp: int) -> tuple[int, int, int]:
    """(rows of a step, micro-batches, ranks): DeepSpeed's three numbers, of which any may be left out."""
    whole = keys.whole("train_batch_size", "batch")
    each = keys.whole("train_micro_batch_size_per_gpu", "batch, micro_batches")
    steps = keys.whole("gradient_accumulation_steps", "micro_batches")
    if ranks is None and whole and each and whole % (each * (steps or 1)) == 0:
        ranks = whole // (each * (steps or 1)) * tp
    ranks = ranks or tp
    data = max(1, ranks // tp)
    if whole and each and steps is None and whole % (each * data) == 0:
        steps = whole // (each * data)
    steps = steps or 1
    whole = whole or (each or 1) * steps * data
    if ranks % tp or whole % (data * steps) or (each and whole != each * steps * data):
        raise DoorError(
            "IG864",
            "the numbers of a DeepSpeed config do not fit together",
            seen=f"train_batch_size {whole}, train_micro_batch_size_per_gpu {each}, "
            f"gradient_accumulation_steps {steps}, {ranks} ranks, tp {tp}",
            expected="train_batch_size = micro-batch * accumulation steps * data ranks",
            fix="give the number of ranks with --ranks, or change the file",
        )
    return whole, steps, ranks


def _dtype(keys: _Keys) -> str:
    dtype = "fp32"
    for name in ("bf16", "bfloat16"):
        bf16 = keys.inside(name)
        if bf16.flag("enabled", "model.dtype"):
            dtype = "bf16"
        bf16.rest()
    fp16 = keys.inside("fp16")
    if fp16.values.get("enabled") in (False, None):
        reason = ("meaningless", "is off")
    elif fp16.values["enabled"] == "auto":
        reason = ("open", "bf16 is supported: model.dtype")
    else:
        reason = ("refused", "a run has no loss scale: bf16 is supported")
    for name, value in fp16.values.items():
        fp16.row(name, value, *reason)
    kinds = keys.inside("data_types")
    kinds.word("grad_accum_dtype", "nothing: sums are fp32", ("fp32",))
    kinds.rest()
    return dtype


def _optimizer(keys: _Keys) -> tuple[dict[str, Any], int | None]:
    """`optimizer` of a run, and its steps, if the schedule says them."""
    if "optimizer" not in keys.values:
        keys.row("optimizer", None, "open", "set optimizer, which the program has made")
    given = keys.inside("optimizer")
    given.word("type", "optimizer.name: adamw", ("Adam", "AdamW"))
    params = given.inside("params")
    lr = params.number("lr", "optimizer.lr", 1e-3)
    eps = params.number("eps", "optimizer.eps", 1e-8)
    decay = params.number("weight_decay", "optimizer.weight_decay", 0.0)

    def pair(value: Any) -> bool:
        return (
            isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) and 0 <= v < 1 for v in value)
        )

    betas = params.take("betas", "two numbers from 0 to 1", pair, [0.9, 0.999], "optimizer.betas")
    for name, why in (("adam_w_mode", "Adam with L2 decay"), ("bias_correction", "Adam without bias correction")):
        if name in params.values:
            value = params.values.pop(name)
            on = value is True or (name == "adam_w_mode" and value is False and not decay)
            params.row(name, value, "taken" if on else "refused", "AdamW" if on else why)
    params.rest()
    given.rest()
    plan = keys.inside("scheduler")
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = plan.word("type", "optimizer.schedule", tuple(kinds))
    rest = plan.inside("params")
    warmup, steps, low = 0, None, 0.0
    if kind is not None:
        steps = rest.whole("total_num_steps", "steps")
        warmup = rest.whole("warmup_num_steps", "optimizer.warmup", 1000)
        shape = rest.values.pop("warmup_type", "log")
        fate = ("taken", "optimizer.warmup") if shape == "linear" else ("refused", "a warmup here is linear: say so")
        rest.row("warmup_type", shape, *fate)
        for name in ("warmup_min_lr", "warmup_min_ratio"):
            rest.take(name, "0, where a warmup begins here", lambda v: v == 0, 0, "optimizer.warmup")
        if kind == "WarmupCosineLR":
            low = lr * rest.number("cos_min_ratio", "optimizer.min_lr", 1e-4)
        else:
            left_open = rest.values.get("warmup_max_lr") == "auto"
            lr = rest.number("warmup_max_lr", "optimizer.lr", lr if left_open else 1e-3)
    rest.rest()
    plan.rest()
    made = {"name": "adamw", "lr": float(lr), "min_lr": float(low), "warmup": warmup}
    made |= {"schedule": kinds.get(kind, "constant"), "betas": [float(beta) for beta in betas], "eps": float(eps)}
    return made | {"weight_decay": float(decay)}, steps


def main(words: list[str], kind: type[argparse.ArgumentParser]) -> int:
    """`isograd config from-deepspeed`; the exit code."""
    parser = kind(
        prog="isograd config from-deepspeed", allow_abbrev=False,
        description="Write a run's config from a DeepSpeed config, and say of every key what became of it.",
    )  # fmt: skip
    parser.add_argument("source", help="a DeepSpeed config: JSON")
    parser.add_argument("file", nargs="?", default="run.yaml", help="where to write it (default: run.yaml)")
    parser.add_argument("--ranks", type=_ranks, metavar="N", help="that the run has (default: as the batch sizes say)")
    options = parser.parse_args(words)
    config, rows = convert(read_json(options.source, CONFIG, follow=True), options.ranks)
    print(table(rows))
    refused = [row for row in rows if row.fate == "refused"]
    if refused:
        raise DoorError(
            "IG865",
            f"{len(refused)} of {len(rows)} keys would train otherwise here than there; nothing was written",
            seen="; ".join(f"{row.key} {row.why}" for row in refused[:8]),
            fix="change or remove them in the file",
        )
    import yaml

    text = HEAD.format(source=Path(options.source).name) + yaml.safe_dump(config, sort_keys=False)
    file = write(Path(options.file), text, f"isograd config from-deepspeed {options.source} ANOTHER-NAME.yaml")
    print(f"\n{file} written. Set model, data and steps; then: isograd train {file} --dry-run")
    return 0


def table(rows: list[Row]) -> str:
    """A line for each key: its fate, its name, its value and where it went, or why not."""
    order = ("refused", "open", "taken", "meaningless")
    wide = max((len(row.key) for row in rows), default=0)
    lines = []
    for row in sorted(rows, key=lambda row: order.index(row.fate)):
        shown = repr(row.value) if len(repr(row.value)) <= 24 else f"{repr(row.value)[:21]}..."
        arrow = "->" if row.fate == "taken" else "  "
        lines.append(f"{row.fate:<12}{row.key:<{wide}}  {shown:<24} {arrow} {row.why}")
    return "\n".join(lines)


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)
