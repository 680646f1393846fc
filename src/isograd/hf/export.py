"""Hugging Face folders out: config.json, safetensors in shards with an index, tokenizer files.

One tensor is in memory at a time. The folder is written beside its place, read again and compared, and named last.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.checkpoint.agree import all_or_none, as_ours, raise_alike
from isograd.checkpoint.files import DTYPES, TORCH, TensorEntry, in_order, write_tensors
from isograd.checkpoint.gather import Gathered
from isograd.checkpoint.manifest import Damage, describe_model
from isograd.checkpoint.read import damaged, open_whole
from isograd.core.mesh import Mesh
from isograd.data.chats import answer_end
from isograd.data.tokenizer import end_of_text
from isograd.engine import Engine, state
from isograd.errors import CheckpointError, IsogradError
from isograd.hf.configs import model_type_of, to_hf_config
from isograd.hf.families import rules
from isograd.hf.quantized import unpack
from isograd.io.atomic import flush_folder, write_bytes
from isograd.io.no_follow import not_there
from isograd.io.store import Place
from isograd.io.untrusted import CONFIG, read_json
from isograd.models import Transformer, TransformerConfig

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_GB = 5.0
HF_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of the folder, made from one or several of ours."""

    entry: TensorEntry
    # (our key, the part of theirs that it is, which of our experts it is: None for all of our tensor)
    sources: tuple[tuple[str, Callable[[Tensor], Tensor], int | None], ...]
    # Of a weight with an adapter, whose sources are the weight, or its packed form and scales, A, B, DoRA's magnitudes.
    scale: float | None = None

    def made(self, ours: Iterator[Tensor]) -> Tensor:
        """The tensor of the folder, from our tensors in the order of `sources`."""
        if self.scale is not None:
            parts = [next(ours) for _ in self.sources]
            if parts[0].dtype in (torch.uint8, torch.int8):
                parts[:2] = [unpack(parts[0], parts[1], torch.Size(self.entry.shape)).to(parts[2].dtype)]
            weight, a, b, *magnitude = parts
            wide = torch.promote_types(weight.dtype, torch.float32)
            merged = weight.to(wide) + self.scale * (b.to(wide) @ a.to(wide))
            for each in magnitude:  # DoRA: rows have the length that was learned
                merged *= (each.to(wide) / torch.linalg.norm(merged, dim=1))[:, None]
            return merged.to(TORCH[self.entry.dtype])
        whole = torch.zeros(self.entry.shape, dtype=TORCH[self.entry.dtype])
        for _, view, expert in self.sources:
            place, part = view(whole), next(ours)
            part = part if expert is None else part[expert]
            place.copy_(part.reshape(place.shape))
        return whole


