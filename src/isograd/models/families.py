"""Hugging Face names and configs <-> ours: GPT-2, GPT-NeoX, Llama, Mistral, Qwen 3, SmolLM (a tied Llama).

A family is a list of rules (ours, theirs, how their tensor becomes ours). Reading: each rank takes only its box of each
tensor, whatever the layout. Writing: full tensors on every rank, in the names `transformers` expects.
Only safetensors files are read; a pickled .bin can run code and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.contract import assemble, contracts
from isograd.errors import ConfigError, ModelError, did_you_mean
from isograd.mesh import Mesh
from isograd.models.config import TransformerConfig
from isograd.models.transformer import Transformer
from isograd.stored import Box, Stored

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Buffers that older checkpoints hold among their weights.
NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """Our parameter is a view (transposed, strided) of one of their tensors; reading and writing go through it."""

    ours: str
    theirs: str
    view: View = lambda t: t
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda s: s  # of their tensor, from ours


def _third(n: int) -> View:
    return lambda t: t.chunk(3, 0)[n]


def _third_of_transpose(n: int) -> View:
    return lambda t: t.t().chunk(3, 0)[n]


def _third_of_heads(n: int, heads: int) -> View:
    return lambda t: t.view(heads, 3, -1, *t.shape[1:])[:, n]


def rules(config: TransformerConfig, model_type: str) -> list[Rule]:
    """How each parameter of ours is read from the tensors of a Hugging Face model of this type."""
    return list({"gpt2": _gpt2, "gpt_neox": _neox}.get(model_type, _llama)(config))


def _llama(config: TransformerConfig) -> Iterator[Rule]:
    yield Rule("embed.weight", "model.embed_tokens.weight")
    yield Rule("norm.weight", "model.norm.weight")
    if not config.tied:
        yield Rule("head.weight", "lm_head.weight")
    for i in range(config.layers):
        us, them = f"blocks.{i}.", f"model.layers.{i}."
        yield Rule(us + "norm1.weight", them + "input_layernorm.weight")
        yield Rule(us + "norm2.weight", them + "post_attention_layernorm.weight")
        for ours, theirs, bias in (
            ("q", "q_proj", config.qkv_bias),
            ("k", "k_proj", config.qkv_bias),
            ("v", "v_proj", config.qkv_bias),
            ("out", "o_proj", config.out_bias),
        ):
            for leaf in ("weight", "bias") if bias else ("weight",):
                yield Rule(f"{us}attention.{ours}.{leaf}", f"{them}self_attn.{theirs}.{leaf}")
        if config.qk_norm:
            yield Rule(us + "attention.q_norm.weight", them + "self_attn.q_norm.weight")
            yield Rule(us + "attention.k_norm.weight", them + "self_attn.k_norm.weight")
        for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            for leaf in ("weight", "bias") if config.mlp_bias else ("weight",):
                yield Rule(f"{us}mlp.{ours}.{leaf}", f"{them}mlp.{theirs}.{leaf}")


def _gpt2(config: TransformerConfig) -> Iterator[Rule]:
    """Their linear weights are [inputs, outputs], and q, k, v are one tensor."""
    yield Rule("embed.weight", "transformer.wte.weight")
    yield Rule("positions.weight", "transformer.wpe.weight")
    if not config.tied:
        yield Rule("head.weight", "lm_head.weight")
    for leaf in ("weight", "bias"):
        yield Rule(f"norm.{leaf}", f"transformer.ln_f.{leaf}")
    for i in range(config.layers):
        us, them = f"blocks.{i}.", f"transformer.h.{i}."
        for leaf in ("weight", "bias"):
            yield Rule(f"{us}norm1.{leaf}", f"{them}ln_1.{leaf}")
            yield Rule(f"{us}norm2.{leaf}", f"{them}ln_2.{leaf}")
        for n, name in enumerate("qkv"):
            yield Rule(
                f"{us}attention.{name}.weight",
                f"{them}attn.c_attn.weight",
                _third_of_transpose(n),
                lambda s: (s[1], 3 * s[0]),
            )
            yield Rule(f"{us}attention.{name}.bias", f"{them}attn.c_attn.bias", _third(n), lambda s: (3 * s[0],))
        for ours, theirs in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            yield Rule(f"{us}{ours}.weight", f"{them}{theirs}.weight", lambda t: t.t(), lambda s: s[::-1])
            yield Rule(f"{us}{ours}.bias", f"{them}{theirs}.bias")


def _neox(config: TransformerConfig) -> Iterator[Rule]:
    """Their q, k, v are one tensor in which each head's three parts stand together: [heads, 3, d, hidden]."""
    heads = config.heads
    yield Rule("embed.weight", "gpt_neox.embed_in.weight")
    if not config.tied:
        yield Rule("head.weight", "lm_head.weight")
    for leaf in ("weight", "bias"):
        yield Rule(f"norm.{leaf}", f"gpt_neox.final_layer_norm.{leaf}")
    for i in range(config.layers):
        us, them = f"blocks.{i}.", f"gpt_neox.layers.{i}."
        for leaf in ("weight", "bias"):
            yield Rule(f"{us}norm1.{leaf}", f"{them}input_layernorm.{leaf}")
            yield Rule(f"{us}norm2.{leaf}", f"{them}post_attention_layernorm.{leaf}")
            if leaf == "weight" or config.qkv_bias:
                for n, name in enumerate("qkv"):
                    yield Rule(
                        f"{us}attention.{name}.{leaf}",
                        f"{them}attention.query_key_value.{leaf}",
                        _third_of_heads(n, heads),
                        lambda s: (3 * s[0], *s[1:]),
                    )
            if leaf == "weight" or config.out_bias:
                yield Rule(f"{us}attention.out.{leaf}", f"{them}attention.dense.{leaf}")
            yield Rule(f"{us}mlp.up.{leaf}", f"{them}mlp.dense_h_to_4h.{leaf}")
            yield Rule(f"{us}mlp.down.{leaf}", f"{them}mlp.dense_4h_to_h.{leaf}")


