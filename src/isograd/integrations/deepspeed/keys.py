"""Keys of a DeepSpeed config: which have no meaning here, which ask for what is not here, and what became of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from isograd.errors import IntegrationError, did_you_mean

SUMS = "isograd sums gradients in fp32 and divides once"
BUCKETS = "isograd plans its own buckets"
KNOWN = "'isograd train' has torch's optimizers"
PROFILES = "says how DeepSpeed measures and prints"
IDLE = {  # key: why it has no meaning here, whatever its value
    "prescale_gradients": SUMS, "gradient_predivide_factor": SUMS, "communication_data_type": SUMS,
    "seq_parallel_communication_data_type": SUMS, "disable_allgather": BUCKETS, "zero_allow_untested_optimizer": KNOWN,
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
    "pipeline": "take it out of the file: PipelineModule has arguments for it",
    "hybrid_engine": "generation during training", "weight_quantization": "quantised weights", "nebula": "nebula",
    "comet": "Comet", "compile": "compilation", "zenflow": "ZenFlow", "torch_autocast": "autocast: bf16 is supported",
    "zero_optimization.offload_optimizer": "take it out of the file, and set optimizer.offload",
    "zero_optimization.offload_param": "offload of parameters",
    "zero_optimization.cpu_offload": "take it out of the file, and set optimizer.offload",
    "zero_optimization.zero_hpz_partition_size": "a secondary partition", "zero_optimization.mics_shard_size": "MiCS",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
    "zero_optimization.zero_quantized_weights": "quantised communication",
    "zero_optimization.zero_quantized_nontrainable_weights": "quantised communication",
    "zero_optimization.zero_quantized_gradients": "quantised communication",
    "zero_optimization.zenflow": "ZenFlow", "zero_optimization.super_offload": "offload",
    "optimizer.legacy_fusion": "an optimizer of DeepSpeed's own", "optimizer.params.amsgrad": "AMSGrad",
}  # fmt: skip
ON_WHEN_THERE = {"pipeline", "compression_training", "sparse_attention", "weight_quantization", "zenflow"}  # not empty
SECTIONS = {"scheduler": "optimizer.schedule, optimizer.warmup", "bf16": "model.dtype", "bfloat16": "model.dtype"}


@dataclass(frozen=True)
class KeyOutcome:
    """A key of the file, and what became of it."""

    key: str
    value: object
    fate: str
    why: str


@dataclass
class Keys:
    """A mapping of the file, whose keys are taken out one by one."""

    values: dict[str, Any]
    rows: list[KeyOutcome]
    place: str = ""
    asked: list[str] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)  # how the file spells a name, where it is another
    sections: list[Keys] = field(default_factory=list)

    def row(self, name: str, value: object, fate: str, why: str) -> None:
        """Note what became of a key."""
        key = self.place + self.spelled.get(name, name)
        self.rows.append(KeyOutcome(key if key.isprintable() and name else repr(key), value, fate, why))

    def take(self, name: str, what: str, fits: Callable[[Any], bool], default: Any, sets: str) -> Any:
        """The value of a key; `sets`: the field that it becomes. "auto" leaves it open, and so
        does a shell variable that a script does not set."""
        self.asked.append(name)
        if name not in self.values:
            return default
        value = self.values.pop(name)
        if value == "auto" or (isinstance(value, str) and value.startswith("$")):
            self.row(name, value, "open", f"set {sets}")
        elif not fits(value):
            self.row(name, value, "refused", f"is not {what}")
        else:
            self.row(name, value, "taken", sets)
            return value
        return default

    def positive_int(self, name: str, sets: str, default: int | None = None) -> Any:
        """A whole number from 1."""
        return self.take(name, "a whole number from 1", lambda v: type(v) is int and 0 < v < 1 << 40, default, sets)

    def number(self, name: str, sets: str, default: float | None = None) -> Any:
        """A finite number from 0, as a float."""

        def fits(value: Any) -> bool:
            return type(value) in (int, float) and math.isfinite(value) and value >= 0

        found = self.take(name, "a number from 0", fits, default, sets)
        return None if found is None else float(found)

    def word(self, name: str, sets: str, choices: Collection[str], default: str | None = None) -> Any:
        """One of a few words, or what it means."""
        found = self.take(name, f"one of {', '.join(choices)}", lambda v: v in choices, default, sets)
        return choices.get(found) if isinstance(choices, Mapping) else found

    def flag(self, name: str, sets: str, default: bool = False) -> Any:
        """True or false."""
        return self.take(name, "true or false", lambda v: type(v) is bool, default, sets)

    def section(self, name: str) -> Keys:
        """A mapping inside this one, as keys of its own."""
        self.asked.append(name)
        value = self.values.pop(name, {})
        if not isinstance(value, dict):
            fate = ("open", f"set {SECTIONS.get(name, name)}") if value == "auto" else ("refused", "is not a mapping")
            self.row(name, value, *fate)
            value = {}
        self.sections.append(Keys({str(key): each for key, each in value.items()}, self.rows, f"{self.place}{name}."))
        return self.sections[-1]

    def classify_rest(self, idle: Mapping[str, str], open_: Mapping[str, str]) -> None:
        """The fate of all keys that are left, of sections too. A name that ends in _ stands for all that begin so."""
        for section in self.sections:
            section.classify_rest(idle, open_)

        def reason(table: Mapping[str, str], name: str) -> str | None:
            return table.get(name) or next((v for k, v in table.items() if k[-1:] == "_" and name.startswith(k)), None)

        for name, value in self.values.items():
            if why := reason(idle, name):
                self.row(name, value, "meaningless", why)
            elif value in (False, 0, "", "none", "no", "NO", [], {}):
                self.row(name, value, "meaningless", "is off")
            elif why := reason(open_, name):
                self.row(name, value, "open", why)
            else:
                near = did_you_mean(name, [*(self.spelled.get(n, n) for n in self.asked), *idle, *open_])
                self.row(name, value, "refused", f"unknown{near}")
        self.values = {}

    def rest(self) -> None:
        """What nobody asked for, here and in sections: meaningless, off, or refused."""
        for section in self.sections:
            section.rest()
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
                self.row(name, value, "refused", f"unknown{did_you_mean(name, [*known, *self.asked])}")
        self.values = {}


def _is_on(name: str, value: Any) -> bool:
    """Whether a part of DeepSpeed is asked for: by `enabled`, by a device, by a size, or by being there."""
    if isinstance(value, dict) and name not in ON_WHEN_THERE:
        value = value.get("enabled", value.get("device", "none") != "none")
    elif name.endswith("_size") and value in (1, -1):
        return False
    return bool(value)


def opened(values: object) -> tuple[Keys, Keys, int]:
    """What every reader of a DeepSpeed config begins with: its keys, those of ZeRO, and its stage."""
    if not isinstance(values, dict):
        raise IntegrationError(
            "IG863", "this is no DeepSpeed config", seen=type(values).__name__, expected="a mapping of keys"
        )
    keys = Keys(dict(values), [])
    zero = keys.section("zero_optimization")
    stage = zero.take("stage", "0, 1, 2 or 3", lambda v: type(v) is int and 0 <= v <= 3, 0, "layout")
    return keys, zero, stage
