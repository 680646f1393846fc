"""Hugging Face configs <-> ours. A family's config.json becomes a TransformerConfig, and back.

A field that would change what the model computes and that we do not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from isograd.errors import ConfigError, did_you_mean
from isograd.models.config import TransformerConfig
from isograd.models.hf_rotary import (
    BY_LAYER,
    SWITCHED,
    layer_types,
    rope_parameters,
    rotary,
    windows,
    without_positions,
)
from isograd.nn.routing import ExpertOptions

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
SPARSE = ("mixtral", "qwen3_moe", "olmoe")  # families with experts
GEMMA = ("gemma2", "gemma3_text")
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", *GEMMA, "phi3", "olmo2", "smollm3")
# What transformers takes where a config.json does not say it, and that is not the same for all families.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "tie_word_embeddings": True, "pad_token_id": 0, "head_dim": 256, "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {
        "tie_word_embeddings": True, "pad_token_id": 0, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "rope_theta": 1e6, "hidden_activation": "gelu_pytorch_tanh",
    },
    "phi3": {"pad_token_id": 32000, "original_max_position_embeddings": 4096},
    "olmo2": {"pad_token_id": 1},
    "smollm3": {"tie_word_embeddings": True, "pad_token_id": 128004, "rope_theta": 2e6},
}  # fmt: skip
# Options that a config.json of the family does not keep, as they do not change what the trained model computes.
NOT_KEPT = ("experts", "dropout", "pad_token")

_NUMBERS = (int, float)
_MAPPING = (dict, type(None))
# The fields of a config.json that are computed with; TransformerConfig checks the others.
_KINDS: dict[str, tuple[type, ...]] = {
    "model_type": (str,), "hidden_act": (str,), "activation_function": (str,), "rope_parameters": _MAPPING,
    "rope_scaling": _MAPPING, "rope_theta": _NUMBERS, "rotary_emb_base": _NUMBERS, "rotary_pct": _NUMBERS,
    "resid_pdrop": _NUMBERS, "embd_pdrop": _NUMBERS, "partial_rotary_factor": _NUMBERS, "n_embd": (int,),
    "hidden_activation": (str, type(None)), "max_window_layers": (int,), "sliding_window_pattern": (int,),
    "no_rope_layer_interval": (int,), "max_position_embeddings": (int,), "rope_local_base_freq": _NUMBERS,
    "original_max_position_embeddings": (int, type(None)),
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
        **dict.fromkeys(LLAMAS, _from_llama),
        **dict.fromkeys(SPARSE, _from_sparse),
    }
    if kind not in readers:
        raise ConfigError(
            "IG607",
            f"no family for model_type {kind!r}{did_you_mean(kind, readers)}",
            expected=", ".join(readers),
            fix="isograd train --model.code transformers; in a loop of your own, ig.hugging.load",
        )
    if c.get("quantization_config"):
        raise ConfigError(
            "IG611",
            f"this {kind} is quantised",
            seen=f"quantization_config {c['quantization_config']}",
            expected="weights in fp32, bf16 or fp16",
            fix="take the weights it was quantised from, or dequantise them with transformers",
        )
    return readers[kind]({**DEFAULTS.get(kind, {}), **c})


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(
            "IG608", f"unknown activation {name!r}{did_you_mean(name, ACTIVATIONS)}", expected=", ".join(ACTIVATIONS)
        )
    return ACTIVATIONS[name]


def _pad_token(c: Mapping[str, Any]) -> int | None:
    """Negative ones are counted from the end, as torch's padding_idx is."""
    token = c.get("pad_token_id")
    return int(token) % int(c["vocab_size"]) if isinstance(token, int) and token < 0 else token


def _from_llama(c: Mapping[str, Any]) -> TransformerConfig:
    if c.get("use_bidirectional_attention"):
        raise ConfigError("IG615", "attention to later tokens is not built", seen="use_bidirectional_attention: true")
    plain = TransformerConfig(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        kv_heads=c.get("num_key_value_heads"), head_dim=c.get("head_dim"), mlp=c["intermediate_size"],
        norm_eps=c["rms_norm_eps"], activation=_activation(c.get("hidden_activation") or c["hidden_act"]),
        max_positions=c["max_position_embeddings"], qkv_bias=c.get("attention_bias", False),
        out_bias=c.get("attention_bias", False), mlp_bias=c.get("mlp_bias", False),
        tied=c.get("tie_word_embeddings", False), attention_dropout=c.get("attention_dropout", 0.0),
        init_std=c.get("initializer_range", 0.02), pad_token=_pad_token(c), nope_layers=without_positions(c),
        **windows(c),
    )  # fmt: skip
    bases = rotary(c)
    if plain.sliding_window is None:
        bases.pop("rope_theta_local", None)
    return replace(plain, **_of_family(c), **bases)


