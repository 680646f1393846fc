"""Checkpoints of Megatron-LM's older format and of GPT-NeoX, a file for each model-parallel rank, read as one model.

    Megatron-LM   iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt: tensor-parallel rank TT of pipeline stage PPP
    GPT-NeoX      global_step100/layer_LL-model_TT-model_states.pt: rank TT of a layer; mp_rank_TT_model_states.pt of a
                  model without a pipeline

The pickles are read as data (opcodes.py). Tensors get Megatron-Core's names and its order of rows on one rank, the
layers of all stages numbered through. Rows of column-parallel layers and of vocabularies are joined, and columns of
row-parallel layers; of anything else each rank has a copy. GPT-NeoX differs: up stands before gate; grouped queries are
all queries, keys, values of a rank; with a parallel residual each rank adds a bias of its own to row-parallel layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isograd.errors import CheckpointError
from isograd.integrations.checkpoints.dcp import (
    MOST_ELEMENTS,
    UNREADABLE,
    _dict,
    _Flat,
    _rebuilt,
    _Saved,
    _text,
    refused,
)
from isograd.integrations.checkpoints.deepspeed import OPTIMIZER, ZeroTensor, by_rank, step_of
from isograd.integrations.checkpoints.opcodes import RefusedOpcode, brief
from isograd.models import TransformerConfig

RANK = re.compile(r"mp_rank_(?P<rank>\d{2,4})(_(?P<other>\d{3,4}))?")
LAYER = re.compile(r"layer_(?P<other>\d{2,4})(-model_(?P<rank>\d{2,4}))?-model_states\.pt")
WHOLE = re.compile(r"mp_rank_(?P<rank>\d{2,4})(?P<other>)_model_states\.pt")
BLOCK, SEQUENTIAL = re.compile(r"decoder\.layers\.([0-9]{1,5})\.(.+)"), re.compile(r"sequential\.([0-9]{1,5})\.(.+)")
RENAMED = (
    (r"^(language_model\.)?(encoder|transformer)\.", "decoder."), (r"^language_model\.", ""),
    (r"^word_embeddings_for_head\.", "output_layer."), (r"\bpost_attention_(layer)?norm\.", "pre_mlp_layernorm."),
    (r"\b(self_)?attention\.query_key_value\.", "self_attention.linear_qkv."), (r"norm\.scale$", "norm.weight"),
    (r"\b(self_)?attention\.dense\.", "self_attention.linear_proj."), (r"\bfinal_norm\.", "final_layernorm."),
    (r"\bmlp\.(dense_h_to_4h|linear1)\.", "mlp.linear_fc1."), (r"\bmlp\.w1\.weight", "mlp.linear_fc1.weight_w"),
    (r"\bmlp\.(dense_4h_to_h|linear2|w2)\.", "mlp.linear_fc2."), (r"\bmlp\.w3\.weight", "mlp.linear_fc1.weight_v"),
    (r"\binput_norm\.", "input_layernorm."),
)  # fmt: skip
BY_ROWS = re.compile(r"word_embeddings\.|output_layer\.|linear_qkv\.(weight|bias)|linear_fc1\.(weight|bias)")
BY_COLUMNS, BIASES = ("linear_proj.weight", "linear_fc2.weight"), ("linear_proj.bias", "linear_fc2.bias")
BESIDE = ("_extra_state", "rotary_emb.inv_freq", "freqs_cis")  # stored beside weights, and no weights
MOST_TENSORS = 1 << 20  # of a stage: tables that hold each other would have more
# Arguments of Megatron-LM with which a model computes something else.
REFUSED = ("rotary_interleaved", "apply_layernorm_1p", "expert_model_parallel_size")
Stage = Iterator[tuple[_Saved, str, Any]]
Shard = tuple[_Flat, tuple[int, ...]]  # what a rank holds of a tensor, with its shape


class RankFolder:
    """A folder of files of model-parallel ranks, opened for reading."""

    def __init__(self, place: str | Path, config: TransformerConfig) -> None:
        self.place, self._config = step_of(Path(place)), config
        self.kind = trainer_of(self.place) or "Megatron-LM"
        with refused(lambda seen: CheckpointError(
            "IG948", f"{self.place} holds no checkpoint of {self.kind} that can be read", seen=seen,
            expected="the files of all model-parallel ranks of the model that the config describes; nothing in "
            "them is executed", fix=f"copy all of them again; then: isograd ckpt import {place} OUT --config DIR",
        )):  # fmt: skip
            ranks = [_numbered(stages) for stages in (_megatron if self.kind == "Megatron-LM" else _neox)(self.place)]
            names = dict.fromkeys(chain.from_iterable(ranks))
            self._shards = {name: [rank[name] for rank in ranks if name in rank] for name in names}
            self.tensors = {name: self._tensor(name, len(ranks)) for name in names}
        self.shapes = {name: held.shape for name, held in self.tensors.items()}

    def full(self, name: str) -> Tensor:
        """A tensor, put together."""
        return self._joined(name, [flat.read().view(shape) for flat, shape in self._shards[name]])

    def _tensor(self, name: str, ranks: int) -> ZeroTensor:
        """A tensor, of which nothing is read; but copies are compared."""
        shards = self._shards[name]
        ((dtype, shape), *others) = {(flat.dtype, shape) for flat, shape in shards}
        if len(shards) != ranks or others or sum(flat.count for flat, _ in shards) > MOST_ELEMENTS:
            raise RefusedOpcode(f"{name[:80]!r}: missing on a rank, not of one shape and dtype, or beyond any size")
        is_cut = BY_ROWS.search(name) or name.endswith(BY_COLUMNS)
        try:
            made = self._joined(name, [torch.empty(shape, device="meta")] * ranks) if is_cut else self.full(name)
        except (RuntimeError, IndexError) as error:
            raise RefusedOpcode(f"{name[:80]!r}: {list(shape)} on {ranks} ranks, not of this config") from error
        return ZeroTensor(tuple(made.shape), dtype, tuple(flat for flat, _ in shards))

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        config, neox = self._config, self.kind == "GPT-NeoX"
        if name.endswith(("linear_fc1.weight", "linear_fc1.bias")) and config.gated:
            halves = [part.unflatten(0, (2, -1)) for part in parts]
            return torch.cat([half[n] for n in ((1, 0) if neox else (0, 1)) for half in halves])
        if "linear_qkv." in name and neox and (config.kv_heads or config.heads) != config.heads:
            groups, width = (config.kv_heads or config.heads) // len(parts), config.features_per_head
            each = (part.split([config.heads // len(parts) * width, *[groups * width] * 2]) for part in parts)
            parts = [torch.cat([one.unflatten(0, (groups, -1)) for one in qkv], 1).flatten(0, 1) for qkv in each]
        if BY_ROWS.search(name) or name.endswith(BY_COLUMNS):
            return torch.cat(parts, 1 if name.endswith(BY_COLUMNS) else 0)
        if neox and name.endswith(BIASES) and config.parallel_residual:
            return torch.stack(parts).sum(0)
        if all(torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        if neox and "norm." in name:  # these copies drift apart; GPT-NeoX's own converter takes the mean, too
            return torch.stack(parts).double().mean(0).to(parts[0].dtype)
        raise RefusedOpcode(f"{name[:80]!r}: copies that differ, of {len(parts)} tensor-parallel ranks")


def trainer_of(place: Path) -> str | None:
    """Whose files a folder of one step has, if a reader here knows them: by their names, or by those of the tensors."""
    names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    if any(RANK.fullmatch(name) and (place / name).is_dir() for name in names):
        return "Megatron-LM"
    sequential = any(map(LAYER.fullmatch, names))
    for name in [] if sequential else filter(WHOLE.fullmatch, names):
        with suppress(*UNREADABLE):  # the reader of ZeRO says what is wrong
            module = _dict(_dict(_Saved(place / name).value).get("module"))
            sequential |= "sequential.0.word_embeddings.weight" in module
    return "GPT-NeoX" if sequential else "DeepSpeed" if any(map(OPTIMIZER.fullmatch, names)) else None


def _megatron(place: Path) -> Iterator[list[Stage]]:
    """Of each tensor-parallel rank: the tensors of its stages."""
    ranks = by_rank(place, RANK)
    for paths in ranks:
        saved = [_Saved(path / "model_optim_rng.pt") for path in paths]
        first = _dict(saved[0].value)
        _refuse_run(first.get("args"), tensor_model_parallel_size=len(ranks), pipeline_model_parallel_size=len(paths))
        version = first.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version < 2:
            raise RefusedOpcode(f"checkpoint_version {brief(version)}: queries, keys and values stand in another order")
        chunks = [key for key in ("model", *(f"model{n}" for n in range(64))) if key in first]
        yield [_flattened(one, _dict(one.value).get(key)) for key in chunks for one in saved]


def _neox(place: Path) -> Iterator[list[Stage]]:
    """Of each tensor-parallel rank: the tensors of all its layers, as of one stage."""
    by_layer, whole = by_rank(place, LAYER), by_rank(place, WHOLE)
    if whole:
        _refuse_run(_dict(_Saved(whole[0][0]).value).get("args"), model_parallel_size=len(by_layer or whole))
    for paths in by_layer or whole:
        saved = [(_Saved(path), LAYER.fullmatch(path.name)) for path in paths]
        yield [chain.from_iterable(
            _flattened(one, one.value, f"sequential.{match['other']}.") if match
            else _flattened(one, _dict(one.value).get("module")) for one, match in saved
        )]  # fmt: skip


def _refuse_run(arguments: Any, **sizes: int) -> None:
    """One whose files are not all there, or whose weights mean something else."""
    said = next((held for held in (arguments, getattr(arguments, "state", None)) if isinstance(held, dict)), {})
    other = [f"{name} {brief(said[name])}" for name, size in sizes.items() if said.get(name, size) != size]
    other += [f"{n} {said[n]}" for n in REFUSED if isinstance(said.get(n), int) and said[n] > (said[n] is not True)]
    if other:
        raise RefusedOpcode(f"files of {list(sizes.values())} ranks, of a run with {', '.join(other)}")


def _numbered(stages: list[Stage]) -> dict[str, Shard]:
    """The tensors of a rank, the layers of all its stages numbered through."""
    found: dict[str, Shard] = {}
    for stage in stages:
        first = 1 + max((int(match[1]) for match in map(BLOCK.fullmatch, found) if match), default=-1)
        for saved, theirs, value in islice(stage, MOST_TENSORS):
            name = _renamed(theirs)
            if match := BLOCK.fullmatch(name):
                name = f"decoder.layers.{first + int(match[1])}.{match[2]}"
            if name in found:
                raise RefusedOpcode(f"{name[:80]!r} in two stages")
            if not name.endswith(BESIDE):
                found[name] = saved.flat(value), _rebuilt(value)[3]
    return found


def _flattened(saved: _Saved, table: Any, before: str = "", depth: int = 4) -> Stage:
    """{"a": {"b": tensor}} as {"a.b": tensor}: older models nest their modules."""
    for name, value in _dict(table).items():
        full = before + _text(name)
        if depth and (isinstance(value, dict) or getattr(value, "name", "").endswith(".OrderedDict")):
            yield from _flattened(saved, value, f"{full}.", depth - 1)
        else:
            yield saved, full, value


def _renamed(name: str) -> str:
    """As Megatron-Core calls it."""
    if match := SEQUENTIAL.fullmatch(name):  # layer 0 embeds, 1 transposes; blocks, another one, the norm, the head
        head, _, leaf = match[2].partition(".")
        place = {"norm": "decoder.final_layernorm", "final_linear": "output_layer"}.get(head)
        place = place or (f"decoder.layers.{int(match[1]) - 2}.{head}" if int(match[1]) else f"embedding.{head}")
        name = f"{place}.{leaf}"
    for theirs, ours in RENAMED:
        name = re.sub(theirs, ours, name)
    return name
