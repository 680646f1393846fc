"""The adapters of a model alone, as peft has them: adapter_config.json and adapter_model.safetensors.

`export_hf` writes the whole model instead, with its adapters merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from isograd.checkpoint.agree import all_or_none
from isograd.checkpoint.files import TensorEntry, in_order, write_tensors
from isograd.checkpoint.gather import Gathered
from isograd.checkpoint.manifest import describe_model
from isograd.checkpoint.read import open_whole
from isograd.engine import Engine, state
from isograd.errors import CheckpointError
from isograd.hf.export import (
    adapter_keys,
    damaged_if_unlike,
    draft_of,
    drafted,
    give_name,
    is_dora,
    open_new,
    written_by_first,
)
from isograd.io.atomic import write_bytes
from isograd.io.store import Place


def export_adapters(engine: Engine, folder: str | Path) -> None:
    """Write the adapters of the engine's model as a folder of peft; all ranks call it."""
    mesh, target = engine.mesh, Path(folder)
    adapters = _described(describe_model(engine.model), type(engine.model).__name__)
    gathered = Gathered([part for part in state.parts(engine) if ".lora_" in part.key], mesh)
    named = _names(adapters)
    ordered = _entries(named, gathered.entries)
    all_or_none(lambda: open_new(target, None) if mesh.rank == 0 else None, f"opening {target}", mesh)
    whole: Iterator[Tensor] = gathered.to_rank_0([named[entry.name] for entry in ordered])

    written_by_first(target, whole, mesh, lambda: _write(target, ordered, whole, adapters))


def convert_adapters(place: Place, folder: str | Path) -> Path:
    """The same from a checkpoint on the disk: in one process, whatever layout wrote it."""
    reader, target = open_whole(place), Path(folder)
    adapters = _described(reader.manifest.model, "the model of this checkpoint")
    named = _names(adapters)
    with damaged_if_unlike(place):
        ordered = _entries(named, reader.manifest.tensors)
    with drafted(target, None, place):
        _write(target, ordered, (reader.read(named[entry.name]) for entry in ordered), adapters)
    return target


def _described(found: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any]:
    """What must be known of the adapters of a model."""
    adapters: Mapping[str, Any] | None = (found or {}).get("adapters")
    if adapters is None:
        raise CheckpointError("IG947", seen=kind)
    return adapters


def _names(adapters: Mapping[str, Any]) -> dict[str, str]:
    """{the name in a file of peft: our key}."""
    dora = is_dora(adapters)
    return {_name(key): key for layer in adapters["scales"] for key in adapter_keys(layer, dora)}


def _entries(named: Mapping[str, str], ours: Mapping[str, Any]) -> list[TensorEntry]:
    return in_order([TensorEntry(name, ours[key].dtype, ours[key].shape) for name, key in named.items()])


def _write(target: Path, ordered: list[TensorEntry], whole: Iterator[Tensor], adapters: Mapping[str, Any]) -> None:
    draft = draft_of(target)
    write_tensors(draft / "adapter_model.safetensors", ordered, whole, {"format": "pt"})
    write_bytes(draft / "adapter_config.json", (json.dumps(adapters["config"], indent=2) + "\n").encode())
    give_name(target)


def _name(key: str) -> str:
    """'model/x.q_proj.lora_A.default.weight' -> the name that peft gives it in a file."""
    name = "base_model.model." + key.partition("/")[2].replace(".default.weight", ".weight")
    return name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
