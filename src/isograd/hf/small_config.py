"""A small copy of a config: the same architecture and options, in a size that trains a step in a second.

Kept: windows, scaled rotary positions, caps, biases, ties, norms, activations, one layer of each kind, and whether key
and value heads are fewer than the query heads or than the tp ranks. Changed: widths, depth, numbers of heads and of
experts, the vocabulary.
"""

from __future__ import annotations

from typing import Any

from isograd.hf.sub_configs import is_text, parts_of, text_of

HEAD, VOCAB, WINDOW, LONG = 16, 67, 5, 8
LAYERS = 4
# Sizes by field: a config has some of them. A field that is 0 or None stays so.
SIZES = {
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "intermediate_size_mlp": 40, "moe_shared_expert_intermediate_size": 24, "expert_ffn_hidden_size": 24,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "rotary_dim": 8, "n_shared_experts": 1, "num_shared_experts": 1, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
    "index_kpool": 2, "moe_hidden_size": 32, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "attention_chunk_size": 4,
    "sliding_window": WINDOW,
}  # fmt: skip
INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_topk_experts")
GROUPS = ("n_group", "num_expert_group", "topk_group")  # of experts
DENSE = ("first_k_dense_replace", "num_dense_layers")  # how many layers at the start have no experts
NUMBERED = ("mlp_only_layers",)  # numbers of layers
TOWER = {
    "num_hidden_layers": 1, "depth": 1, "encoder_layers": 1, "hidden_size": 64, "embed_dim": 64, "d_model": 64,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "encoder_attention_heads": 2, "head_dim": 32,
    "intermediate_size": 24, "encoder_ffn_dim": 24, "projection_intermediate_size": 24, "num_local_experts": 2,
    "num_blocks": 1, "projector_hidden_size": 24, "projector_input_dim": 24, "projector_output_dim": 24,
    "encoder_hidden_size": 64,
}  # fmt: skip
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id")
NEVER = ("architectures", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "model_type", "auto_map",
         "quantization_config")  # fmt: skip


def small(config: Any, tp: int, stages: int = 1, ep: int = 1) -> Any:
    """A config of the same class, whose model can be cut over tp, ep and pp exactly if the given one can."""
    parts = parts_of(config)
    if any(map(is_text, parts.values())):
        return _of_parts(config, tp, stages, ep)
    values = {name: value for name, value in config.to_dict().items() if name not in NEVER}
    given = dict(values)
    for name, size in SIZES.items():
        if isinstance(values.get(name), int) and values[name] > 0:
            values[name] = min(values[name], size)
    values |= _heads(values, config, tp)
    values |= {name: 42 if tp == 2 else 14 * tp for name in INNER if isinstance(values.get(name), int)}
    number = next((values[name] for name in EXPERTS if isinstance(values.get(name), int) and values[name] > 0), 0)
    ranks = max(tp, ep)
    few = 2 * ranks if number % ranks == 0 else 2 * ranks + 1
    values |= {name: min(few, number) for name in EXPERTS if isinstance(values.get(name), int) and values[name] > 0}
    values |= {name: 2 for name in CHOSEN if isinstance(values.get(name), int) and values[name] > 2}
    if number:
        values |= {name: 1 for name in GROUPS if isinstance(values.get(name), int)}
    values["vocab_size"] = VOCAB
    values |= {name: 1 if isinstance(values[name], int) else None for name in TOKENS if name in values}
    values |= _rope(values, config)
    values |= _layers(values, given, max(2, stages))
    if "num_hidden_layers" not in values and isinstance(values.get("num_layers"), int):
        values["num_layers"] = max(2, stages)
    values |= _no_dropout(values)
    if all(isinstance(values.get(name), int) for name in ("mamba_expand", "mamba_n_heads", "mamba_d_head")):
        values["mamba_d_head"] = values["mamba_expand"] * values["hidden_size"] // values["mamba_n_heads"]
    towers = {n: _tower(part, {config.hidden_size: values["hidden_size"]}).to_dict() for n, part in parts.items()}
    return type(config)(**(values | towers))


def _of_parts(config: Any, tp: int, stages: int, ep: int) -> Any:
    """The parts that tokens enter are made small as a model of their own, the others as small as they can be built."""
    parts = parts_of(config)
    values = {name: value for name, value in config.to_dict().items() if name not in NEVER and name not in parts}
    made = {name: small(part, tp, stages, ep) for name, part in parts.items() if is_text(part)}
    widths = {text_of(parts[name]).hidden_size: text_of(part).hidden_size for name, part in made.items()}
    made |= {name: _tower(part, widths) for name, part in parts.items() if name not in made}
    if isinstance(values.get("vocab_size"), int):
        values["vocab_size"] = VOCAB
    values |= {name: min(values[name], size) for name, size in TOWER.items() if isinstance(values.get(name), int)}
    values |= {name: 1 if isinstance(values[name], int) else None for name in TOKENS if name in values}
    return type(config)(**(values | _no_dropout(values) | {name: part.to_dict() for name, part in made.items()}))


def _tower(config: Any, widths: dict[int, int]) -> Any:
    """No text passes through it: it is there to be built. widths: of the text's layers, {given: small}."""
    values = {name: value for name, value in config.to_dict().items() if name not in NEVER}
    parts = parts_of(config)
    depth, width = values.get("num_hidden_layers"), values.get("hidden_size")
    values.pop("per_layer_config", None)
    for name, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            outer = widths.get(value) if "out" in name else None
            least = TOWER["hidden_size"] if value == width or "out" in name else value
            values[name] = outer or min(value, TOWER.get(name, least))
        elif isinstance(value, list | tuple) and len(value) == depth:
            values[name] = value[:1]
    return type(config)(**(values | {name: _tower(part, widths).to_dict() for name, part in parts.items()}))


