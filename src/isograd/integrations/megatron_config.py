"""Arguments of Megatron-LM, and YAML files of GPT-NeoX, as a run's config (`isograd config from`).

NEOX has the names that differ, and `_Reader` asks by Megatron's. Defaults are theirs, so that what the file leaves out
stays as it was. A shell script is read for its arguments and its variables, and nothing of it is run.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from typing import Any

from isograd.core.layout import Layout
from isograd.errors import IntegrationError
from isograd.integrations.deepspeed.keys import KeyOutcome, Keys

Convert = tuple[dict[str, Any], list[KeyOutcome]]
NEOX = {  # Megatron-LM's name: GPT-NeoX's
    "pipeline_model_parallel_size": "pipe_parallel_size", "tensor_model_parallel_size": "model_parallel_size",
    "clip_grad": "gradient_clipping", "save_interval": "checkpoint_factor", "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_kv_heads", "normalization": "norm", "position_embedding_type": "pos_emb",
    "rotary_percent": "rotary_pct", "rotary_base": "rotary_emb_base", "norm_epsilon": "layernorm_epsilon",
    "micro_batch_size": "train_micro_batch_size_per_gpu", "global_batch_size": "train_batch_size",
    "lr_warmup_fraction": "warmup", "qk_layernorm": "use_qk_layernorm", "window_size": "sliding_window_width",
    "untie_embeddings_and_output_weights": "no_weight_tying",
}  # fmt: skip
FULL = r"flash|global|all|\W|\d"  # what may stand in an attention_config
COMMENT = r"""('[^']*'|"(?:\\[\s\S]|[^"\\])*"|\\[\s\S])|(?<![^\s;()&|])#.*"""  # which begins a word, or what is quoted
LONGEST = 1 << 20  # characters of a word whose variables are filled in
SEVERAL = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "cp_comm_type", "moe_layer_freq"}
KERNELS, MEMORY = "isograd chooses its kernels", "isograd plans its own memory"
IDLE = {  # a name, or the beginning of names that ends in _: why it has no meaning here, whatever its value
    **dict.fromkeys(("tp_comm_", "overlap_", "delay_", "ddp_", "no_overlap_", "align_"), "communication overlaps"),
    **dict.fromkeys(("attention_backend", "use_flash_attn", "transformer_impl", "no_rope_fusion", "masked_softmax_",
                     "no_masked_softmax_fusion", "cross_entropy_", "no_gradient_accumulation_fusion", "scaled_masked_",
                     "scaled_upper_", "rope_fusion", "layernorm_fusion", "rmsnorm_fusion", "bias_dropout_fusion",
                     "no_bias_dropout_fusion", "apply_query_key_layer_scaling", "moe_grouped_gemm",
                     "moe_permute_fusion", "apply_layernorm_1p", "attention_softmax_in_fp32", "use_flashattn_swiglu",
                     "no_bias_swiglu_fusion", "no_create_"), KERNELS),
    **dict.fromkeys(("manual_gc", "empty_unused_memory_level", "recompute_method", "recompute_num_layers",
                     "recompute_modules", "checkpoint_num_layers", "partition_activations", "synchronize_each_layer",
                     "deepspeed_activation_checkpointing", "contiguous_checkpointing"), MEMORY),
    **dict.fromkeys(("accumulate_allreduce_grads_in_fp32", "calculate_per_token_loss", "no_async_",
                     "use_precision_aware_optimizer", "data_parallel_random_init", "grad_reduce_in_bf16"),
                    "isograd sums gradients in fp32 and divides once, by the number of tokens"),
    **dict.fromkeys(("log_", "timing_", "profile", "profile_", "tensorboard_", "wandb_", "wall_clock_breakdown",
                     "steps_per_print", "use_wandb", "use_pytorch_profiler", "memory_"),
                    "numbers are in the run's folder"),
    **dict.fromkeys(("load", "ckpt_", "use_dist_ckpt", "async_save", "dist_ckpt_", "no_load_", "no_save_",
                     "auto_detect_", "exit_on_missing_checkpoint", "use_checkpoint_", "checkpoint_validation_"),
                    "a run resumes at its own checkpoint"),
    **dict.fromkeys(("distributed_", "nccl_", "local_rank", "node_rank", "master_", "use_cpu_initialization",
                     "hostfile", "rdzv_", "use_mcore_models", "lazy_mpu_init", "output_layer_parallelism", "launcher",
                     "deepspeed_",
                     "make_vocab_size_divisible_by", "comment", "exit_", "iteration", "is_pipe_parallel", "num_workers",
                     "user_script", "no_mmap_", "pipe_partition_method", "use_shared_fs", "dataloader_type",
                     "use_distributed_optimizer", "group_query_attention", "adlr_", "override_opt_param_scheduler"),
                    "isograd has its own way, which trains the same"),
}  # fmt: skip
OPEN = {
    **dict.fromkeys(("data_", "train_data_", "valid_data_", "test_data_", "split", "mock_data", "reset_",
                     "eod_mask_loss", "legacy_", "label_data_"), "set data.sources: isograd data build"),
    **dict.fromkeys(("tokenizer_", "vocab_file", "merge_file", "tiktoken_", "vocab_extra_"),
                    "isograd data build --tokenizer, and set model.options.vocab"),
    **dict.fromkeys(("init_method", "output_layer_init_method", "seed"), "first values are isograd's: model.seed"),
}  # fmt: skip


