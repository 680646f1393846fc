"""GGUF files, which llama.cpp and its kin run, from a Hugging Face folder; by the `gguf` package (extra `gguf`).

One tensor is in memory at a time; the file is read again before it gets its name. What llama.cpp would compute
otherwise (another scaling of positions, another way to cut text) is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from isograd.errors import CheckpointError, if_not_installed
from isograd.io.atomic import flush_folder
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.io.untrusted import CONFIG, MANIFEST, read_json

KINDS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}  # as gguf calls the files
FAMILIES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {_CASE + r"\p{N}{1,3}" + _REST: "llama-bpe", _CASE + r"\p{N}" + _REST: "qwen2"}  # the names that llama.cpp has


def need_gguf() -> Any:
    """The gguf package, or an error (IG953) before anything is written."""
    with if_not_installed(lambda _: _refused("the gguf package is not installed", "gguf", "pip install gguf")):
        import gguf
    return gguf


def write_gguf(folder: Path, kind: str) -> Path:
    """Write a folder's model and tokenizer as one file in it: matrices as `kind`, vectors in fp32. Its path."""
    gguf = need_gguf()
    config: dict[str, Any] = read_json(folder / "config.json", CONFIG, nan=True)
    family = config.get("model_type")
    if family not in FAMILIES or config.get("num_experts"):
        raise _refused(f"model_type {family!r}", f"one of {', '.join(FAMILIES)}, without experts")
    arch = getattr(gguf.MODEL_ARCH, FAMILIES[family])
    target = folder / f"model-{kind}.gguf"
    draft = target.with_name(f".{target.name}.partial")
    writer = gguf.GGUFWriter(draft, gguf.MODEL_ARCH_NAMES[arch])
    weights = SafetensorsReader(folder)
    _about(writer, config, getattr(gguf.LlamaFileType, KINDS[kind]))
    _tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    plan = [(_name(names, name), name) for name in weights.shapes if not name.endswith("rotary_emb.inv_freq")]
    plan += [("rope_freqs.weight", "")] if _scaling(config) else []
    of = {theirs: _type(gguf, kind, weights.shapes.get(name, (1,))) for theirs, name in plan}
    for theirs, name in plan:
        shape = weights.shapes.get(name, (_head_dim(config) // 2,))
        size, per = gguf.GGML_QUANT_SIZES[of[theirs]]
        stored = gguf.quant_shape_to_byte_shape(shape, of[theirs]) if of[theirs].name == "Q8_0" else shape
        dtype = {"F32": "float32", "F16": "float16"}.get(of[theirs].name, "uint8")
        writer.add_tensor_info(theirs, stored, numpy.dtype(dtype), math.prod(shape) // size * per, raw_dtype=of[theirs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    hashes = {}
    for theirs, name in plan:
        tensor = weights.look(name, lambda t: t) if name else torch.tensor(_scaling(config))
        made = gguf.quants.quantize(_turned(tensor, name, config).float().numpy(), of[theirs])
        hashes[theirs] = hashlib.sha256(made.tobytes()).hexdigest()
        writer.write_tensor_data(made)
    writer.close()
    _read_again(gguf, draft, hashes)
    os.replace(draft, target)
    flush_folder(folder)
    return target


def _read_again(gguf: Any, draft: Path, hashes: dict[str, str]) -> None:
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    found = {one.name: hashlib.sha256(one.data.tobytes()).hexdigest() for one in gguf.GGUFReader(draft).tensors}
    if found != hashes:
        wrong = sorted(name for name in found.keys() | hashes.keys() if found.get(name) != hashes.get(name))
        raise CheckpointError("IG945", seen=f"other bytes of {', '.join(wrong[:8])}", path=draft)


def _type(gguf: Any, kind: str, shape: tuple[int, ...]) -> Any:
    """Of a tensor: q8_0 has blocks of 32 elements of a row; what has none of these is f16."""
    types = gguf.GGMLQuantizationType
    if len(shape) == 1:
        return types.F32
    return types.F16 if kind == "q8_0" and shape[-1] % 32 else getattr(types, kind.upper())


def _name(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise _refused(f"a tensor {name!r}", "the tensors of its family")
    return str(found)


def _turned(tensor: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """Llama's queries and keys, whose rotations llama.cpp computes for neighbours, and transformers for two halves."""
    part = name.split(".")[-2] if name else ""
    if FAMILIES[config["model_type"]] != "LLAMA" or part not in ("q_proj", "k_proj"):
        return tensor
    heads = config["num_attention_heads"] if part == "q_proj" else _kv_heads(config)
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _about(writer: Any, config: dict[str, Any], file_type: Any) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_name(str(config.get("_name_or_path") or config["model_type"]))
    writer.add_file_type(file_type)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))


def _kv_heads(config: dict[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _scaling(config: dict[str, Any]) -> list[float]:
    """Llama 3's divisors of the frequencies of positions; none: they are as they are. Others are refused."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise _refused(f"a scaling of positions {kind!r}", "none, or llama3")
    if kind == "default":
        return []
    base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    low, high, factor = (float(rope[n]) for n in ("low_freq_factor", "high_freq_factor", "factor"))
    old, dim, found = float(rope["original_max_position_embeddings"]), _head_dim(config), []
    for i in range(0, dim, 2):
        length = 2 * math.pi * base ** (i / dim)
        smooth = min(1.0, max(0.0, (old / length - low) / (high - low)))
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    import gguf

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _refused("no tokenizer.json beside the model", "one", "--tokenizer DIR, with a folder that holds one")
    held: dict[str, Any] = read_json(path, MANIFEST)
    model, added = held["model"], {one["id"]: one for one in held.get("added_tokens") or []}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _refused(f"a tokenizer of the type {model.get('type')!r}", "BPE of bytes, as of Llama 3 and Qwen")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut(held) if model.get("merges") else "gpt-2")
    tokens = {number: text for text, number in model["vocab"].items()} | {n: one["content"] for n, one in added.items()}
    kinds = gguf.TokenType
    ids = range(max(config["vocab_size"], max(tokens) + 1))
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in ids])
    writer.add_token_types([
        kinds.UNUSED if number not in tokens else kinds.NORMAL if number not in added
        else kinds.CONTROL if added[number].get("special") else kinds.USER_DEFINED for number in ids
    ])  # fmt: skip
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(ids)).add_to_gguf(writer, quiet=True)


def _cut(held: dict[str, Any]) -> str:
    """llama.cpp's name of the way in which the tokenizer cuts text before it merges bytes."""
    first = held.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers") or [first]
    for step in steps:
        pattern = (step.get("pattern") or {}).get("Regex")
        if step.get("type") == "Split" and pattern in CUTS:
            return CUTS[pattern]
    if [step.get("type") for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    raise _refused(f"a tokenizer that cuts text by {json.dumps(steps)[:200]}", "the way of GPT-2, Llama 3 or Qwen 2")


def _refused(seen: str, expected: str, fix: str = "the folder of transformers has been written") -> CheckpointError:
    return CheckpointError("IG953", seen=seen, expected=expected, fix=fix)