def _heads(values: dict[str, Any], config: Any, tp: int) -> dict[str, Any]:
    """As many heads as show a wrong cut: several on each rank, and groups of more than one where they were so."""
    heads = _of(config, values, "num_attention_heads")
    if not isinstance(heads, int):
        return {}
    keys = _of(config, values, "num_key_value_heads")
    if not isinstance(keys, int) or keys == 0:
        fewer_keys = keys
        count = 2 * tp if heads % tp == 0 else 2 * tp + 1
    else:
        group = heads // keys
        fewer_keys = (2 * tp if keys > tp else tp) if keys % tp == 0 else keys if keys < tp else 2 * tp + 1
        count = fewer_keys * min(group, 2) if fewer_keys >= tp else fewer_keys * min(group, max(2, tp // fewer_keys))
    names = {"hidden_size": count * HEAD, "num_attention_heads": count, "num_key_value_heads": fewer_keys}
    for name in ("global_head_dim", "head_dim"):
        if isinstance(values.get(name), int):
            names[name] = HEAD
    if isinstance(values.get("num_global_key_value_heads"), int):
        names["num_global_key_value_heads"] = fewer_keys
    if isinstance(rotated := values.get("qk_rope_head_dim"), int):
        if "head_dim" in names and config.head_dim == config.qk_rope_head_dim:
            names["head_dim"] = rotated
        if isinstance(values.get("qk_head_dim"), int):
            names["qk_head_dim"] = rotated + values["qk_nope_head_dim"]
    if isinstance(values.get("query_pre_attn_scalar"), int):
        names["query_pre_attn_scalar"] = HEAD
    return {n: size for n, size in names.items() if n in values or _of(config, values, n) is not None}


def _of(config: Any, values: dict[str, Any], name: str) -> Any:
    """A field, also under a name that the config translates."""
    return values[name] if name in values else getattr(config, name, None)


def _layers(values: dict[str, Any], given: dict[str, Any], least: int) -> dict[str, Any]:
    """One layer of each kind, and at least so many in all, in the order of the model."""
    depth = values.get("num_hidden_layers")
    if not isinstance(depth, int):
        return {}
    lists = {n: v for n, v in values.items() if isinstance(v, list) and len(v) == depth and depth > 1}
    own = {int(number): fields for number, fields in (values.get("per_layer_config") or {}).items()}
    numbers = {n: values[n] for n in NUMBERED if isinstance(values.get(n), list)}
    kinds = [
        (own.get(n), *(value[n] for value in lists.values()), *(n in value for value in numbers.values()))
        for n in range(depth)
    ]
    chosen: list[int] = []
    for number, kind in enumerate(kinds):
        if str(kind) not in [str(kinds[other]) for other in chosen] and len(chosen) < LAYERS:
            chosen.append(number)
    for number in range(depth):
        if len(chosen) < least and number not in chosen:
            chosen.append(number)
    chosen.sort()
    found: dict[str, Any] = {name: [value[number] for number in chosen] for name, value in lists.items()}
    found["num_hidden_layers"] = len(chosen)
    if own:
        found["per_layer_config"] = {
            place: {name: _layers_own(name, size, values, given) for name, size in own[number].items()}
            for place, number in enumerate(chosen)
            if number in own
        }
    sizes = (fields["qk_nope_head_dim"] for fields in own.values() if "qk_nope_head_dim" in fields)
    nope, rotated = next(sizes, None), given.get("qk_rope_head_dim")
    if nope and given.get("head_dim") == nope + rotated:  # the head of the layers that differ
        found["head_dim"] = _layers_own("qk_nope_head_dim", nope, values, given) + values["qk_rope_head_dim"]
    found |= {name: min(values[name], 1) for name in DENSE if isinstance(values.get(name), int)}
    found |= {n: [place for place, number in enumerate(chosen) if number in v] for n, v in numbers.items()}
    if isinstance(values.get("num_kv_shared_layers"), int):
        found["num_kv_shared_layers"] = 0
    return found


def _rope(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """Three kinds of rotary positions share the features of a head: time, height and width, equal for text. longrope
    has a divisor for each pair of features, of long texts or of short ones: here all are long."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return {}
    rotated = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1.0
    half, long = int(HEAD * rotated) // 2, dict[str, int]()
    if "mrope_section" in (*rope, *(getattr(config, "ignore_keys_at_rope_validation", None) or ())):
        rope = {**rope, "mrope_section": [half * 3 // 8, half * 3 // 8, half - half * 3 // 8 * 2]}
    if rope["rope_type"] == "longrope":
        lists = {name: (list(rope[name]) * half)[:half] for name in ("short_factor", "long_factor")}
        long = {"original_max_position_embeddings": LONG}
        rope = {**rope, **lists, **long}
    return {"rope_parameters": rope, **{name: long[name] for name in long if name in values}}


def _layers_own(name: str, size: Any, values: dict[str, Any], given: dict[str, Any]) -> Any:
    """A size of one layer: it stays other than that of the model, but for numbers of heads."""
    if not isinstance(size, int) or name not in values or values[name] == given[name]:
        return size
    return values[name] if "heads" in name else 2 * values[name]


def _no_dropout(values: dict[str, Any]) -> dict[str, Any]:
    """One device and a layout draw unlike masks. A model with dropout is refused under tp before this."""
    return {
        name: 0.0
        for name, value in values.items()
        if isinstance(value, float) and value > 0 and ("dropout" in name or name.endswith("_pdrop"))
    }
