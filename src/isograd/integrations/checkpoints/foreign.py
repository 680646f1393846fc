"""Checkpoints of other trainers, under the names that transformers has: what hf/families.py reads.

    transformers   FSDP2 and DTensors around models of transformers: the names are there already, behind a prefix
    torchtitan     Llama 3: queries and keys have the two halves of each rotation beside each other
    DeepSpeed      transformers' names, in the partitions of ZeRO: deepspeed.py
    Megatron-Core  torch_dist: linear_qkv by groups of heads, linear_fc1 gate above up, layers stacked or one by one,
                   vocabularies padded; Llama, Mistral, Qwen 2, Qwen 3 and GPT-NeoX without experts
    Megatron-LM    and GPT-NeoX, a file for each model-parallel rank: model_parallel.py gives them those names

One tensor at a time is put together. Names and shapes are checked against the config before anything is read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isograd.checkpoint import folder as folders
from isograd.checkpoint.agree import as_ours
from isograd.checkpoint.files import DTYPES, TensorEntry, in_order, write_tensors
from isograd.checkpoint.manifest import merge
from isograd.checkpoint.write import file_name
from isograd.errors import CheckpointError, ModelError
from isograd.hf import export
from isograd.hf.configs import load_config, model_type_of
from isograd.hf.families import NOT_WEIGHTS, HuggingFace
from isograd.integrations.checkpoints.dcp import DcpFolder
from isograd.integrations.checkpoints.deepspeed import STATES, ZeroFolder, step_of
from isograd.integrations.checkpoints.model_parallel import BESIDE, RankFolder, trainer_of
from isograd.models import TransformerConfig

Make = Callable[[], Tensor]
Folder = DcpFolder | ZeroFolder | RankFolder
ANCHORS = {
    "torchtitan": ("tok_embeddings.weight",),
    "Megatron-Core": ("embedding.word_embeddings.weight",),
    "transformers": ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight"),
}
HEADS = ("output.weight", "output_layer.weight", "lm_head.weight", "embed_out.weight")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # what a weight may be; others are quantised
PADDING = 128 * 128  # rows of a vocabulary that may be padding: Megatron-Core fills up to a multiple of 128 x tp
OF_MODEL = {
    "torchtitan": ("tok_embeddings.", "layers.", "norm.", "output."),
    "Megatron-Core": ("embedding.", "decoder.", "output_layer."),
}
STACKED = "decoder.layers."


@dataclass(frozen=True)
class SourceTensor:
    """A tensor under transformers' name."""

    shape: tuple[int, ...]
    make: Make
    dtype: torch.dtype


