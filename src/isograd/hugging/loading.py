"""ig.hugging.load: a model of transformers, its class as it is, cut for one mesh and proven before it is loaded.

1. The config is read and checked. Code from the folder is never run, pickled and quantised weights are refused.
2. The proof (proof.py): a small copy of the class trains one step under this layout and on one device.
3. The class is built with its parameters on the meta device and cut by its own tensor plan (cut.py).
4. Each rank reads its box of each tensor (values.py). At ZeRO 3 the Engine reads this rank's rows, and no more.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isograd.comm.agree import all_or_none
from isograd.contract import contract_of, start_of
from isograd.engine import empty_parameters
from isograd.engine.first import become
from isograd.errors import ModelError, headline
from isograd.hugging.adapters import Adapted, insert
from isograd.hugging.cut import cut
from isograd.hugging.head import Joined, may_join, refuse_logits
from isograd.hugging.losses import CAUSAL, library_of, refuse_cut_sequences, refuse_other_parts
from isograd.hugging.sequences import refuse_sequences
from isograd.hugging.stages import cut_into_stages, refuse_shared_keys
from isograd.hugging.survey import survey, tiny_model
from isograd.hugging.values import Folder, Random, Source, give_starts
from isograd.mesh import Mesh
from isograd.outside import CONFIG, read_json
from isograd.sequence.hugging import attach
from isograd.stored import Stored


def load(
    source: Any,
    mesh: Mesh,
    *,
    prove: bool = True,
    adapter: Any = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    logits: bool = False,
) -> nn.Module:
    """A language model of transformers on this mesh; all ranks call it.

    source: a folder with config.json and safetensors; or a config of transformers, which gives random weights that are
    equal under every layout. prove: first train a small copy for one step, and refuse the model if a gradient is not
    one device's. adapter: a peft.LoraConfig, whose adapters are trained in the place of the model. dtype: of the
    parameters; left out, the config's. seed: of random weights. logits: under tp, gather them in training steps, too,
    where most models otherwise compute the loss from cut ones.
    """
    config = all_or_none(lambda: config_of(source, mesh), mesh, ModelError, not_loaded)
    refuse_shared_keys(config, mesh)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if prove:
        from isograd.hugging.proof import prove as proven

        proof = proven(config, mesh, adapter)
        if mesh.rank == 0:
            print(f"isograd: {proof}", file=sys.stderr)
    folder = Path(source) if isinstance(source, str | Path) else None
    make = partial(build, config, mesh, dtype, folder=folder, seed=seed, adapter=adapter, logits=logits)
    model: nn.Module = all_or_none(make, mesh, ModelError, not_loaded)
    if any(mesh.size(axis) > 1 for axis in ("tp", "pp", "ep")):
        for name in ("save_pretrained", "push_to_hub"):
            setattr(model, name, partial(_refuse_part, name, mesh))
    return model


def _refuse_part(name: str, mesh: Mesh, *_: Any, **__: Any) -> None:
    raise ModelError(
        "IG475",
        f"{name} of a model of which each rank has a part",
        seen=f"model.{name}(...) under {str(mesh.layout)!r}: it would write this rank's part as if it were the model",
        expected="ig.checkpoint.export_hf(engine, folder), on all ranks",
        fix="export the folder, and load it on one device to push it",
        where=mesh.where(),
    )


def build(
    config: Any,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    folder: Path | None = None,
    adapter: Any = None,
    seed: int = 0,
    noise: float = 0.0,
    logits: bool = False,
) -> Any:
    """The model of a config on this mesh, with values from a folder or random ones; nothing is proven."""
    model, loss = empty(config, dtype, mesh)
    refuse_cut_sequences(loss, type(model).__name__, mesh)
    refuse_sequences(type(model), config, loss, mesh)
    source = Random(empty(config, dtype, mesh)[0], seed, noise)
    values: Random | Folder = source if folder is None else Folder(Stored(folder), model, mesh.where())
    starts: Source = values
    if adapter is not None:
        insert(model, adapter, dtype, mesh)
        starts = Adapted(values, model, adapter, seed, noise)
    joined = None
    if mesh.size("tp") > 1 and not logits and may_join(type(model), config, loss):
        joined = Joined(mesh, model.loss_function, shifts=loss == CAUSAL)
    cut(model, mesh, joined)
    library = type(model)
    if mesh.size("pp") > 1:
        cut_into_stages(model, mesh, survey(library, config, loss), loss)
    give_starts(model, starts)
    _fill_buffers(model, values)
    if mesh.layout.zero != 3 or mesh.size("cp") > 1:
        _fill(model, mesh)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(mesh.device)
    refuse_other_parts(model, loss, mesh)
    if mesh.size("cp") > 1:
        _attach(model, library, config, mesh)
    if joined is not None:
        refuse_logits(model, joined)
    return model


def _attach(model: Any, library: Any, config: Any, mesh: Mesh) -> None:
    """A model in stages cannot be tried out: a small copy is tried in its place."""
    if mesh.size("pp") == 1:
        attach(model, mesh)
        return
    with tiny_model(library, config) as tiny:
        attach(model, mesh, tried=tiny)


def empty(config: Any, dtype: torch.dtype, mesh: Mesh) -> tuple[Any, str]:
    """The library's model for a config, with parameters on the meta device and buffers with values; and its loss."""
    library, loss = library_of(config, mesh.where())
    with empty_parameters():
        model = library._from_config(copy.deepcopy(config), dtype=dtype)
    return model.train(), loss


@torch.no_grad()
def _fill(model: nn.Module, mesh: Mesh) -> None:
    """Give each parameter the values of this rank's box."""
    for parameter in list(model.parameters()):
        contract, start = contract_of(parameter), start_of(parameter)
        assert start is not None
        box = [(0, size) for size in parameter.shape] if contract is None else list(contract.local(mesh))
        become(parameter, start(box, mesh.device))


@torch.no_grad()
def _fill_buffers(model: nn.Module, values: Random | Folder) -> None:
    if isinstance(values, Folder):
        kept = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(values.read(name, [(0, size) for size in buffer.shape]))


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
                seen=sorted(p.name for p in folder.iterdir())[:10] if folder.is_dir() else "no such folder",
                expected="config.json and *.safetensors",
                fix="download it first: huggingface_hub.snapshot_download(name)",
                where=mesh.where(),
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
                where=mesh.where(),
            )
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        Stored(folder)  # refuses pickled weights, before anything is built
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        raise ModelError(
            "IG462",
            "quantised weights are not trained",
            seen=f"quantization_config {quantised}",
            expected="weights in float32, bfloat16 or float16, with adapters (LoRA) or without; QLoRA is not supported",
            fix="the folder of the model before it was quantised; load(..., adapter=peft.LoraConfig()) for LoRA",
            where=mesh.where(),
        )
    if not hasattr(config, "model_type"):
        raise ModelError(
            "IG461",
            f"{type(config).__name__} is neither a folder nor a config of transformers",
            seen=type(config).__name__,
            expected="a path, or a config such as LlamaConfig(...)",
            where=mesh.where(),
        )
    return config
