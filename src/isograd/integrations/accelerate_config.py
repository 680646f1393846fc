"""accelerate's config file (`accelerate config`), with FSDP, DeepSpeed or Megatron-LM in it, as a run's config."""

from __future__ import annotations

from typing import Any

from isograd.core.layout import Layout
from isograd.integrations.deepspeed.keys import KeyOutcome, Keys

LAUNCH = "torchrun, Slurm and Kubernetes start ranks: isograd train --emit"
WRAPS = "isograd gathers blocks as they are"
IDLE = {
    **dict.fromkeys(("compute_environment", "distributed_type", "num_machines", "machine_rank", "main_process_ip",
                     "main_process_port", "main_training_function", "rdzv_backend", "same_network", "gpu_ids", "debug",
                     "enable_cpu_affinity", "use_cpu", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "commands",
                     "deepspeed_hostfile", "deepspeed_multinode_launcher", "command_file"), LAUNCH),
    **dict.fromkeys(("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch",
                     "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_min_num_params",
                     "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type", "fsdp_version",
                     "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names"), WRAPS),
    **dict.fromkeys(("parallelism_config_cp_", "parallelism_config_sp_"), "isograd cuts and exchanges as it does"),
    "downcast_bf16": "only for TPUs",
}  # fmt: skip


def convert(values: dict[str, Any], ranks: int | None) -> tuple[dict[str, Any], list[KeyOutcome]]:
    """The fields of a run's config, and every key of the file with its fate."""
    keys = Keys({name: value for name, value in values.items() if value is not None}, [])
    every = keys.positive_int("num_processes", "layout: its ranks", 1)
    ranks = ranks or every
    words = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    dtype = keys.word("mixed_precision", "model.dtype", words, "no")
    stage, clip, parts = 0, None, 1
    cut, fsdp = keys.section("parallelism_config"), keys.section("fsdp_config")
    _, shards, tp, cp, sp = (
        cut.positive_int(f"parallelism_config_{name}_size", "layout", 1)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    )
    sizes = {"tp": tp, "cp": max(cp, sp), "pp": 1}
    method = " ring" if cp > 1 else " ulysses" if sp > 1 else ""
    if cp > 1 and sp > 1:
        cut.row(
            "parallelism_config_cp_size", cp, "refused", f"beside sp_size {sp}: write layout cp{cp * sp} ulysses{sp}"
        )
    recompute = fsdp.flag("fsdp_activation_checkpointing", "model.recompute")
    if shards > 1 or values.get("distributed_type") == "FSDP":
        stage = _fsdp_stage(fsdp)
    fsdp.take("fsdp_offload_params", "off: take it out, set optimizer.offload", lambda v: v is False, None, "nothing")
    speed, megatron = keys.section("deepspeed_config"), keys.section("megatron_lm_config")
    if speed.values:
        stage = speed.take("zero_stage", "0 to 3", lambda v: type(v) is int and 0 <= v <= 3, 2, "layout: zero")
        parts = speed.positive_int("gradient_accumulation_steps", "micro_batches", 1)
        clip = speed.number("gradient_clipping", "optimizer.clip")
        for name in ("offload_optimizer_device", "offload_param_device"):
            speed.word(name, "nothing: it is off", ("none",))
        speed.take("deepspeed_config_file", "read here: isograd config from it", lambda v: False, None, "all of it")
    if megatron.values:
        sizes["tp"] = megatron.positive_int("megatron_lm_tp_degree", "layout: tp", 1)
        sizes["pp"] = megatron.positive_int("megatron_lm_pp_degree", "layout: pp", 1)
        parts = megatron.positive_int("megatron_lm_num_micro_batches", "micro_batches", 1)
        clip = megatron.number("megatron_lm_gradient_clipping", "optimizer.clip")
        recompute = megatron.flag("megatron_lm_recompute_activations", "model.recompute") or recompute
        stage = int(megatron.flag("megatron_lm_use_distributed_optimizer", "layout: zero1"))
    sequence = " sp" if megatron.flag("megatron_lm_sequence_parallelism", "layout: sp") and sizes["tp"] > 1 else ""
    dynamo = keys.section("dynamo_config")
    backend = dynamo.take("dynamo_backend", "a word", lambda v: isinstance(v, str), "NO", "model.compile")
    inner = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if ranks % inner:
        keys.row(
            "num_processes", ranks, "refused", f"is no multiple of {inner}, the ranks of tp, cp and pp; give --ranks"
        )
    layout = f"pp{sizes['pp']} dp{max(1, ranks // inner)} cp{sizes['cp']}{method} tp{sizes['tp']}{sequence} zero{stage}"
    keys.classify_rest(IDLE, {})
    keys.row("model, data, learning rate", None, "open", "set model, data, optimizer.lr, batch and steps")
    return {
        "version": 1,
        "run": "runs/accelerate",
        "layout": str(Layout.parse(layout)),
        "model": {
            "path": "models/base",
            "dtype": dtype,
            "recompute": recompute,
            "compile": backend not in ("NO", "no"),
        },
        "data": {"sources": [{"path": "data/mine"}], "length": 1024},
        "optimizer": {"lr": 5e-5, "clip": clip},
        "steps": 1000,
        "batch": max(1, ranks // inner) * parts,
        "micro_batches": parts,
    }, keys.rows


def _fsdp_stage(fsdp: Keys) -> int:
    stages = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}
    numbers = dict(zip(("1", "4", "2", "5", "3"), stages.values(), strict=True))  # of FSDP 1's enumeration
    if isinstance(fsdp.values.get("fsdp_sharding_strategy"), int):
        fsdp.values["fsdp_sharding_strategy"] = str(fsdp.values["fsdp_sharding_strategy"])
    word = fsdp.word("fsdp_sharding_strategy", "layout: zero", (*stages, *numbers))
    again = fsdp.take(
        "fsdp_reshard_after_forward", "a stage", lambda v: type(v) is bool or v in stages, True, "layout: zero"
    )
    stage = stages[again] if isinstance(again, str) else 3 if again else 2
    return stage if word is None else (stages | numbers)[word]
