"""Hugging Face configs <-> ours. A family's config.json becomes a TransformerConfig, and back.

A field that would change what the model computes and that we do not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from isograd.errors import ConfigError, did_you_mean
from isograd.hf.rotary import BY_LAYER, SWITCHED, layer_types, rope_parameters, rotary, windows
from isograd.io import yaml_reader
from isograd.io.no_follow import not_there
from isograd.io.untrusted import CONFIG, FileError, parse_json, read_text
from isograd.models.config import PRESETS, TransformerConfig, preset
from isograd.nn.routing import ExpertOptions

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
# Options that a config.json of the family does not keep, as they do not change what the trained model computes.
NOT_KEPT = ("experts", "dropout", "pad_token", "score")

_NUMBERS = (int, float)
_MAPPING = (dict, type(None))
# The fields of a config.json that are computed with; TransformerConfig checks the others.
_KINDS: dict[str, tuple[type, ...]] = {
    "model_type": (str,), "hidden_act": (str,), "activation_function": (str,), "rope_parameters": _MAPPING,
    "rope_scaling": _MAPPING, "rope_theta": _NUMBERS, "rotary_emb_base": _NUMBERS, "rotary_pct": _NUMBERS,
    "resid_pdrop": _NUMBERS, "embd_pdrop": _NUMBERS, "partial_rotary_factor": _NUMBERS, "n_embd": (int,),
    "max_window_layers": (int,), "max_position_embeddings": (int,),
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
        "qwen3_moe": _from_qwen3_moe,
    }
    if kind not in readers:
        raise ConfigError(
            "IG607",
            f"no family for model_type {kind!r}{did_you_mean(kind, readers)}",
            expected=", ".join(readers),
            fix="isograd train --model.code transformers; in a loop of your own, ig.hf.load",
        )
    if c.get("quantization_config"):
        raise ConfigError("IG611", seen=f"quantization_config {c['quantization_config']}", kind=kind)
    return readers[kind](c)


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(
            "IG608", f"unknown activation {name!r}{did_you_mean(name, ACTIVATIONS)}", expected=", ".join(ACTIVATIONS)
        )
    return ACTIVATIONS[name]


def _from_llama(c: Mapping[str, Any]) -> TransformerConfig:
    bias, pad_token = c.get("attention_bias", False), c.get("pad_token_id")
    if isinstance(pad_token, int) and pad_token < 0:  # counted from the end, as torch's padding_idx is
        pad_token %= int(c["vocab_size"])
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        kv_heads=c.get("num_key_value_heads"), head_dim=c.get("head_dim"), mlp=c["intermediate_size"],
        norm_eps=c["rms_norm_eps"], activation=_activation(c["hidden_act"]),
        max_positions=c["max_position_embeddings"], qkv_bias=bias or c["model_type"] == "qwen2",
        out_bias=bias and c["model_type"] != "qwen2", mlp_bias=c.get("mlp_bias", False),
        tied=c.get("tie_word_embeddings", False), attention_dropout=c.get("attention_dropout", 0.0),
        init_std=c.get("initializer_range", 0.02), pad_token=pad_token, **windows(c), **rotary(c),
        qk_norm=c["model_type"] == "qwen3",
    )  # fmt: skip


def _from_qwen3_moe(c: Mapping[str, Any]) -> TransformerConfig:
    """As Qwen 3, but for its experts."""
    dense = sorted(c.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ConfigError("IG615", "layers without experts must be the first ones", seen=f"mlp_only_layers {dense}")
    number = c.get("num_local_experts")  # its name in memory
    experts = ExpertOptions(
        number=c["num_experts"] if number is None else number,
        per_token=c["num_experts_per_tok"],
        width=c["moe_intermediate_size"],
        renormalise=c.get("norm_topk_prob", False),
        dense_first=len(dense),
        every=c.get("decoder_sparse_step", 1),
        balance="none",  # transformers' loss is another one: docs/experts.md
        balance_weight=c.get("router_aux_loss_coef", 0.001),
    )
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    plain = replace(_from_llama({**c, "head_dim": head_dim, "model_type": "llama"}), **windows(c))
    return replace(plain, experts=experts, qk_norm=True)


def _from_gpt2(c: Mapping[str, Any]) -> TransformerConfig:
    dropouts = {c.get("resid_pdrop", 0.0), c.get("embd_pdrop", 0.0)}
    if len(dropouts) > 1:
        raise ConfigError("IG610", "resid_pdrop and embd_pdrop must be equal here", seen=sorted(dropouts))
    return TransformerConfig(
        vocab=c["vocab_size"], hidden=c["n_embd"], layers=c["n_layer"], heads=c["n_head"],
        mlp=c.get("n_inner") or 4 * c["n_embd"], norm="layer", norm_eps=c["layer_norm_epsilon"],
        activation=_activation(c["activation_function"]), gated=False, positions="learned",
        max_positions=c["n_positions"], qkv_bias=True, out_bias=True, mlp_bias=True,
        tied=c.get("tie_word_embeddings", True), dropout=float(dropouts.pop()),
        attention_dropout=c.get("attn_pdrop", 0.0), init_std=c.get("initializer_range", 0.02),
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
        return "qwen3_moe"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "mistral" if config.sliding_window is not None else "llama"


def _refuse_other_experts(experts: ExpertOptions) -> None:
    usual = ExpertOptions(number=experts.number, per_token=experts.per_token, width=experts.width)
    free = {"number", "per_token", "width", "renormalise", "dense_first", "every", "capacity", "capacity_scope"}
    free |= {"balance", "balance_weight", "z_weight"}  # of training
    other = [f.name for f in fields(experts) if f.name not in free]
    other = [name for name in other if getattr(experts, name) != getattr(usual, name)]
    if other:
        raise ConfigError(
            "IG616",
            "no family of transformers that isograd knows has these experts",
            seen=", ".join(f"{name} {getattr(experts, name)!r}" for name in other),
            expected="what a qwen3_moe can have",
        )


def to_hf_config(config: TransformerConfig) -> dict[str, Any]:
    """The mapping that a config.json of the model's family holds; read again, it gives the same config."""
    if config.experts is not None:
        _refuse_other_experts(config.experts)
    values = _written(config, model_type_of(config))
    mine, again = (
        {f.name: getattr(c, f.name) for f in fields(c)}
        | {"kv_heads": c.kv_heads or c.heads, "head_dim": c.features_per_head}  # as they follow from others
        for c in (config, from_hf_config(values))
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
    usual = config.head_dim is None and kind == "qwen2"  # which has it only where it is not hidden / heads
    return {
        **shared,
        **_windows_to_hf(config, kind),
        **_experts_to_hf(config),
        "num_key_value_heads": config.kv_heads or config.heads,
        "mlp_bias": config.mlp_bias,
        **({} if usual else {"head_dim": config.features_per_head}),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(config, kind),
    }


def _windows_to_hf(config: TransformerConfig, kind: str) -> dict[str, Any]:
    window = config.sliding_window
    if kind == "llama":
        return {}
    switch = {"use_sliding_window": window is not None} if kind in SWITCHED else {}
    types = {"layer_types": layer_types(config)} if kind in BY_LAYER else {}
    return {"sliding_window": window, **switch, **types}


def _experts_to_hf(config: TransformerConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.renormalise,
        "router_aux_loss_coef": experts.balance_weight,
        "moe_intermediate_size": experts.width,
        "mlp_only_layers": list(range(experts.dense_first)),
        "decoder_sparse_step": experts.every,
    }


def load_config(source: str) -> TransformerConfig:
    """Read a config: a preset's name, a YAML or JSON file of fields, a Hugging Face config.json or its directory."""
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        if path.suffix or "/" in source:
            seen = not_there(path)
            expected = f"a model's folder, a file, or a preset: {', '.join(PRESETS)}"
            raise ConfigError("IG604", seen=seen, expected=expected, source=source)
        return preset(source)
    values = _read(path, source)
    if not isinstance(values, dict):
        raise ConfigError("IG606", f"{source} does not hold a mapping", seen=type(values).__name__)
    if "model_type" in values:
        try:
            return from_hf_config({**values, "model_type": str(values["model_type"])})
        except KeyError as error:
            raise ConfigError(
                "IG602", f"{source}: {error} is missing", seen=f"keys {sorted(map(str, values))}"
            ) from error
    return TransformerConfig.from_dict(values, source)


def _read(path: Path, source: str) -> Any:
    """JSON as JSON: to a YAML 1.1 reader the 1e-06 that every Hugging Face config has is a word, not a number."""
    try:
        text = read_text(path, CONFIG, follow=True)
    except FileError as error:
        what = f"{source} is no config"
        if error.code == "IG661":
            raise ConfigError("IG605", what, seen=error.brief, expected="YAML or JSON") from error
        raise ConfigError("IG606", what, seen=error.brief, expected="YAML or JSON") from error
    opens = text.lstrip().startswith("{")  # as JSON does, and perhaps a mapping of YAML
    try:
        return parse_json(text, source, nan=True) if opens else yaml_reader.parse(text)
    except FileError as no_json:
        try:
            return yaml_reader.parse(text)
        except yaml_reader.ERRORS:
            seen = no_json.brief
            raise ConfigError("IG606", f"{source} is neither YAML nor JSON", seen=seen) from no_json
    except yaml_reader.ERRORS as error:
        seen = yaml_reader.read_error(source, error)
        raise ConfigError("IG606", f"{source} is neither YAML nor JSON", seen=seen) from error
