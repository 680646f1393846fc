"""ig.hf.load and ig.hf.attach: a model of transformers, its class as it is, cut for one mesh and proven first.

Code from a folder is never run; pickled and quantised weights are refused.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from isograd.comm.consensus import run_or_raise_on_all_ranks
from isograd.comm.fingerprint import first_unlike
from isograd.core.contract import contract_of
from isograd.core.mesh import Mesh
from isograd.errors import ModelError, headline
from isograd.hf import proof
from isograd.hf.build import build, cut_in_place, empty
from isograd.hf.context_parallel import attach_attention, without_adapters
from isograd.hf.losses import SCORE, cut_scored_rows, library_of_model
from isograd.hf.quantized import refuse_bits
from isograd.hf.stages import refuse_shared_keys
from isograd.hf.tp_plan import read_plan
from isograd.io.no_follow import not_there
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.io.untrusted import CONFIG, read_json


def load(
    source: Any,
    mesh: Mesh,
    *,
    prove: bool = True,
    adapter: Any = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    logits: bool = False,
    base_bits: int | None = None,
) -> nn.Module:
    """A language model of transformers on this mesh; all ranks call it.

    source: a folder with config.json and safetensors; or a config of transformers, which gives random weights that are
    equal under every layout. prove: first train a small copy for one step, and refuse the model if a gradient is not
    one device's. adapter: a peft.LoraConfig, whose adapters are trained in the place of the model. dtype: of the
    parameters; left out, the config's. seed: of random weights. logits: under tp, gather them in training steps, too,
    where most models otherwise compute the loss from cut ones. base_bits: 4 or 8, of the weights under adapters.
    """
    refuse_bits(base_bits, adapter, mesh)
    config = run_or_raise_on_all_ranks(lambda: config_of(source, mesh), mesh, ModelError, not_loaded)
    refuse_shared_keys(config, mesh)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if prove:
        _prove(config, mesh, adapter, base_bits)
    folder = Path(source) if isinstance(source, str | Path) else None
    make = partial(
        build, config, mesh, dtype, folder=folder, seed=seed, adapter=adapter, logits=logits, base_bits=base_bits
    )
    model: nn.Module = run_or_raise_on_all_ranks(make, mesh, ModelError, not_loaded)
    _refuse_saving(model, mesh)
    return model


def recompute_blocks(model: Any) -> None:
    """Turn on what transformers calls activation checkpointing since 5.24, and gradient checkpointing before."""
    newer: Any = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})


Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, mesh: Mesh, *, prove: bool = True, logits: bool = False) -> Model:
    """A model of transformers that is built already, with equal values on all ranks, on this mesh; all ranks call it.

    Under dp, cp and zero it stays as it is, but for its attention under cp: a trial first proves that nothing else in
    it mixes tokens. With a mesh without cp it gets its own attention back, for example to generate. Under tp, ep and pp
    it is cut in place, as `load` does it: `prove` and `logits` are those of `load`.
    """
    cut = {shard.axis for p in model.parameters() if (found := contract_of(p)) for shard in found.shards}
    axes = [f"{axis}{mesh.size(axis)}" for axis in ("tp", "pp", "ep") if mesh.size(axis) > 1 and axis not in cut]
    if not axes:
        attach_attention(model, mesh, model)
        cut_scored_rows(model, mesh)
        return model
    config: Any = getattr(model, "config", None)
    library, loss = library_of_model(without_adapters(model), mesh) if hasattr(config, "model_type") else (None, "")
    other = type(model) is not library or bool(cut)
    if not other:
        made, _ = empty(config, torch.float32, mesh, library)
        alike = [{n: p.shape for n, p in m.named_parameters()} for m in (model, made)]
        other = alike[0] != alike[1]
    if other:
        adapter = ", adapter=LoraConfig(...)" * hasattr(model, "peft_config")
        raise ModelError(
            "IG440",
            f"this {type(model).__name__} is not cut over {', '.join(axes)} in place",
            seen=f"{str(mesh.layout)!r}, and a model "
            + ("that is cut over another mesh" if cut else "other than its config's class makes"),
            expected="a class of transformers for language models as it is, or a layout of dp, cp and zero",
            fix=f"ig.hf.load(folder, ig.Mesh('{mesh.layout}'){adapter}), or " * (loss != SCORE)
            + f"the layout 'dp{mesh.layout.world_size} zero3', which cuts no model",
            where=mesh.describe_rank(),
        )
    refuse_shared_keys(config, mesh)
    if unlike := first_unlike(dict(model.named_parameters()), mesh.group("world")):
        raise ModelError(
            "IG440",
            f"this {type(model).__name__} is not cut over {', '.join(axes)} in place: its values differ between ranks",
            seen=f"{unlike[1][:4]} of rank {unlike[0]} are not those of rank {mesh.rank}",
            expected="one model, of which each rank keeps its part",
            fix="torch.manual_seed(0) on all ranks before it is built, or the same folder on all of them",
            where=mesh.describe_rank(),
        )
    if mesh.size("tp") > 1:  # by the name of this class: what is proven is the same decoder as a language model
        read_plan(model, mesh)
    if prove:
        _prove(config, mesh)
    run_or_raise_on_all_ranks(lambda: cut_in_place(model, loss, mesh, logits), mesh, ModelError, not_loaded)
    _refuse_saving(model, mesh)
    return model


def _prove(config: Any, mesh: Mesh, adapter: Any = None, base_bits: int | None = None) -> None:
    proven = proof.prove(config, mesh, adapter, base_bits)
    if mesh.rank == 0:
        print(f"isograd: {proven}", file=sys.stderr)


def _refuse_saving(model: nn.Module, mesh: Mesh) -> None:
    if any(mesh.size(axis) > 1 for axis in ("tp", "pp", "ep")):
        for name in ("save_pretrained", "push_to_hub"):
            setattr(model, name, partial(_refuse_part, name, mesh))


def _refuse_part(name: str, mesh: Mesh, *_: Any, **__: Any) -> None:
    seen = f"model.{name}(...) under {str(mesh.layout)!r}: it would write this rank's part as if it were the model"
    raise ModelError("IG475", seen=seen, where=mesh.describe_rank(), name=name)


def not_loaded(error: Exception) -> ModelError:
    """What the library, or the file system, says when a model is loaded."""
    return ModelError(
        "IG461",
        "the model could not be loaded",
        seen=headline(error),
        expected="a model that transformers loads, from the same folder on every rank",
    )


def config_of(source: Any, mesh: Mesh) -> Any:
    """The config of a folder that can be trained; a config as it is."""
    from transformers import CONFIG_MAPPING, AutoConfig

    config = source
    if isinstance(source, str | Path):
        folder = Path(source)
        if not (folder / "config.json").is_file():
            raise ModelError(
                "IG461",
                f"{folder} is no folder of a model",
                seen=sorted(p.name for p in folder.iterdir())[:10] if folder.is_dir() else not_there(folder, "folder"),
                expected="config.json and *.safetensors",
                fix="of the hub: hf://OWNER/NAME in a config; else huggingface_hub.snapshot_download(name) first",
                where=mesh.describe_rank(),
            )
        raw = read_json(folder / "config.json", CONFIG, nan=True, follow=True)
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        if kind not in CONFIG_MAPPING:
            custom = isinstance(raw, dict) and "auto_map" in raw
            raise ModelError(
                "IG461",
                f"{folder} needs code of its own (trust_remote_code), which is not run"
                if custom
                else f"transformers has no architecture {kind!r}",
                seen=f"model_type {kind!r}" + (f", auto_map {raw['auto_map']}" if custom else ""),
                expected="an architecture of the installed transformers",
                fix="a newer transformers may have it",
                where=mesh.describe_rank(),
            )
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        SafetensorsReader(folder)  # refuses pickled weights, before anything is built
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        raise ModelError(
            "IG462",
            "quantised weights are not trained",
            seen=f"quantization_config {quantised}",
            expected="weights in float32, bfloat16 or float16, with adapters (LoRA) or without",
            fix="the folder of the model before it was quantised; load(..., adapter=..., base_bits=4) is QLoRA",
            where=mesh.describe_rank(),
        )
    if not hasattr(config, "model_type"):
        raise ModelError(
            "IG461",
            f"{type(config).__name__} is neither a folder nor a config of transformers",
            seen=type(config).__name__,
            expected="a path, or a config such as LlamaConfig(...)",
            where=mesh.describe_rank(),
        )
    return config
