"""Hugging Face configs <-> ours. A family's config.json becomes a TransformerConfig, and back.

A field that would change what the model computes and that we do not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from isograd.errors import ConfigError, did_you_mean
from isograd.models.config import TransformerConfig
from isograd.nn.routing import ExpertOptions

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
SPARSE = ("mixtral", "qwen3_moe", "olmoe")  # families with experts


_NUMBERS = (int, float)
_MAPPING = (dict, type(None))
# The fields of a config.json that are computed with; TransformerConfig checks the others.
_KINDS: dict[str, tuple[type, ...]] = {
    "model_type": (str,), "hidden_act": (str,), "activation_function": (str,), "rope_parameters": _MAPPING,
    "rope_scaling": _MAPPING, "rope_theta": _NUMBERS, "rotary_emb_base": _NUMBERS, "rotary_pct": _NUMBERS,
    "resid_pdrop": _NUMBERS, "embd_pdrop": _NUMBERS, "partial_rotary_factor": _NUMBERS, "n_embd": (int,),
}  # fmt: skip


def _typed(c: Mapping[str, Any]) -> None:
    """Refuse a config.json whose fields are of other types than theirs."""
    inside = [part for part in (c.get("rope_parameters"), c.get("rope_scaling")) if isinstance(part, dict)]
    wrong = [
        f"{name} is {value!r:.60}"
        for fields in (c, *inside)
        for name, value in fields.items()
        if name in _KINDS and (not isinstance(value, _KINDS[name]) or isinstance(value, bool))
    ]
    if wrong:
        raise ConfigError(
            "IG602",
            "config.json has fields of the wrong type: " + "; ".join(wrong[:8]),
            expected="the types that transformers writes",
            fix="copy config.json again",
        )


def from_hf_config(config: Mapping[str, Any] | Any) -> TransformerConfig:
    """From a config.json's mapping or a transformers config object."""
    c: dict[str, Any] = dict(config) if isinstance(config, Mapping) else config.to_dict()
    _typed(c)
    kind = c.get("model_type", "")
    readers = {
        "gpt2": _from_gpt2,
        "gpt_neox": _from_neox,
        "llama": _from_llama,
        "mistral": _from_llama,
        "qwen3": _from_llama,
        **dict.fromkeys(SPARSE, _from_sparse),
    }
    if kind not in readers:
        raise ConfigError(
            "IG607",
            f"no family for model_type {kind!r}{did_you_mean(kind, readers)}",
            expected=", ".join(readers),
            fix="any nn.Module trains on data axes: give it to Engine as it is",
        )
    if c.get("quantization_config"):
        raise ConfigError(
            "IG611",
            f"this {kind} is quantised",
            seen=f"quantization_config {c['quantization_config']}",
            expected="weights in fp32, bf16 or fp16",
            fix="take the weights it was quantised from, or dequantise them with transformers",
        )
    return readers[kind](c)


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(
            "IG608", f"unknown activation {name!r}{did_you_mean(name, ACTIVATIONS)}", expected=", ".join(ACTIVATIONS)
        )
    return ACTIVATIONS[name]


def _rope(c: Mapping[str, Any]) -> float:
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind != "default":
        raise ConfigError(
            "IG609",
            f"rotary scaling of type {kind[:100]!r} is not built",
            seen=str(rope)[:500],
            expected="the default type",
        )
    return float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))


def _pad_token(c: Mapping[str, Any]) -> int | None:
    """Negative ones are counted from the end, as torch's padding_idx is."""
    token = c.get("pad_token_id")
    return int(token) % int(c["vocab_size"]) if isinstance(token, int) and token < 0 else token


def _from_llama(c: Mapping[str, Any]) -> TransformerConfig:
    window = c.get("sliding_window") if c.get("use_sliding_window", True) else None
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        kv_heads=c.get("num_key_value_heads"), head_dim=c.get("head_dim"), mlp=c["intermediate_size"],
        norm_eps=c["rms_norm_eps"], activation=_activation(c["hidden_act"]), rope_theta=_rope(c),
        max_positions=c["max_position_embeddings"], qkv_bias=c.get("attention_bias", False),
        out_bias=c.get("attention_bias", False), mlp_bias=c.get("mlp_bias", False), qk_norm=c["model_type"] == "qwen3",
        tied=c.get("tie_word_embeddings", False), sliding_window=window,
        attention_dropout=c.get("attention_dropout", 0.0), init_std=c.get("initializer_range", 0.02),
        pad_token=_pad_token(c),
    )  # fmt: skip


