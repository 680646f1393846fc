"""The adapters of a model alone, as peft has them: adapter_config.json and adapter_model.safetensors.

    export_adapters(engine, "out")                    # any layout and stage; all ranks call it
    peft.PeftModel.from_pretrained(model, "out")      # on one device, with or without isograd

`export_hf` writes the whole model instead, with its adapters merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from isograd.checkpoint.agree import all_or_none
from isograd.checkpoint.files import Entry, in_order, write_bytes, write_tensors
from isograd.checkpoint.gather import Gathered
from isograd.checkpoint.hugging import adapter_keys, describe, draft_of, give_name, open_new, written_by_first
from isograd.engine import Engine, state
from isograd.errors import CheckpointError


def export_adapters(engine: Engine, folder: str | Path) -> None:
    """Write the adapters of the engine's model as a folder of peft; all ranks call it."""
    mesh, target = engine.mesh, Path(folder)
    adapters = (describe(engine.model) or {}).get("adapters")
    if adapters is None:
        raise CheckpointError(
            "IG947",
            "this model has no adapters",
            seen=type(engine.model).__name__,
            expected="a model of ig.hugging.load(..., adapter=peft.LoraConfig())",
            fix="ig.checkpoint.export_hf writes whole models",
        )
    gathered = Gathered([part for part in state.parts(engine) if ".lora_" in part.key], mesh)
    named = {_name(key): key for layer in adapters["scales"] for key in adapter_keys(layer)}
    entries = [Entry(name, gathered.entries[key].dtype, gathered.entries[key].shape) for name, key in named.items()]
    ordered = in_order(entries)
    all_or_none(lambda: open_new(target, None) if mesh.rank == 0 else None, f"opening {target}", mesh)
    whole: Iterator[Tensor] = gathered.whole([named[entry.name] for entry in ordered])

    def write() -> None:
        draft = draft_of(target)
        write_tensors(draft / "adapter_model.safetensors", ordered, whole, {"format": "pt"})
        write_bytes(draft / "adapter_config.json", (json.dumps(adapters["config"], indent=2) + "\n").encode())
        give_name(target)

    written_by_first(target, whole, mesh, write)


def _name(key: str) -> str:
    """'model/x.q_proj.lora_A.default.weight' -> the name that peft gives it in a file."""
    return "base_model.model." + key.partition("/")[2].replace(".default.weight", ".weight")