# -- configs ---------------------------------------------------------------------------------------------------------


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
    )  # fmt: skip


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
    if config.qk_norm:
        return "qwen3"
    return "mistral" if config.sliding_window is not None else "llama"


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
        "num_key_value_heads": config.kv_heads or config.heads,
        "mlp_bias": config.mlp_bias,
        "head_dim": config.head_dim or config.hidden // config.heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


# -- weights ---------------------------------------------------------------------------------------------------------


class _Given:
    """A state dict, looked at as stored tensors are."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def look(self, name: str, take: View) -> Tensor:
        return take(self.tensors[name]).clone()


class HuggingFace:
    """A Hugging Face folder, or a state dict, as our parameters: Engine(..., weights=HuggingFace(folder, config)).

    Any part of any parameter is read by itself, so no rank holds a whole tensor, on whatever layout or ZeRO stage.
    """

    def __init__(self, source: str | Path | Mapping[str, Tensor], config: TransformerConfig) -> None:
        """Raises at once, with every point, when these are not the weights of this config."""
        self._source = _Given(source) if isinstance(source, Mapping) else Stored(source)
        stored = self._source.shapes
        self._places = _prefixed(list(stored), config)
        self._rules = {rule.ours: rule for rule in rules(config, model_type_of(config))}
        one = Mesh.unbound("1")
        self._shapes = {r.name: r.contract.shape for r in contracts(Transformer(config, one, device="meta"), one)}
        wrong = []
        for rule in {rule.theirs: rule for rule in self._rules.values()}.values():
            expected = rule.shape(self._shapes[rule.ours])
            if rule.theirs not in self._places:
                wrong.append(f"{rule.theirs} is missing")
            elif (found := stored[self._places[rule.theirs]]) != expected:
                wrong.append(f"{rule.theirs} is {found}, not {expected}")
        used = {rule.theirs for rule in self._rules.values()} | ({"lm_head.weight"} if config.tied else set())
        wrong += [f"{name} is not used" for name in self._places if name not in used and not name.endswith(NOT_WEIGHTS)]
        if wrong:
            raise ModelError(
                "IG420",
                f"these weights are not this model's ({len(wrong)} points)",
                seen="; ".join(wrong[:20]),
                expected=f"the tensors of a {model_type_of(config)} with this config",
            )

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the folder's weights hold this parameter of ours; another shape is an error."""
        if name in self._shapes and self._shapes[name] != shape:
            raise ModelError(
                "IG423",
                f"the weights were opened for another model: {name!r} differs",
                seen=f"{shape} in the model",
                expected=f"{self._shapes[name]}, as the config says that HuggingFace(...) was given",
                fix="give both the same config",
            )
        return name in self._rules

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """A copy of the box of one of our parameters."""
        rule = self._rules[name]
        return self._source.look(self._places[rule.theirs], partial(_box_of, rule, shape, box))


def _box_of(rule: Rule, shape: tuple[int, ...], box: Box, theirs: Tensor) -> Tensor:
    """Of their tensor. Where their rows are our rows grouped by head, ours are picked one by one."""
    view = rule.view(theirs)
    parts = tuple(slice(start, stop) for start, stop in box)
    if view.shape == shape:
        return view[parts]
    rows = torch.unravel_index(torch.arange(*box[0]), view.shape[: view.dim() - len(shape) + 1])
    return view[rows][(slice(None), *parts[1:])]


@torch.no_grad()
def load_hf(model: Transformer, source: str | Path | Mapping[str, Tensor]) -> None:
    """Fill the model from a directory of safetensors or a state dict. Every rank takes its box of each tensor."""
    weights = HuggingFace(source, model.config)
    for record in contracts(model, model.mesh):
        part = weights.read(record.name, record.contract.shape, record.contract.local(model.mesh))
        record.parameter.copy_(part)


def _prefixed(names: list[str], config: TransformerConfig) -> dict[str, str]:
    """{name as transformers has it now: name in the source}. Published NeoX weights call the head embed_out, and
    checkpoints of a bare body (GPT-2's own, for one) leave out the first part of every name."""
    prefix = {"gpt2": "transformer.", "gpt_neox": "gpt_neox."}.get(model_type_of(config), "model.")
    now = {name.replace("embed_out.", "lm_head."): name for name in names}
    if any(name.startswith(prefix) for name in now):
        return now
    return {name if name.startswith("lm_head") else prefix + name: place for name, place in now.items()}


@torch.no_grad()
def to_hf(model: Transformer, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Full weights (or other tensors by our names, such as gradients) in Hugging Face names. All ranks take part."""
    if tensors is None:
        table = contracts(model, model.mesh)
        tensors = {r.name: assemble(r.parameter.detach(), r.contract, model.mesh) for r in table}
    done: dict[str, Tensor] = {}
    for rule in rules(model.config, model_type_of(model.config)):
        part = tensors[rule.ours]
        if rule.theirs not in done:
            done[rule.theirs] = part.new_zeros(rule.shape(tuple(part.shape)))
        place = rule.view(done[rule.theirs])
        place.copy_(part.reshape(place.shape))
    return done