class ForeignCheckpoint:
    """A folder of another trainer as the tensors of a model of transformers, for HuggingFace(...)."""

    def __init__(self, folder: Folder, config: TransformerConfig, prefix: str | None = None) -> None:
        """prefix: what stands before the names of the model's weights; needed where a folder holds several models."""
        self.folder = folder
        names, self.prefix, anchor, others = _kind(folder, prefix)
        self.kind = folder.kind if isinstance(folder, RankFolder) else names
        inner = tuple(other for other in others if other.startswith(self.prefix))  # models below the prefix of this one
        self.names = {
            name.removeprefix(self.prefix): name
            for name in folder.tensors
            if name.startswith(self.prefix) and not name.endswith(BESIDE) and not name.startswith(inner)
        }
        self._used = set[str]()
        found = {"torchtitan": _torchtitan, "Megatron-Core": _megatron, "transformers": _transformers}[names]
        self.tensors = dict(found(self, config))
        self.shapes = {name: theirs.shape for name, theirs in self.tensors.items()}
        if config.tied:
            self._refuse_another_head(anchor, config.vocab)
        # What the config has no place for would be missing in what is written: more layers, biases.
        left = [n for n in self.names if n.startswith(OF_MODEL.get(names, ())) and n not in self._used]
        if left:
            seen = f"{len(left)}: {sorted(left)[:8]}"
            raise _unlike(f"{self.folder.place} has weights that the config has no place for", seen)

    def _refuse_another_head(self, embedding: str, vocab: int) -> None:
        """A tied model has no head of its own: one that is stored must be the embedding."""
        for head in HEADS:
            if head in self.names:
                matrices = all(len(shape) == 2 for shape in map(self.shape, (embedding, head)))
                both = [self.folder.full(self.names[name])[:vocab] for name in (embedding, head) if matrices]
                if not both or both[0].shape != both[1].shape or not bool((both[0] == both[1]).all()):
                    raise ModelError(
                        "IG420", f"{self.folder.place} has a head of its own, which a tied model does not have",
                        seen=f"{self.names[head]!r} differs from {self.names[embedding]!r}",
                        expected="equal tensors, as the config has tie_word_embeddings",
                        fix='the config of this checkpoint, or "tie_word_embeddings": false in its config.json',
                    )  # fmt: skip

    def look(self, name: str, take: Callable[[Tensor], Tensor]) -> Tensor:
        """A copy of what `take` picks from a tensor."""
        return take(self.tensors[name].make()).clone(memory_format=torch.contiguous_format)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor by its name in the folder, without the prefix; one that is missing is an error."""
        if name not in self.names:
            raise _unlike(f"{self.folder.place} has no tensor {name!r}", f"{self.kind}: {sorted(self.names)[:8]}")
        self._used.add(name)
        return self.folder.shapes[self.names[name]]

    def one(self, name: str, change: Callable[[Tensor], Tensor] = lambda t: t) -> SourceTensor:
        """A tensor by its name in the folder, changed."""
        shape, dtype = self.shape(name), self.folder.tensors[self.names[name]].dtype
        try:
            made = change(torch.empty(shape, device="meta"))
        except (RuntimeError, IndexError, TypeError) as error:  # it cannot be viewed by heads, layers or halves
            what = f"{self.folder.place}: {self.names[name]!r} has a shape that does not belong to the config"
            expected = "a shape that is cut by the heads, layers and widths of the config"
            raise _unlike(what, list(shape), expected) from error
        if dtype not in FLOATS and not name.endswith(NOT_WEIGHTS):
            raise ModelError(
                "IG420", f"{self.folder.place}: {self.names[name]!r} is no floating-point weight", seen=str(dtype),
                expected=", ".join(map(str, FLOATS)),
                fix="a checkpoint of the weights alone, before they were quantised",
            )  # fmt: skip
        return SourceTensor(tuple(made.shape), lambda: change(self.folder.full(self.names[name])), dtype)


def _unlike(
    what: str, seen: object, expected: str = "the tensors of the model that the config describes"
) -> ModelError:
    return ModelError("IG420", what, seen=seen, expected=expected, fix="the config of this checkpoint")


def _kind(folder: Folder, wanted: str | None) -> tuple[str, str, str, list[str]]:
    """(who wrote it, what stands before each name of a weight, the embedding's name behind that, the prefixes of other
    models): by the name of the embedding. Optimizers' states have longer names, or stand below `optim...`."""
    found = [
        (name.removesuffix(anchor), kind, anchor)
        for kind, anchors in ANCHORS.items()
        for anchor in anchors
        for name in folder.tensors
        if name.endswith(anchor) and ".optim" not in f".{name}"
    ]
    taken = [each for each in found if wanted is None or each[0] == wanted]
    if not taken:
        known = "; ".join(f"{kind}: {', '.join(anchors)}" for kind, anchors in ANCHORS.items())
        behind = "" if wanted is None else f" behind {wanted!r}"
        raise ModelError(
            "IG420", f"{folder.place} holds no model of a known family{behind}",
            seen=_listed(found) if found else f"{sorted(folder.tensors)[:8]}",
            expected=f"the embedding of one of them ({known})", fix="the folder that holds the model's weights",
        )  # fmt: skip
    if len(taken) > 1:
        raise ModelError(
            "IG420", f"{folder.place} holds {len(taken)} models", seen=_listed(taken),
            expected="one of them",
            fix="--prefix (or prefix=) with what stands before the names of the one to read",
        )  # fmt: skip
    ((prefix, kind, anchor),) = taken
    return kind, prefix, anchor, [other for other, _, _ in found if other != prefix]