def _of_family(c: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a family has beside those of Llama."""
    kind = c["model_type"]
    if kind == "qwen2":
        return {"qkv_bias": True, "out_bias": False}
    if kind == "qwen3":
        return {"qk_norm": True}
    if kind == "olmo2":
        return {"norms": "post", "qk_norm": True, "qk_norm_over": "width"}
    if kind == "phi3":
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        fraction = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
        return {"fused": True, "rotary_fraction": float(fraction), "dropout": _one_dropout(c)}
    if kind in GEMMA:
        capped = c.get("attn_logit_softcapping")
        if capped is not None and kind == "gemma3_text":
            seen = f"attn_logit_softcapping {capped}, which transformers ignores"
            raise ConfigError("IG615", "Gemma 3 has no cap on attention scores", seen=seen, expected="null")
        return {
            "norms": "both", "norm_plus_one": True, "embed_scale": c["hidden_size"] ** 0.5,
            "query_scalar": c["query_pre_attn_scalar"], "attention_softcap": capped,
            "logit_softcap": c.get("final_logit_softcapping"), "qk_norm": kind == "gemma3_text",
        }  # fmt: skip
    return {}


def _one_dropout(c: Mapping[str, Any]) -> float:
    dropouts = {c.get("resid_pdrop", 0.0), c.get("embd_pdrop", 0.0)}
    if len(dropouts) > 1:
        raise ConfigError("IG610", "resid_pdrop and embd_pdrop must be equal here", seen=sorted(dropouts))
    return float(dropouts.pop())


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
    plain = replace(_from_llama({**c, "head_dim": head_dim, "model_type": "llama"}), **windows(c))
    norms = {"qk_norm": kind != "mixtral", "qk_norm_over": "width" if kind == "olmoe" else "head"}
    return replace(plain, experts=experts, **norms)


def _from_gpt2(c: Mapping[str, Any]) -> TransformerConfig:
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["n_embd"], layers=c["n_layer"], heads=c["n_head"],
        mlp=c.get("n_inner") or 4 * c["n_embd"], norm="layer", norm_eps=c["layer_norm_epsilon"],
        activation=_activation(c["activation_function"]), gated=False, positions="learned",
        max_positions=c["n_positions"], qkv_bias=True, out_bias=True, mlp_bias=True,
        tied=c.get("tie_word_embeddings", True), dropout=_one_dropout(c), attention_dropout=c.get("attn_pdrop", 0.0),
        init_std=c.get("initializer_range", 0.02),
    )  # fmt: skip


def _from_neox(c: Mapping[str, Any]) -> TransformerConfig:
    rope = c.get("rope_parameters") or {}
    bias = c.get("attention_bias", True)
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        mlp=c["intermediate_size"], norm="layer", norm_eps=c["layer_norm_eps"], activation=_activation(c["hidden_act"]),
        gated=False, **rotary({**c, "rope_theta": c.get("rotary_emb_base", 10000.0)}),
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
    if config.norms != "pre":
        return "olmo2" if config.norms == "post" else "gemma3_text" if config.qk_norm else "gemma2"
    if config.fused or config.nope_layers:
        return "phi3" if config.fused else "smollm3"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
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
    """The mapping that a config.json of the model's family holds; read again, it gives the same config."""
    values = _written(config, model_type_of(config))
    mine, again = (
        {f.name: getattr(c, f.name) for f in fields(c)} for c in (_whole(config), _whole(from_hf_config(values)))
    )
    idle = ["rope_theta", "rotary_fraction"] if config.positions == "learned" else []
    if config.experts is not None and all(config.experts.in_layer(n) for n in range(config.layers)):
        idle.append("mlp")
    lost = [name for name in mine if name not in (*NOT_KEPT, *idle) and mine[name] != again[name]]
    if lost:
        raise ConfigError(
            "IG616",
            "no family of transformers that isograd knows has these options",
            seen=", ".join(f"{name} {mine[name]!r}" for name in lost),
            expected=", ".join(f"{name} {again[name]!r}" for name in lost)
            + f", as the {values['model_type']} nearest to it",
            fix="checkpoints keep any model of isograd; only exports need a family",
        )
    return values


def _whole(config: TransformerConfig) -> TransformerConfig:
    """The same with numbers in the place of those that follow from others."""
    head_dim = config.head_dim or config.hidden // config.heads
    return replace(config, kv_heads=config.kv_heads or config.heads, head_dim=head_dim)


def _written(config: TransformerConfig, kind: str) -> dict[str, Any]:
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
            "rope_parameters": rope_parameters(config, kind),
        }
    return {
        **shared,
        **_windows_to_hf(config, kind),
        **_sparse_to_hf(config, kind),
        **_family_to_hf(config, kind),
        "num_key_value_heads": config.kv_heads or config.heads,
        "mlp_bias": config.mlp_bias,
        **_head_dim(config, kind),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(config, kind),
    }


def _head_dim(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """Some families have it only where it is not hidden / heads."""
    if config.head_dim is None and kind in ("qwen2", "phi3", "olmo2", "smollm3"):
        return {}
    return {"head_dim": config.head_dim or config.hidden // config.heads}


def _windows_to_hf(config: TransformerConfig, kind: str) -> dict[str, Any]:
    window = config.sliding_window
    if kind == "llama" or kind in ("olmo2", "olmoe"):
        return {}
    switch = {"use_sliding_window": window is not None} if kind in SWITCHED else {}
    types = {"layer_types": layer_types(config)} if kind in BY_LAYER else {}
    return {"sliding_window": window, **switch, **types}


def _family_to_hf(config: TransformerConfig, kind: str) -> dict[str, Any]:
    if kind in GEMMA:
        names = {"gelu_tanh": "gelu_pytorch_tanh"}
        return {
            "hidden_activation": names.get(config.activation, config.activation),
            "query_pre_attn_scalar": config.query_scalar or config.head_dim or config.hidden // config.heads,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    if kind == "smollm3":
        return {"no_rope_layers": [int(n not in config.nope_layers) for n in range(config.layers)]}
    if kind != "phi3":
        return {}
    scaling = config.rope_scaling
    original = scaling.original_positions if scaling is not None else config.max_positions
    return {
        "original_max_position_embeddings": original,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
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
    return {**found, **sparse}