def _from_sparse(c: Mapping[str, Any]) -> TransformerConfig:
    """A family with experts: as Llama, but for them and the norms of queries and keys."""
    kind = c["model_type"]
    if c.get("clip_qkv") is not None:
        raise ConfigError("IG615", "clipped queries, keys and values are not built", seen=f"clip_qkv {c['clip_qkv']}")
    if c.get("router_jitter_noise"):
        seen = f"router_jitter_noise {c['router_jitter_noise']}"
        raise ConfigError("IG615", "noise on the router's input is not built", seen=seen, expected="0")
    dense = sorted(c.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ConfigError("IG615", "layers without experts must be the first ones", seen=f"mlp_only_layers {dense}")
    number = c.get("num_local_experts", c.get("num_experts"))
    experts = ExpertOptions(
        number=c["num_experts"] if number is None else number,
        per_token=c["num_experts_per_tok"],
        width=c["moe_intermediate_size"] if kind == "qwen3_moe" else c["intermediate_size"],
        renormalise=True if kind == "mixtral" else c.get("norm_topk_prob", False),
        dense_first=len(dense),
        every=c.get("decoder_sparse_step", 1),
        balance="none",  # transformers' loss is another one: docs/experts.md
        balance_weight=c.get("router_aux_loss_coef", 0.001),
    )
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    alike = {**c, "head_dim": head_dim, "model_type": "qwen3" if kind == "qwen3_moe" else "llama"}
    plain = _from_llama({"use_sliding_window": kind == "mixtral", **alike})
    norms = {"qk_norm": kind != "mixtral", "qk_norm_over": "width" if kind == "olmoe" else "head"}
    return replace(plain, experts=experts, **norms)


def _from_gpt2(c: Mapping[str, Any]) -> TransformerConfig:
    dropouts = {c.get("resid_pdrop", 0.0), c.get("embd_pdrop", 0.0)}
    if len(dropouts) > 1:
        raise ConfigError("IG610", "resid_pdrop and embd_pdrop must be equal here", seen=sorted(dropouts))
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["n_embd"], layers=c["n_layer"], heads=c["n_head"],
        mlp=c.get("n_inner") or 4 * c["n_embd"], norm="layer", norm_eps=c["layer_norm_epsilon"],
        activation=_activation(c["activation_function"]), gated=False, positions="learned",
        max_positions=c["n_positions"], qkv_bias=True, out_bias=True, mlp_bias=True,
        tied=c.get("tie_word_embeddings", True), dropout=dropouts.pop(), attention_dropout=c.get("attn_pdrop", 0.0),
        init_std=c.get("initializer_range", 0.02),
    )  # fmt: skip


def _from_neox(c: Mapping[str, Any]) -> TransformerConfig:
    rope = c.get("rope_parameters") or {}
    bias = c.get("attention_bias", True)
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        mlp=c["intermediate_size"], norm="layer", norm_eps=c["layer_norm_eps"], activation=_activation(c["hidden_act"]),
        gated=False, rope_theta=_rope({**c, "rope_theta": c.get("rotary_emb_base", 10000.0)}),
        rotary_fraction=float(rope.get("partial_rotary_factor", c.get("rotary_pct", 0.25))),
        max_positions=c["max_position_embeddings"], qkv_bias=bias, out_bias=bias, mlp_bias=True,
        parallel_residual=c.get("use_parallel_residual", True), tied=c.get("tie_word_embeddings", False),
        dropout=c.get("hidden_dropout", 0.0), attention_dropout=c.get("attention_dropout", 0.0),
        init_std=c.get("initializer_range", 0.02),
    )  # fmt: skip


def model_type_of(config: TransformerConfig) -> str:
    """The family that has these options."""
    if config.positions == "learned":
        return "gpt2"
    if config.norm == "layer":
        return "gpt_neox"
    if config.experts is not None:
        return _sparse_type(config, config.experts)
    if config.qk_norm:
        return "qwen3"
    return "mistral" if config.sliding_window is not None else "llama"


def _sparse_type(config: TransformerConfig, experts: ExpertOptions) -> str:
    kind = "mixtral" if not config.qk_norm else "olmoe" if config.qk_norm_over == "width" else "qwen3_moe"
    usual = ExpertOptions(number=experts.number, per_token=experts.per_token, width=experts.width, renormalise=False)
    free = {"number", "per_token", "width", "renormalise", "capacity", "capacity_scope"}
    free |= {"balance", "balance_weight", "z_weight"}  # of training
    free |= {"dense_first", "every"} if kind == "qwen3_moe" else set()
    other = [
        f.name for f in fields(experts) if f.name not in free and getattr(experts, f.name) != getattr(usual, f.name)
    ]
    other += ["renormalise"] if kind == "mixtral" and not experts.renormalise else []
    if other:
        raise ConfigError(
            "IG616",
            "no family of transformers that isograd knows has these experts",
            seen=", ".join(f"{name} {getattr(experts, name)!r}" for name in other),
            expected=f"what a {kind} can have",
        )
    return kind


def to_hf_config(config: TransformerConfig) -> dict[str, Any]:
    """The mapping that a config.json of the model's family holds."""
    kind = model_type_of(config)
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    common = {
        "model_type": kind,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
    }
    if kind == "gpt2":
        return {
            **common,
            "n_embd": config.hidden,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.mlp,
            "n_positions": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": names[config.activation],
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    shared = {
        **common,
        "pad_token_id": config.pad_token,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_positions,
        "hidden_act": names[config.activation],
        "attention_bias": config.qkv_bias,
        "attention_dropout": config.attention_dropout,
    }
    if kind == "gpt_neox":
        return {
            **shared,
            "layer_norm_eps": config.norm_eps,
            "hidden_dropout": config.dropout,
            "use_parallel_residual": config.parallel_residual,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.rotary_fraction,
            },
        }
    window = {} if config.sliding_window is None else {"sliding_window": config.sliding_window}
    return {
        **shared,
        **window,
        **_sparse_to_hf(config, kind),
        "num_key_value_heads": config.kv_heads or config.heads,
        "mlp_bias": config.mlp_bias,
        "head_dim": config.head_dim or config.hidden // config.heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def _sparse_to_hf(config: TransformerConfig, kind: str) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    found = {"num_experts_per_tok": experts.per_token, "router_aux_loss_coef": experts.balance_weight}
    if kind == "mixtral":
        return {**found, "num_local_experts": experts.number, "intermediate_size": experts.width}
    found |= {"num_experts": experts.number, "norm_topk_prob": experts.renormalise}
    if kind == "olmoe":
        return {**found, "intermediate_size": experts.width}
    dense = list(range(experts.dense_first))
    sparse = {"moe_intermediate_size": experts.width, "mlp_only_layers": dense, "decoder_sparse_step": experts.every}
    return {**found, **sparse, "use_sliding_window": config.sliding_window is not None}