def _listed(found: list[tuple[str, str, str]]) -> str:
    return "; ".join(f"--prefix {prefix!r} ({kind})" for prefix, kind, _ in sorted(found)[:20])


def _transformers(source: ForeignCheckpoint, _: TransformerConfig) -> Iterator[tuple[str, SourceTensor]]:
    for name in source.names:
        if not name.startswith(("optim", "state.")):
            yield name, source.one(name)


def _torchtitan(source: ForeignCheckpoint, config: TransformerConfig) -> Iterator[tuple[str, SourceTensor]]:
    _refuse_family(source, config, ("llama",))
    yield "model.embed_tokens.weight", source.one("tok_embeddings.weight")
    yield "model.norm.weight", source.one("norm.weight")
    if not config.tied:
        yield "lm_head.weight", source.one("output.weight")
    kv_heads = config.kv_heads or config.heads
    for i in range(config.layers):
        us, them = f"model.layers.{i}.", f"layers.{i}."
        yield us + "self_attn.q_proj.weight", source.one(them + "attention.wq.weight", partial(_halves, config.heads))
        yield us + "self_attn.k_proj.weight", source.one(them + "attention.wk.weight", partial(_halves, kv_heads))
        for ours, theirs in (
            ("self_attn.v_proj", "attention.wv"), ("self_attn.o_proj", "attention.wo"),
            ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "feed_forward.w1"), ("mlp.down_proj", "feed_forward.w2"),
            ("mlp.up_proj", "feed_forward.w3"),
        ):  # fmt: skip
            yield f"{us}{ours}.weight", source.one(f"{them}{theirs}.weight")


def _halves(heads: int, weight: Tensor) -> Tensor:
    """Rows of each head from (first of pair 0, second of pair 0, first of pair 1, ...) to all firsts, all seconds."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _megatron(source: ForeignCheckpoint, config: TransformerConfig) -> Iterator[tuple[str, SourceTensor]]:
    _refuse_family(source, config, ("llama", "mistral", "qwen2", "qwen3", "gpt_neox"))
    qkv, fc1 = "self_attention.linear_qkv.", "mlp.linear_fc1."
    neox, unpadded = config.norm == "layer", partial(_unpadded, config.vocab)
    body, embed, norm = ("gpt_neox", "embed_in", "final_layer_norm") if neox else ("model", "embed_tokens", "norm")
    out, down = ("attention.dense", "mlp.dense_4h_to_h") if neox else ("self_attn.o_proj", "mlp.down_proj")
    biased = (neox, config.qkv_bias, config.out_bias, config.mlp_bias)
    of_norm, of_qkv, of_out, of_mlp = (("weight", "bias") if has else ("weight",) for has in biased)
    yield f"{body}.{embed}.weight", source.one("embedding.word_embeddings.weight", unpadded)
    for leaf in of_norm:
        yield f"{body}.{norm}.{leaf}", source.one(f"decoder.final_layernorm.{leaf}")
    if not config.tied:
        yield "lm_head.weight", source.one("output_layer.weight", unpadded)
    for i in range(config.layers):
        us, of = f"{body}.layers.{i}.", partial(_layer, source, i, config.layers)
        for leaf in of_qkv:
            if neox:
                yield f"{us}attention.query_key_value.{leaf}", of(qkv + leaf)
            for number, name in enumerate("" if neox else "qkv"):
                yield f"{us}self_attn.{name}_proj.{leaf}", of(qkv + leaf, partial(_of_groups, config, number))
        for leaf in of_out:
            yield f"{us}{out}.{leaf}", of(f"self_attention.linear_proj.{leaf}")
        for name in "qk" if config.qk_norm else "":
            yield f"{us}self_attn.{name}_norm.weight", of(f"self_attention.{name}_layernorm.weight")
        for leaf in of_norm:
            yield f"{us}input_layernorm.{leaf}", of((f"{qkv}layer_norm_{leaf}", f"input_layernorm.{leaf}"))
            yield f"{us}post_attention_layernorm.{leaf}", of((f"{fc1}layer_norm_{leaf}", f"pre_mlp_layernorm.{leaf}"))
        for leaf in of_mlp:
            if neox:
                yield f"{us}mlp.dense_h_to_4h.{leaf}", of(fc1 + leaf)
            for number, name in enumerate(() if neox else ("gate", "up")):
                alone = f"{fc1}{leaf}_{'wv'[number]}"  # how newer ones store the two halves
                there = any(one in source.names for one in (f"{STACKED}{alone}", f"{STACKED}{i}.{alone}"))
                half = of(alone) if there else of(fc1 + leaf, partial(lambda n, t: t.chunk(2)[n], number))
                yield f"{us}mlp.{name}_proj.{leaf}", half
            yield f"{us}{down}.{leaf}", of(f"mlp.linear_fc2.{leaf}")


def _unpadded(vocab: int, weight: Tensor) -> Tensor:
    """A vocabulary's rows without those that fill it up."""
    if len(weight) - vocab >= PADDING:
        raise IndexError("more rows than padding explains: another vocabulary")
    return weight[:vocab]