def convert(values: object, ranks: int | None, *, neox: bool = False) -> Convert:
    """The fields of a run's config, and every argument of Megatron-LM, or key of a GPT-NeoX file, with its fate."""
    return _Reader(values, ranks, neox=neox).config()


class _Reader(Keys):
    """A file's keys, by Megatron-LM's names with underscores."""

    def __init__(self, values: object, ranks: int | None, *, neox: bool) -> None:
        if not isinstance(values, dict) or not values:
            raise IntegrationError(
                "IG863", "no arguments of Megatron-LM, and no keys of GPT-NeoX", fix="--kind says whose it is"
            )
        given = {str(name).replace("-", "_"): value for name, value in values.items() if value is not None}
        of_neox = {theirs: name for name, theirs in NEOX.items()} | {name: f"megatron {name}" for name in NEOX}
        names = {name: of_neox.get(name, name) if neox else name for name in given}
        super().__init__({names[name]: value for name, value in given.items()}, [])
        self.spelled, self.neox = (NEOX if neox else {}) | {name: own for own, name in names.items()}, neox
        nodes, each = (self.count(n, "layout: its ranks") for n in ("nnodes", "nproc_per_node"))
        self.ranks = ranks or ((nodes or 1) * each if each else None)

    def count(self, name: str, sets: str, default: int | None = None) -> Any:
        """A whole number; of one, GPT-NeoX writes 0."""
        if self.neox and self.values.get(name) == 0:
            self.values[name] = 1
        return self.positive_int(name, sets, default)

    def config(self) -> Convert:
        """All of it, and the fate of what sets no field."""
        options = self._model()
        layout, data = self._layout(options["layers"])
        micro = self.count("micro_batch_size", "batch, micro_batches", 1)
        parts = self.positive_int("gradient_accumulation_steps", "micro_batches") if self.neox else None
        batch = self.count("global_batch_size", "batch", micro * data * (parts or 1))
        if batch % (micro * data) or (parts and parts * micro * data != batch):
            self.row("global_batch_size", batch, "refused", f"is no multiple of {micro} rows x {data} data ranks")
        dtype, recompute = self._dtype(), self._recompute()
        optimizer, steps = self._optimizer(batch)
        every = self.count("save_interval", "checkpoint.every")
        found: dict[str, Any] = {
            "version": 1,
            "run": self.take("save", "a text", lambda v: isinstance(v, str), "runs/megatron", "run"),
            "layout": layout,
            "model": {"dtype": dtype, "recompute": recompute, "options": options},
            "data": {"sources": [{"path": "data/mine"}], "length": self.count("seq_length", "data.length", 1024)},
            "optimizer": optimizer,
            "steps": steps,
            "batch": batch,
            "micro_batches": max(1, batch // (micro * data)),
            "checkpoint": {"every": every} if every else {},
            "evaluate": {
                "every": self.count("eval_interval", "evaluate.every", 1000),
                "batches": self.count("eval_iters", "evaluate.batches", 100),
            },
            "log": {"every": self.count("log_interval", "log.every", 100)},
        }
        keep = self.positive_int("keep_last_n_checkpoints", "checkpoint.keep_last") if self.neox else None
        found["checkpoint"] |= {"keep_last": keep} if keep else {}
        self.classify_rest(IDLE, OPEN)
        return found, self.rows

    def _layout(self, layers: int) -> tuple[str, int]:
        """(layout, how many ranks have rows of their own)."""
        tp = self.count("tensor_model_parallel_size", "layout: tp", 1)
        pp = self.count("pipeline_model_parallel_size", "layout: pp", 1)
        cp, ep = (self.count(n, "layout") or 1 for n in ("context_parallel_size", "expert_model_parallel_size"))
        sp = self.flag("sequence_parallel", "layout: sp") and tp > 1
        kinds = {"p2p": " ring", "all_gather": " ring", "a2a": " ulysses"}
        method = self.word("cp_comm_type", "layout: ring or ulysses", kinds, "p2p") if cp > 1 else ""
        each = self.count("num_layers_per_virtual_pipeline_stage", "layout: vpp")
        vpp = self.count("num_virtual_stages_per_pipeline_rank", "layout: vpp", layers // (pp * each) if each else 1)
        zero = self._zero()
        ranks = self.ranks or tp * pp * cp * max(1, ep // (tp * cp))
        if ranks % (tp * pp * cp):
            self.row(
                "--ranks", ranks, "refused", f"is no multiple of {tp * pp * cp}, those of the layout; give --ranks"
            )
        data = max(1, ranks // (tp * pp * cp))
        sizes = (f"pp{pp}", pp), (f"vpp{vpp}", vpp), (f"dp{data}", data), (f"cp{cp}{method}", cp), (f"tp{tp}", tp)
        words = [word for word, size in sizes if size > 1] + (["sp"] if sp else [])
        return str(Layout.parse(" ".join([*words, *([f"ep{ep}"] if ep > 1 else []), f"zero{zero}"]))), data

    def _zero(self) -> int:
        if self.neox:
            zero = self.section("zero_optimization")
            stage = zero.take("stage", "0, 1, 2 or 3", lambda v: type(v) is int and 0 <= v <= 3, 0, "layout: zero")
            zero.rest()
            return int(stage)
        stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        strategy = self.word("data_parallel_sharding_strategy", "layout: zero", stages, "no_shard")
        whole = [n for n in ("use_torch_fsdp2", "use_megatron_fsdp") if self.flag(n, "layout: zero3")]
        sharded = self.flag("use_distributed_optimizer", "layout: zero1")
        return int(strategy or (3 if whole else 1 if sharded else 0))

    def _model(self) -> dict[str, Any]:
        """`model.options`: fields of TransformerConfig."""
        sizes = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}
        found: dict[str, Any] = {field: self.count(name, f"model.options.{field}") for name, field in sizes.items()}
        if missing := [self.spelled.get(name, name) for name, field in sizes.items() if found[field] is None]:
            seen = f"no {', '.join(missing)}"
            raise IntegrationError("IG863", "the file describes no model", seen=seen, fix="add them to the file")
        self.take("program", "pretrain_gpt.py: no other model is read", lambda v: not v, None, "model")
        found["vocab"] = self.count("vocab_size", "model.options.vocab")
        if found["vocab"] is None:
            found["vocab"] = 50304
            self.row("vocab_size", None, "open", "set model.options.vocab: the tokenizer's size")
        self._feed_forward(found)
        grouped = self.neox or self.flag("group_query_attention", "model.options.kv_heads")
        groups = self.count("num_query_groups", "model.options.kv_heads")
        found["kv_heads"] = groups if grouped else None
        found["head_dim"] = self.count("kv_channels", "model.options.head_dim")
        found["norm"] = self.word("normalization", "model.options.norm", {
            "layernorm": "layer", "LayerNorm": "layer", "te_layernorm": "layer", "RMSNorm": "rms", "rmsnorm": "rms",
            "te_rmsnorm": "rms"}, "LayerNorm")  # fmt: skip
        rms = self.number("rms_norm_epsilon", "model.options.norm_eps", 1e-8) if self.neox else None
        layer = self.number("norm_epsilon", "model.options.norm_eps", 1e-5)
        found["norm_eps"] = rms if rms is not None and found["norm"] == "rms" else layer
        self._positions(found)
        bias = not self.flag("disable_bias_linear", "model.options: no biases")
        extra = self.flag("add_qkv_bias", "model.options.qkv_bias")
        inner, outer = (
            self.flag(n, "model.options", default=True) if self.neox else bias
            for n in ("use_bias_in_attn_linear", "use_bias_in_mlp")
        )
        found |= {"qkv_bias": inner or extra, "out_bias": inner, "mlp_bias": outer}
        found["tied"] = not self.flag("untie_embeddings_and_output_weights", "model.options.tied")
        found["qk_norm"] = self.flag("qk_layernorm", "model.options.qk_norm")
        found["init_std"] = self.number("init_method_std", "model.options.init_std", 0.02)
        drop = 0.0 if self.neox else 0.1
        found["dropout"] = self.number("hidden_dropout", "model.options.dropout", drop)
        found["attention_dropout"] = self.number("attention_dropout", "model.options.attention_dropout", drop)
        if self.neox:
            found["parallel_residual"] = self.flag("gpt_j_residual", "model.options.parallel_residual")
            if self.flag("gpt_j_tied", "nothing") and found["parallel_residual"]:
                self.row("gpt_j_tied", True, "refused", "one norm for attention and feed-forward")
            self.take("attention_config", "flash or global", lambda v: not re.sub(FULL, "", repr(v)), None, "nothing")
        self._experts(found)
        return {name: value for name, value in found.items() if value is not None}

    def _feed_forward(self, found: dict[str, Any]) -> None:
        field, hidden = "model.options.activation", found["hidden"]
        inner = self.count("ffn_hidden_size", "model.options.mlp")
        if self.neox:
            kinds = {
                "gelu": ("gelu", False),
                "relu": ("relu", False),
                "silu": ("silu", False),
                "swish": ("silu", False),
            }
            kinds |= {"swiglu": ("silu", True), "geglu": ("gelu", True), "reglu": ("relu", True)}
            activation, gated = self.word("activation", field, kinds, "gelu")
            tanh = self.flag("bias_gelu_fusion", field) and not gated  # their fused kernel computes GELU by tanh
            inner = inner or int(self.number("expansion_factor", "model.options.mlp", 4.0) * hidden)
            inner = int(inner * 2 / 3) // 2 if gated else inner  # gate and value share two thirds
            multiple = self.positive_int("mlp_multiple_of", "model.options.mlp", 1)
            inner = multiple * -(-inner // multiple)
        else:
            gated = self.flag("swiglu", field)
            activation = "silu" if gated else "gelu"
            exact = self.flag("no_bias_gelu_fusion", field) and not self.flag("openai_gelu", field)
            tanh = not exact
            inner = inner or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
        found["activation"] = "gelu_tanh" if activation == "gelu" and tanh else activation
        found |= {"gated": gated, "mlp": inner}

    def _positions(self, found: dict[str, Any]) -> None:
        kinds = {"learned_absolute": "learned", "learned": "learned", "rope": "rotary", "rotary": "rotary"}
        kind = self.word("position_embedding_type", "model.options.positions", kinds, "learned_absolute")
        if self.flag("use_rotary_position_embeddings", "model.options.positions"):
            kind = "rotary"
        found["positions"] = kind
        found["max_positions"] = self.count("max_position_embeddings", "model.options.max_positions", 2048)
        theta = self.number("rotary_base", "model.options.rope_theta", 10000.0)
        share = self.number("rotary_percent", "model.options.rotary_fraction", 1.0)
        if kind == "rotary":
            found |= {"rope_theta": theta, "rotary_fraction": share}

    def _experts(self, found: dict[str, Any]) -> None:
        if self.neox or not (number := self.count("num_experts", "model.options.experts.number")):
            return
        place = "model.options.experts"
        balance = self.word("moe_router_load_balancing_type", f"{place}.balance", {
            "aux_loss": "batch", "seq_aux_loss": "sequence", "none": "none"}, "aux_loss")  # fmt: skip
        weight = self.number("moe_aux_loss_coeff", f"{place}.balance_weight", 0.0)
        scores = {"softmax": "softmax", "sigmoid": "sigmoid"}
        found["experts"] = {
            "number": number,
            "per_token": self.count("moe_router_topk", f"{place}.per_token", 2),
            "width": self.count("moe_ffn_hidden_size", f"{place}.width", found["mlp"]),
            "shared": self.count("moe_shared_expert_intermediate_size", f"{place}.shared", 0),
            "scores": self.word("moe_router_score_function", f"{place}.scores", scores, "softmax"),
            "balance": balance if weight else "none",
            "balance_weight": weight or 0.0,
            "z_weight": self.number("moe_z_loss_coeff", f"{place}.z_weight", 0.0),
        }
        self.take("moe_token_dispatcher_type", "a word", lambda v: isinstance(v, str), "", "nothing: layout ep")

    def _dtype(self) -> str:
        """What products are computed in."""
        if not self.neox:
            half = {name: self.flag(name, "model.dtype") for name in ("bf16", "fp16")}
            return next((name for name, on in half.items() if on), "fp32")
        words = {"fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32"}
        dtype = str(self.word("precision", "model.dtype", words, "fp32"))
        for name in ("fp16", "bf16"):
            section = self.section(name)
            if section.flag("enabled", "model.dtype") or section.values.get(name) is True:
                dtype = name
            for key, value in section.values.items():
                section.row(key, value, "meaningless", "the loss scale is isograd's, and dynamic")
            section.values.clear()
        return dtype

    def _recompute(self) -> Any:
        field = "model.recompute"
        if self.neox:
            return self.flag("checkpoint_activations", field)
        full = self.word("recompute_granularity", field, {"full": True, "selective": "selective", "": False}, "")
        return full or ("selective" if self.flag("recompute_activations", field) else False)

    def _optimizer(self, batch: int) -> tuple[dict[str, Any], int]:
        """`optimizer`, and how many steps the run has."""
        steps = self.count("train_iters", "steps")
        samples = self.count("train_samples", "steps: samples / batch")
        steps = steps or (samples // batch if samples else None)
        if steps is None:
            self.row("train_iters", None, "open", "set steps")
        steps = steps or 1000
        made: dict[str, Any] = {"name": "adamw", "eps": 1e-8, "betas": [0.9, 0.999]}
        if self.neox:
            given = self.section("optimizer")
            given.word("type", "optimizer.name: adamw", ("Adam", "AdamW", "adam", "adamw"))
            params = given.section("params")
            made |= {"lr": params.number("lr", "optimizer.lr"), "eps": params.number("eps", "optimizer.eps", 1e-8)}
            pair: Callable[[Any], bool] = lambda v: isinstance(v, list) and len(v) == 2  # noqa: E731
            made["betas"] = params.take("betas", "two numbers", pair, made["betas"], "optimizer.betas")
            given.rest()
        else:
            self.word("optimizer", "optimizer.name", {"adam": "adamw"}, "adam")
            made |= {"lr": self.number("lr", "optimizer.lr"), "eps": self.number("adam_eps", "optimizer.eps", 1e-8)}
            made["betas"] = [self.number(f"adam_beta{n}", "optimizer.betas", made["betas"][n - 1]) for n in (1, 2)]
        if made.get("lr") is None:
            self.row("lr", None, "open", "set optimizer.lr")
            made["lr"] = 1e-4
        made["min_lr"] = self.number("min_lr", "optimizer.min_lr", 0.0)
        decay = 0.1 if self.neox else 0.01
        made["weight_decay"] = self.number("weight_decay", "optimizer.weight_decay", decay)
        made["clip"] = self.number("clip_grad", "optimizer.clip", 1.0) or None
        made |= self._schedule(steps, batch)
        for name in ("start_weight_decay", "end_weight_decay"):
            fits: Callable[[Any], bool] = lambda v: v == made["weight_decay"]  # noqa: E731
            self.take(name, "weight_decay, which is constant here", fits, None, "optimizer.weight_decay")
        return made, steps

    def _schedule(self, steps: int, batch: int) -> dict[str, Any]:
        kinds = {"linear": "linear", "cosine": "cosine", "constant": "constant", "WSD": "wsd"}
        found = {"schedule": self.word("lr_decay_style", "optimizer.schedule", kinds, "linear")}
        for name, per in (("lr_decay_iters", 1), ("lr_decay_samples", batch)):
            length = self.count(name, "optimizer.schedule: over all steps")
            if length and found["schedule"] != "constant" and abs(length // per - steps) > steps // 100:
                self.row(name, length, "refused", f"the rate falls over all {steps} steps here: make them equal")
        if found["schedule"] == "wsd":
            self.word("lr_wsd_decay_style", "optimizer.schedule", ("linear",))
            last = self.count("lr_wsd_decay_iters", "optimizer.decay")
            found |= {"decay": last / steps} if last else {}
        share = self.number("lr_warmup_fraction", "optimizer.warmup", 0.01 if self.neox else 0.0)
        warmup = self.number("lr_warmup_iters", "optimizer.warmup", 0.0)
        rows = self.number("lr_warmup_samples", "optimizer.warmup", 0.0)
        found["warmup"] = math.ceil(share * steps) if share else int(warmup or rows // batch)
        self.take("lr_warmup_init", "0, where a warmup begins here", lambda v: v == 0, 0, "optimizer.warmup")
        self.take("rampup_batch_size", "absent: a batch is constant here", lambda v: not v, None, "batch")
        return found


def arguments_of(text: str) -> dict[str, Any]:
    """{name: value} of all `--name value` of a script or a list of arguments, the last of equal ones.

    Variables that the script sets are put in, in words and in strings of arguments; nothing else of it is read, but for
    "program": a pretrain_*.py that is not GPT's."""
    found: dict[str, Any] = {}
    _collect(words := _words(text), {}, found)
    other = [word for word in words if re.search(r"\bpretrain_(?!gpt\.)\w+\.py$", word)]
    return found | ({"program": other[0]} if other else {})


def _words(text: str) -> list[str]:
    said = re.sub(COMMENT, lambda match: (match[1] or "").replace("\\\n", " "), text)
    reader = shlex.shlex(said, posix=True, punctuation_chars=";()&|")
    reader.whitespace_split, reader.commenters = True, ""
    try:
        return list(reader)
    except ValueError as error:
        raise IntegrationError(
            "IG863", "a script that cannot be read", seen=str(error), fix="close its quotes"
        ) from error


def _collect(words: list[str], variables: dict[str, str], found: dict[str, Any]) -> None:
    name = None
    for raw in words:
        word = _filled(raw, variables)
        assigned = re.match(r"([A-Za-z_]\w*)\+?=(.*)", word, re.DOTALL)
        if assigned:
            variables[assigned[1]] = assigned[2]
            word = assigned[2] if "--" in assigned[2] else ""
        if "--" in word and any(c.isspace() for c in word):  # a string of arguments
            _collect(_words(word), {key: text for key, text in variables.items() if text != word}, found)
            name = None
        elif word.startswith("--"):
            name, _, given = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _value(given) if given else True
            name = None if given else name
        elif name is None or not word or set(word) <= set(";()&|") or (word.startswith("$") and "@" in word):
            name = None
        elif found[name] is True:
            found[name] = _value(word)
            name = name if name in SEVERAL else None
        else:
            before = found[name]
            found[name] = [*(before if isinstance(before, list) else [before]), _value(word)]


def _filled(word: str, variables: dict[str, str]) -> str:
    """A word with the variables that are known; `${NAME:-usual}` is `usual`."""

    length = 0

    def put(match: re.Match[str]) -> str:
        nonlocal length
        name, usual = match[1] or match[3], match[2]
        value = variables.get(name, match[0] if usual is None else usual.strip("\"'"))
        length += len(value)
        if length > LONGEST:
            what, seen = "variables that grow in each other", f"more than {LONGEST:,} characters of {word[:80]!r}"
            raise IntegrationError("IG863", what, seen=seen, fix="write the values out")
        return value

    return re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", put, word)


def _value(text: str) -> Any:
    text = text.strip("'\"")
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text
