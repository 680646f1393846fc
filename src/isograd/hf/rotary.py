"""Rotary positions and windows in a Hugging Face config, and in ours: bases, scalings, which layers have a window.

What transformers would leave at a default of its class is left at the same default here; what it would ignore or take
for something else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isograd.errors import ConfigError, did_you_mean
from isograd.models.config import MOST_LAYERS, TransformerConfig, rotary_scaling

# (theirs, ours) of the keys that a scaling has in rope_parameters.
NAMES = (
    ("factor", "factor"), ("original_max_position_embeddings", "original_positions"),
    ("low_freq_factor", "low_freq"), ("high_freq_factor", "high_freq"), ("attention_factor", "attention_factor"),
    ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("mscale", "mscale"),
    ("mscale_all_dim", "mscale_all_dim"), ("truncate", "truncate"),
)  # fmt: skip
KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(theirs for theirs, _ in NAMES)}
BUILT = ("default", "linear", "llama3", "yarn")
LAYER_TYPES = {"sliding_attention": True, "full_attention": False}
# Families of which each layer says in layer_types whether it has the window; of the others with one, all have it.
BY_LAYER = ("qwen2", "qwen3")
WINDOWED = (*BY_LAYER, "mistral", "qwen3_moe")
SWITCHED = ("qwen2", "qwen3", "qwen3_moe")  # where use_sliding_window, False by default, turns it on


def rotary(c: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling of a config."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "dynamic":
        what = "rotary scaling of type 'dynamic' changes with the longest text seen so far, and so with the layout"
        raise _unbuilt(what, rope, ", ".join(BUILT))
    if kind not in BUILT:
        what = f"rotary scaling of type {kind[:100]!r} is not built{did_you_mean(kind[:100], BUILT)}"
        raise _unbuilt(what, rope, ", ".join(BUILT))
    unknown = [f"{key!r}{did_you_mean(str(key), KNOWN)}" for key in rope if key not in KNOWN]
    if unknown:
        raise _unbuilt(f"rope_parameters have keys that are not built: {', '.join(unknown)[:500]}", rope, "known keys")
    theta = _number(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    values = {ours: rope[theirs] for theirs, ours in NAMES if rope.get(theirs) is not None}
    if kind != "linear":
        outside = c.get("original_max_position_embeddings")
        values["original_positions"] = outside or values.get("original_positions") or c["max_position_embeddings"]
        if values.get("factor") is None:
            values["factor"] = _number(c["max_position_embeddings"]) / _number(values["original_positions"])
    else:
        values.pop("original_positions", None)
    return {"rope_theta": theta, "rope_scaling": rotary_scaling({"kind": kind, **values}, "rope_parameters")}


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value:
        raise ConfigError("IG602", "config.json has no number where one is needed", seen=repr(value)[:100])
    return float(value)


def _unbuilt(what: str, rope: Mapping[str, Any], expected: str) -> ConfigError:
    fix = "ig.hf.load runs transformers' own positions"
    return ConfigError("IG609", what, seen=str(dict(rope))[:500], expected=expected, fix=fix)


def rope_parameters(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """rope_parameters as this family of transformers has them."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        found["rope_type"] = scaling.kind
        for theirs, ours in NAMES:
            value = getattr(scaling, ours)
            if value is not None:
                found[theirs] = value
    if kind == "gpt_neox":
        found["partial_rotary_factor"] = config.rotary_fraction
    return found


def windows(c: Mapping[str, Any]) -> dict[str, Any]:
    """sliding_window and full_layers of a config."""
    kind, layers = c["model_type"], _layers(c)
    window = c.get("sliding_window") if kind in WINDOWED and c.get("use_sliding_window", kind not in SWITCHED) else None
    if window is None:
        return {"sliding_window": None, "full_layers": ()}
    types = c.get("layer_types") if kind in BY_LAYER else None
    if types is None:
        first = int(c.get("max_window_layers", 28)) if kind in BY_LAYER else 0  # by the rule of the family
        slides = [n >= first for n in range(layers)]
    else:
        unknown = [str(t)[:60] for t in types if t not in LAYER_TYPES] if isinstance(types, list) else [str(types)[:60]]
        if unknown or len(types) != layers:
            seen = f"unknown {unknown[:4]}" if unknown else f"{len(types)} of {layers} layers"
            raise ConfigError("IG609", "layer_types are not built", seen=seen, expected=", ".join(LAYER_TYPES))
        slides = [LAYER_TYPES[t] for t in types]
    full = tuple(n for n, slide in enumerate(slides) if not slide)
    return {
        "sliding_window": None if len(full) == layers else window,
        "full_layers": full if len(full) < layers else (),
    }


def layer_types(config: TransformerConfig) -> Sequence[str]:
    """layer_types as transformers has them."""
    return ["full_attention" if config.window_of(n) is None else "sliding_attention" for n in range(config.layers)]


def _layers(c: Mapping[str, Any]) -> int:
    layers = c["num_hidden_layers"]
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        raise ConfigError("IG601", f"layers {str(layers)[:60]} is beyond any model", expected=f"1 to {MOST_LAYERS}")
    return layers
