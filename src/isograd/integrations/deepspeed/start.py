"""What a script of DeepSpeed's calls before its loop: `initialize`, `init_distributed`, `add_config_arguments`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from isograd.core.mesh import Mesh
from isograd.integrations.deepspeed.loop import LoopEngine
from isograd.integrations.deepspeed.pipe import PipelineModule
from isograd.integrations.deepspeed.pipe_engine import PipelineEngine
from isograd.integrations.deepspeed.settings import read, refuse
from isograd.integrations.optimizer import EngineOptimizer
from isograd.integrations.world import mesh_for
from isograd.io.untrusted import CONFIG, read_json


def init_distributed(*_: Any, **__: Any) -> None:
    """Joins the world that torchrun has started, as `initialize` does; the arguments are DeepSpeed's."""
    mesh_for(None)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """DeepSpeed's options of a command line: --deepspeed, --deepspeed_config FILE."""
    group = parser.add_argument_group("DeepSpeed", "with isograd.integrations.deepspeed")
    group.add_argument("--deepspeed", action="store_true", help="taken, and of no effect")
    group.add_argument("--deepspeed_config", type=str, default=None, help="DeepSpeed's JSON file")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    *,
    layout: str | None = None,
) -> tuple[LoopEngine, EngineOptimizer, DataLoader[Any] | None, Any]:
    """(engine, optimizer, loader, scheduler), as deepspeed.initialize; the arguments are the same.

    The config's ZeRO stage is the layout, over all ranks that torchrun has started, and the sizes of its
    sequence_parallel_size and autotp_size, of an mpu, or of a mesh_param. layout: "dp2 tp2 sp zero1" and the like says
    the same in isograd's words, and dp, cp, tp and ep. What cannot be kept is refused.
    """
    mesh = mesh_for(None)
    given = next(
        (one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None), None
    )
    if given is None:
        refuse("no config", "config=..., a file or a dict; or args.deepspeed_config", mesh)
    if not isinstance(given, str | Path | Mapping):
        refuse(f"a {type(given).__name__} as config", "a file, or a dict", mesh)
    if not isinstance(model, nn.Module) or hasattr(model, "mpu"):
        refuse(f"a {type(model).__name__} as model", "an nn.Module, or a PipelineModule of deepspeed.pipe here", mesh)
    values = dict(given) if isinstance(given, Mapping) else read_json(given, CONFIG, follow=True)
    words, axes, kind = _layout_of_groups(layout, mpu, mesh_param, mesh), "dp cp tp ep", LoopEngine
    if isinstance(model, PipelineModule):
        if words:
            refuse("layout, mpu or mesh_param with a PipelineModule", "PipelineModule(..., topology=...)", mesh)
        cut = model.mesh.layout
        words, axes, kind = str(cut) if cut.world_size > 1 else "", "dp tp pp", PipelineEngine
    settings = read(values, mesh.layout.world_size, words)
    if kind is PipelineEngine and settings.stage > 1:
        seen = f"stage {settings.stage} with a PipelineModule, whose gradients add up whole over its micro-batches"
        refuse(seen, '"zero_optimization": {"stage": 1}', mesh)
    mesh = mesh_for(settings.layout, axes)
    for axis, names in GROUPS.items():
        rank = _ask(mpu, names, "rank")
        if rank not in (None, mesh.index(axis)):
            seen = f"an mpu whose {names[0]} groups are not those of {str(mesh.layout)!r}: it is rank {rank} of one"
            refuse(seen, f"rank {mesh.index(axis)}, as tp ranks are neighbours, and then cp ranks", mesh)
    engine = kind(model, settings, mesh, optimizer, model_parameters, lr_scheduler)
    if training_data is not None:
        engine.set_dataloader(engine.deepspeed_io(training_data, collate_fn=collate_fn))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


GROUPS = {"cp": ("sequence",), "tp": ("tensor_model", "model"), "pp": ("pipeline_model", "pipe")}  # as an mpu has them


def _ask(mpu: Any, names: tuple[str, ...], what: str) -> int | None:
    """The rank or the world_size of this rank in one of an mpu's groups; None: it has no such groups."""
    asked = (getattr(mpu, f"get_{name}_parallel_{what}", None) for name in names)
    return next((int(ask()) for ask in asked if ask is not None), None)


def _layout_of_groups(layout: str | None, mpu: Any, mesh_param: Any, mesh: Mesh) -> str:
    """In words: a layout, or DeepSpeed's own: an mpu with groups, (data, sequence) sizes."""
    if (layout is not None) + (mpu is not None) + (mesh_param is not None) > 1:
        refuse("two of layout, mpu and mesh_param", "one of them, or the sizes in the config", mesh)
    if mesh_param is not None:
        return f"dp{int(mesh_param[0])} cp{int(mesh_param[1])}"
    sizes = {axis: _ask(mpu, names, "world_size") for axis, names in GROUPS.items()}
    if mpu is not None and (set(sizes.values()) == {None} or (sizes["pp"] or 1) > 1):
        refuse(
            "an mpu without groups, or with a pipeline",
            "get_sequence_parallel_world_size() or get_tensor_model_parallel_world_size()",
            mesh,
        )
    return layout or " ".join(f"{axis}{size}" for axis, size in sizes.items() if size is not None)
