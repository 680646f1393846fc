"""A model of transformers on a mesh: built without memory, cut, given its values. Nothing is proven here."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isograd.core.contract import contract_of
from isograd.core.mesh import Mesh
from isograd.engine import empty_parameters
from isograd.engine.zero3.deferred_init import become
from isograd.hf.adapters import AdapterValues, insert
from isograd.hf.context_parallel import attach_attention
from isograd.hf.dependency_probe import probe_dependencies, tiny_model
from isograd.hf.fused_head_loss import FusedHeadLoss, may_join, refuse_logits
from isograd.hf.initial_values import Folder, Present, Random, Source, give_starts
from isograd.hf.losses import CAUSAL, cut_scored_rows, library_of, refuse_cut_sequences, refuse_other_parts
from isograd.hf.quantized import pack_base
from isograd.hf.sequence_parallel import refuse_sequences
from isograd.hf.stages import cut_into_stages
from isograd.hf.tensor_parallel import cut
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.nn.fp32_sums import use_fp32_sums


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
    base_bits: int | None = None,
) -> Any:
    """The model of a config on this mesh, with values from a folder or random ones; nothing is proven."""
    model, loss = empty(config, dtype, mesh)
    source = Random(empty(config, dtype, mesh)[0], seed, noise)
    values: Random | Folder = (
        source if folder is None else Folder(SafetensorsReader(folder), model, mesh.describe_rank())
    )
    _fill_buffers(model, values)
    starts: Source = values
    if adapter is not None:
        insert(model, adapter, dtype, mesh)
        starts = AdapterValues(values, model, adapter, seed, noise)
    fill = mesh.layout.zero != 3 or base_bits is not None
    place(model, loss, mesh, starts, logits=logits, fill=fill, base_bits=base_bits)
    return model


def place(
    model: Any,
    loss: str,
    mesh: Mesh,
    source: Source,
    *,
    logits: bool = False,
    fill: bool = True,
    base_bits: int | None = None,
) -> None:
    """Cut a model whose parameters are on the meta device, and give each rank its values from the source; without
    `fill`, the Engine reads them."""
    library, config = type(model), model.config
    refuse_cut_sequences(loss, library.__name__, mesh)
    refuse_sequences(library, config, loss, mesh)
    joined = None
    if mesh.size("tp") > 1 and not logits and may_join(library, config, loss):
        joined = FusedHeadLoss(mesh, model.loss_function, shifts=loss == CAUSAL)
    cut(model, mesh, joined)
    if mesh.size("pp") > 1:
        cut_into_stages(model, mesh, probe_dependencies(library, config, loss), loss)
    if fill:
        _fill(model, mesh, source, base_bits)
    else:
        give_starts(model, source)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(mesh.device)
    refuse_other_parts(model, loss, mesh)
    if mesh.device.type == "cpu":
        use_fp32_sums(model)
    if mesh.size("cp") > 1:
        with ExitStack() as stack:  # stages and parameters without values cannot be tried: a small copy is
            whole = fill and mesh.size("pp") == 1
            attach_attention(model, mesh, model if whole else stack.enter_context(tiny_model(library, config)))
        cut_scored_rows(model, mesh)
    if joined is not None:
        refuse_logits(model, joined)


def cut_in_place(model: Any, loss: str, mesh: Mesh, logits: bool) -> None:
    """The same of a model that has its values on every rank."""
    values = Present(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), new)
    place(model, loss, mesh, values, logits=logits)


def empty(config: Any, dtype: torch.dtype, mesh: Mesh, library: Any = None) -> tuple[Any, str]:
    """The library's model for a config, of a class that may be given: parameters on the meta device; and its loss."""
    found, loss = library_of(config, mesh.describe_rank())
    with empty_parameters():
        model = (library or found)._from_config(copy.deepcopy(config), dtype=dtype)
    return model.train(), loss


@torch.no_grad()
def _fill(model: nn.Module, mesh: Mesh, source: Source, base_bits: int | None) -> None:
    """Give each parameter the values of this rank's box; what lies under adapters is packed at once."""
    for name, parameter in list(model.named_parameters()):
        contract = contract_of(parameter)
        box = [(0, size) for size in parameter.shape] if contract is None else list(contract.local(mesh))
        become(parameter, source(name, box, mesh.device).to(parameter.dtype))
        if base_bits is not None and name.endswith(".base_layer.weight"):
            pack_base(model, name, base_bits, mesh)


@torch.no_grad()
def _fill_buffers(model: nn.Module, values: Random | Folder) -> None:
    if isinstance(values, Folder):
        kept = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(values.read(name, [(0, size) for size in buffer.shape]))