def _layer(
    source: ForeignCheckpoint,
    number: int,
    layers: int,
    names: str | tuple[str, str],
    change: Callable[[Tensor], Tensor] = lambda t: t,
) -> SourceTensor:
    """A tensor of a layer, under the first of its names that is there: by itself, or a row of all layers' tensor."""
    each = (names,) if isinstance(names, str) else names
    alone = [f"{STACKED}{number}.{name}" for name in each]
    stacked = [f"{STACKED}{name}" for name in each]
    for name in alone:
        if name in source.names:
            return source.one(name, change)
    found = next((name for name in stacked if name in source.names), alone[0])
    if source.shape(found)[:1] != (layers,):
        what = f"{source.folder.place} has another number of layers than the config"
        raise _unlike(what, f"{found!r} of the shape {list(source.shape(found))}", f"{layers} layers, stacked")
    return source.one(found, lambda t: change(t[number]))


def _of_groups(config: TransformerConfig, number: int, weight: Tensor) -> Tensor:
    """q, k or v of linear_qkv, whose rows are, for each head of keys: its queries, its key, its value."""
    groups = config.kv_heads or config.heads
    queries = config.heads // groups
    by_group = weight.view(groups, queries + 2, -1, *weight.shape[1:])
    part = by_group[:, :queries] if number == 0 else by_group[:, queries + number - 1]
    return part.reshape(-1, *weight.shape[1:])


def _refuse_family(source: ForeignCheckpoint, config: TransformerConfig, known: tuple[str, ...]) -> None:
    family = model_type_of(config)
    if family not in known:
        raise CheckpointError(
            "IG942", kind=family, seen=f"a checkpoint of {source.kind}",
            expected=", ".join(known), fix="save it under transformers' names, with the trainer's own converter",
        )  # fmt: skip