def export_hf(
    source: Engine | Transformer,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_shard_gb: float = SHARD_GB,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the engine's model as a Hugging Face folder; all ranks call it. `dtype`: other than the parameters'."""
    mesh, target = source.mesh, Path(folder)
    model = source.model if isinstance(source, Engine) else source
    parts = state.parts(source) if isinstance(source, Engine) else state.parts_of_model(source, mesh)
    described = _described(describe_model(model), type(model).__name__)
    gathered = Gathered([part for part in parts if part.key.startswith(("model/", "buffer/"))], mesh)
    shards = plan(described, gathered.entries, max_shard_gb, dtype)
    all_or_none(lambda: open_new(target, tokenizer) if mesh.rank == 0 else None, f"opening {target}", mesh)
    keys = keys_of(shards)
    ours = repeated(keys, gathered.to_rank_0(dict.fromkeys(keys)))
    written_by_first(target, ours, mesh, lambda: write(target, shards, ours, described, tokenizer))


def written_by_first(target: Path, sent: Iterator[Tensor], mesh: Mesh, run: Callable[[], None]) -> None:
    """Rank 0 runs what writes `target`, and reads `sent`; all ranks send, and all raise what it raised."""
    error = None
    if mesh.rank == 0:
        try:
            with as_ours(f"writing {target}", mesh.describe_rank()):
                run()
        except IsogradError as caught:
            error = caught
            shutil.rmtree(draft_of(target), ignore_errors=True)
    for _ in sent:  # what the other ranks have to send, whether it can be written or not
        pass
    raise_alike(error, mesh)


def convert(
    place: Place,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_shard_gb: float = SHARD_GB,
    dtype: torch.dtype | None = None,
    ema: bool = False,
) -> Path:
    """The same from a checkpoint on the disk: in one process, whatever layout wrote it. `ema`: the averages of the
    weights, in their own dtype, and of what has none the weights."""
    reader, target = open_whole(place), Path(folder)
    tensors = reader.manifest.tensors
    averages = {f"model/{key[4:]}": key for key in tensors if key.startswith("ema/")} if ema else {}
    if ema and not averages:
        raise CheckpointError("IG950", seen=f"weights of step {reader.manifest.step}", place=place)
    described = _described(reader.manifest.model, "model of this checkpoint")
    stored = {key: tensors[averages.get(key, key)] for key in tensors}
    saved = {key: TensorEntry(key, entry.dtype, entry.shape) for key, entry in stored.items()}
    with damaged_if_unlike(place):
        shards = plan(described, saved, max_shard_gb, dtype)
    with drafted(target, tokenizer, place):
        keys = keys_of(shards)
        ours = repeated(keys, (reader.read(averages.get(key, key)) for key in dict.fromkeys(keys)))
        write(target, shards, ours, described, tokenizer)
    return target


@contextmanager
def drafted(target: Path, tokenizer: str | Path | None, place: Place) -> Iterator[None]:
    """A folder is written in here, in one process, from what lies at `place`; no draft of it stays."""
    with as_ours(f"writing {target}", ""):
        open_new(target, tokenizer)
        try:
            yield
        except Damage as damage:
            raise damaged(place, damage) from damage
        finally:
            shutil.rmtree(draft_of(target), ignore_errors=True)


def keys_of(shards: Sequence[Sequence[ExportedTensor]]) -> list[str]:
    """Our tensors in the order in which theirs are made of them; of one with all experts, once for each of theirs."""
    return [key for shard in shards for theirs in shard for key, _, _ in theirs.sources]


def repeated(keys: Sequence[str], once: Iterator[Tensor]) -> Iterator[Tensor]:
    """The tensor of each key. `once` gives each of them one time, in the order of first use; kept to its last use."""
    left, kept = Counter(keys), dict[str, Tensor]()
    for key in keys:
        if key not in kept:
            kept[key] = next(once)
        left[key] -= 1
        yield kept[key] if left[key] else kept.pop(key)


@contextmanager
def damaged_if_unlike(place: Place) -> Iterator[None]:
    """A manifest may name another model than its tensors are of: then no plan can be made."""
    try:
        yield
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        damage = Damage(f"its tensors are not those of the model that it describes: {type(error).__name__}: {error}")
        raise damaged(place, damage) from error


def plan(
    described: Mapping[str, Any], ours: Mapping[str, TensorEntry], max_shard_gb: float, dtype: torch.dtype | None
) -> list[list[ExportedTensor]]:
    """Which tensors stand in which file, in the order in which they are written."""
    if described["kind"] == "isograd":
        made = _of_transformer(described, ours)
    else:
        adapters = described.get("adapters", {})
        made = _as_it_is(ours, adapters.get("scales", {}), is_dora(adapters))
    if dtype is not None:
        made = [_cast(theirs, DTYPES[dtype]) for theirs in made]
    shards: list[list[ExportedTensor]] = [[]]
    for theirs in made:
        if shards[-1] and sum(t.entry.size for t in shards[-1]) + theirs.entry.size > max_shard_gb * 1e9:
            shards.append([])
        shards[-1].append(theirs)
    by_entry = {theirs.entry: theirs for theirs in made}
    return [[by_entry[entry] for entry in in_order(theirs.entry for theirs in shard)] for shard in shards]


def _of_transformer(described: Mapping[str, Any], ours: Mapping[str, TensorEntry]) -> list[ExportedTensor]:
    config = TransformerConfig.from_dict(described["config"])
    to_hf_config(config)  # refuses, before anything is written, what no family has
    made: dict[str, ExportedTensor] = {}
    for rule in rules(config, model_type_of(config)):
        mine = ours[f"model/{rule.ours}"]
        before = made[rule.theirs].sources if rule.theirs in made else ()
        entry = TensorEntry(rule.theirs, mine.dtype, rule.shape(mine.shape))
        made[rule.theirs] = ExportedTensor(entry, (*before, (mine.name, rule.view, rule.expert)))
    return list(made.values())


def _as_it_is(ours: Mapping[str, TensorEntry], scales: Mapping[str, float], dora: bool) -> list[ExportedTensor]:
    """A model of transformers itself: names are its own. `scales`: of layers with adapters, which are merged."""
    found = []
    for key, entry in ours.items():
        name = key.partition("/")[2]
        if not key.startswith(("model/", "buffer/")) or ".lora_" in name or name.endswith(".base_layer.scales"):
            continue
        layer = name.removesuffix(".base_layer.weight").removesuffix(".base_layer.packed")
        keys = [key] if layer == name else [key, *adapter_keys(layer, dora)]
        made = TensorEntry(name.replace(".base_layer.", "."), entry.dtype, entry.shape)
        if name.endswith(".packed") and layer != name:  # 4 or 8 bits, which get their scales and are made whole
            a, b = (ours[each] for each in keys[1:])
            made = TensorEntry(f"{layer}.weight", a.dtype, (b.shape[0], a.shape[1]))
            keys.insert(1, f"buffer/{layer}.base_layer.scales")
        found.append(ExportedTensor(made, tuple((each, lambda t: t, None) for each in keys), scales.get(layer)))
    return found


def is_dora(adapters: Mapping[str, Any]) -> bool:
    """Whether the adapters of a described model have magnitudes beside A and B."""
    return bool(adapters.get("config", {}).get("use_dora"))


def adapter_keys(layer: str, dora: bool) -> list[str]:
    """Our keys of the adapter of a layer: A, then B, then DoRA's magnitudes."""
    parts = ["A", "B", "magnitude_vector"] if dora else ["A", "B"]
    return [f"model/{layer}.lora_{part}.default.weight" for part in parts]


def _cast(theirs: ExportedTensor, dtype: str) -> ExportedTensor:
    if not TORCH[theirs.entry.dtype].is_floating_point:
        return theirs
    return dataclasses.replace(theirs, entry=dataclasses.replace(theirs.entry, dtype=dtype))


def _described(found: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    if found is None:
        raise CheckpointError("IG942", kind=kind)
    return found


def draft_of(target: Path) -> Path:
    """Where a folder is written, until all of it is there."""
    return target.with_name(f".{target.name}.partial")


def open_new(target: Path, tokenizer: str | Path | None) -> None:
    """Make the draft of a folder, which must not be there yet."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        seen = "a file" if target.is_file() else f"{len(list(target.iterdir()))} entries"
        raise CheckpointError("IG943", seen=seen, target=target)
    if tokenizer is not None and not any((Path(tokenizer) / name).is_file() for name in COPIED[:9]):
        folder = Path(tokenizer)
        held = sorted(p.name for p in folder.iterdir())[:10] if folder.is_dir() else not_there(folder, "folder")
        raise CheckpointError("IG944", seen=held, tokenizer=tokenizer)
    shutil.rmtree(draft_of(target), ignore_errors=True)
    draft_of(target).mkdir(parents=True)


def write(
    target: Path,
    shards: Sequence[Sequence[ExportedTensor]],
    ours: Iterator[Tensor],
    described: Mapping[str, Any],
    tokenizer: str | Path | None,
) -> None:
    """Into a folder beside the target, which gets its name when all of it is there and was read again."""
    draft = draft_of(target)
    homes: dict[str, str] = {}  # the file of each tensor
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        homes |= {theirs.entry.name: name for theirs in shard}
        made = (theirs.made(ours) for theirs in shard)
        write_tensors(draft / name, [theirs.entry for theirs in shard], made, {"format": "pt"})
    entries = [theirs.entry for shard in shards for theirs in shard]
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(e.size for e in entries)}, "weight_map": dict(sorted(homes.items()))}
        write_bytes(draft / "model.safetensors.index.json", _readable(index))
    values = _config(described, entries, tokenizer)
    for name in COPIED if tokenizer is not None else ():
        if (Path(str(tokenizer)) / name).is_file():
            shutil.copyfile(Path(str(tokenizer)) / name, draft / name)
    if tokenizer is not None:
        values = _with_stops(values, draft)
    write_bytes(draft / "config.json", _readable(values))
    give_name(target)


def give_name(target: Path) -> None:
    """Its draft is complete: it becomes the folder."""
    draft = draft_of(target)
    flush_folder(draft)
    if target.exists():
        target.rmdir()
    draft.rename(target)
    flush_folder(target.parent)


def _readable(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _config(
    described: Mapping[str, Any], entries: Iterable[TensorEntry], tokenizer: str | Path | None
) -> dict[str, Any]:
    if described["kind"] == "isograd":
        values = to_hf_config(TransformerConfig.from_dict(described["config"]))
        named = ARCHITECTURES[values["model_type"]]
        if described["config"].get("score"):
            named, values["num_labels"] = re.sub("LMHeadModel|ForCausalLM", "ForSequenceClassification", named), 1
        values = {**dict.fromkeys(SPECIAL), **values, "architectures": [named]}
    else:
        values = dict(described["config"])
    near = Path(str(tokenizer)) / "config.json"
    if tokenizer is not None and near.is_file():
        known = read_json(near, CONFIG, nan=True, follow=True)
        values |= {name: known[name] for name in SPECIAL if name in dict(known)}
    widest = max((entry.dtype for entry in entries if entry.dtype in HF_DTYPES), key=lambda d: TORCH[d].itemsize)
    return {**values, "dtype": HF_DTYPES[widest]}


def _with_stops(values: dict[str, Any], draft: Path) -> dict[str, Any]:
    """Generation ends at what ends a text or an answer: by the config, by the tokenizer, by the chat template."""
    path = draft / "generation_config.json"
    generation = dict(read_json(path, CONFIG, nan=True)) if path.is_file() else {}
    listed = [values.get("eos_token_id"), generation.get("eos_token_id"), end_of_text(draft), answer_end(draft)]
    flat = [number for one in listed for number in (one if isinstance(one, list) else [one]) if isinstance(number, int)]
    stops = list(dict.fromkeys(flat))
    if stops:
        write_bytes(path, _readable({**generation, "eos_token_id": stops[0] if len(stops) == 1 else stops}))
    return {**values, "eos_token_id": stops[0]} if stops and values.get("eos_token_id") is None else values