def import_dcp(
    place: str | Path,
    folder: str | Path,
    *,
    config: str | Path,
    prefix: str | None = None,
    tokenizer: str | Path | None = None,
    max_shard_gb: float = export.SHARD_GB,
    dtype: torch.dtype | None = None,
    states: str | Path | None = None,
) -> ForeignCheckpoint:
    """Write a Hugging Face folder from a folder of torch.distributed.checkpoint or DeepSpeed, whose model `config`
    describes: a folder with a config.json. `states`: also a checkpoint with Adam's, of DeepSpeed's, from which a run
    resumes, in this folder. In one process; one tensor is in memory at a time, or an embedding and its head. Returns
    what was read."""
    described, target = load_config(str(config)), Path(folder)
    kind = trainer_of(step_of(Path(place)))
    zero = ZeroFolder(place) if kind == "DeepSpeed" else None
    if states is not None and zero is None:
        raise CheckpointError(
            "IG948", f"{place} is no folder of DeepSpeed's ZeRO, of which states are read", seen="no *_optim_states.pt",
            expected="zero_pp_rank_*_optim_states.pt", fix="leave --states out: weights alone are read",
        )  # fmt: skip
    of_ranks = RankFolder(place, described) if kind in ("Megatron-LM", "GPT-NeoX") else None
    foreign = ForeignCheckpoint(of_ranks or zero or DcpFolder(step_of(Path(place))), described, prefix)
    weights = HuggingFace(foreign, described)
    dtypes = [theirs.dtype for name, theirs in foreign.tensors.items() if not name.endswith(NOT_WEIGHTS)]
    widest = functools.reduce(torch.promote_types, dtypes)  # it holds the values of all weights
    kept = DTYPES[widest]
    ours = {f"model/{name}": TensorEntry(f"model/{name}", kept, shape) for name, shape in weights.shapes.items()}
    about = {"kind": "isograd", "config": dataclasses.asdict(described)}
    with as_ours(f"writing {target}", ""):
        shards = export.plan(about, ours, max_shard_gb, dtype)
    with export.drafted(target, tokenizer, Path(place)):
        keys = export.keys_of(shards)
        read = (_read(weights, key.removeprefix("model/")).to(widest) for key in dict.fromkeys(keys))
        export.write(target, shards, export.repeated(keys, read), about, tokenizer)
    if zero is not None and states is not None:
        _write_states(zero.place, Path(states), described, weights, foreign.prefix)
    return foreign


def _write_states(place: Path, folder: Path, described: TransformerConfig, weights: HuggingFace, prefix: str) -> None:
    """A checkpoint of fp32 weights and Adam's averages, as a run on one device would have saved it; by tensors."""
    averages = [ZeroFolder(place, what) for what in STATES]
    step, options = averages[0].step, averages[0].options
    sources = {"model": weights}
    for what, zero in zip(STATES, averages, strict=True):
        sources[f"optimizer/{what}"] = HuggingFace(ForeignCheckpoint(zero, described, prefix), described)
    shapes = weights.shapes
    ordered = in_order(TensorEntry(f"{at}/{name}", "F32", shapes[name]) for at in sources for name in shapes)
    read = (_read(sources[at], name).float() for at, _, name in (e.name.rpartition("/") for e in ordered))
    with as_ours(f"writing {folder}", ""):
        folder.mkdir(parents=True, exist_ok=True)
        lock = folders.Lock(folder, folders.job_name())
        draft = folders.partial(folder, step, "import")
        try:
            draft.mkdir()
            size, hashes = write_tensors(draft / file_name(0), ordered, read, {"format": "isograd checkpoint"})
            tensors = {e.name: (e.shape, "F32", [(0, n) for n in e.shape or (1,)], hashes[e.name]) for e in ordered}
            counts = {"step": {name: (float(step), "float32") for name in shapes}}
            kept = {k: v for k in ("lr", "betas", "eps", "weight_decay") if (v := options.get(k)) is not None}
            usual = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
            groups = [{"kind": "AdamW", "options": usual | kept, "names": sorted(shapes)}]
            head = {
                "step": step,
                "layout": "1",
                "extra": {},
                "run": {"groups": groups, "counters": {}, "loss_scale": None},
            }
            head["model"] = {"kind": "isograd", "config": json.loads(json.dumps(dataclasses.asdict(described)))}
            note = {"file": file_name(0), "bytes": size, "tensors": tensors, "counts": counts}
            merge([note], head).write(draft)
            folders.commit(folder, draft, step)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            lock.close()


def _read(weights: HuggingFace, name: str) -> Tensor:
    shape = weights.shapes[name]
    return weights.read(name, shape, [(0, size) for size in shape])
