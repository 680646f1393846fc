"""Initial values of parameters, computed or read for this rank's part only: for models too large for one rank.

    model = ig.models.Transformer(config, mesh, device="meta")          # its values are functions of name and index
    engine = ig.Engine(model, mesh, ...)

    with ig.empty_parameters():                                         # any nn.Module
        model = AutoModelForCausalLM.from_config(config)
    engine = ig.Engine(model, mesh, ..., weights="folder with safetensors")

A parameter on the meta device has a shape and no memory. The Engine gives it memory: at ZeRO 3 for this rank's rows
only, otherwise for this rank's whole part. At ZeRO 3 no rank holds a whole copy of the model at any moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from isograd.core.contract import Contract, init_fn_of
from isograd.core.contract_table import ContractRow, ContractTable
from isograd.core.mesh import Mesh
from isograd.engine.plan import Slot
from isograd.errors import EngineError, ModelError
from isograd.io.safetensors_reader import SafetensorsReader, Weights


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules built in here have parameters on the meta device. Buffers keep memory and values, because files of
    weights do not hold all of them (rotary frequencies, for example)."""
    here = get_ident()

    def emptied(_: nn.Module, __: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if get_ident() != here or param is None or param.is_meta:
            return None
        return nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


class FirstValues:
    """Makes or reads the initial values of each parameter: all of this rank's part, or some rows of it."""

    def __init__(
        self, model: nn.Module, table: ContractTable, mesh: Mesh, weights: Weights | str | Path | None
    ) -> None:
        """Refuse parameters and buffers that will have no values, before anything is read."""
        self.mesh = mesh
        self.weights = SafetensorsReader(weights) if isinstance(weights, str | Path) else weights
        names: dict[int, list[str]] = {}  # a tied parameter may be stored under any of its names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._stored: dict[str, str | None] = {}
        if self.weights is not None:
            for record in table:
                has = (n for n in names[id(record.parameter)] if self.weights.has(n, record.contract.shape))
                self._stored[record.name] = next(has, None)
        absent = [r.name for r in table if not self._stored.get(r.name)]
        lost = [r.name for r in table if r.name in absent and r.parameter.is_meta and init_fn_of(r.parameter) is None]
        if lost:
            seen = f"device='meta' and no values for {lost[:8]}{' ...' if len(lost) > 8 else ''}"
            raise EngineError("IG503", seen=seen, where=mesh.describe_rank(), count=len(lost))
        if weights and absent and mesh.rank == 0:
            warnings.warn(f"not among the stored weights; these keep the model's own values: {absent}", stacklevel=4)
        bare = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        if bare:
            raise EngineError("IG526", seen=f"device='meta': {bare[:8]}", where=mesh.describe_rank())

    @torch.no_grad()
    def rows(self, record: ContractRow | Slot, cut: tuple[int, ...] | None = None) -> Tensor | None:
        """Initial values of the rows cut[0] to cut[1] (None: all rows) of this rank's part; None when the parameter
        keeps its own values."""
        parameter, contract = record.parameter, record.contract
        box, name, make = _cut(contract, self.mesh, cut), self._stored.get(record.name), init_fn_of(parameter)
        if self.weights is not None and name is not None:
            value = self.weights.read(name, contract.shape, box)
            if parameter.is_floating_point() and not value.is_floating_point():  # quantised, without a word of it
                seen = f"{name} is {value.dtype}"
                raise ModelError("IG420", "these weights are not this model's", seen=seen, expected="numbers in floats")
        elif parameter.is_meta and make is not None:
            value = make(box, self.mesh.device)
        else:
            return None
        value = value.to(self.mesh.device if parameter.is_meta else parameter.device, parameter.dtype)
        return value if value.dim() else value.view(1)[slice(*cut) if cut else slice(None)]

    @torch.no_grad()
    def fill(self, table: ContractTable) -> None:
        """Fill whole parameters, at the ZeRO stages that keep them."""
        for record in table:
            value = self.rows(record)
            if value is None:
                continue
            if record.parameter.is_meta:
                become(record.parameter, value.view(record.parameter.shape))
            else:
                record.parameter.copy_(value.view(record.parameter.shape))

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Read the buffers that are stored, such as running means."""
        saved = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            shape = tuple(buffer.shape)
            if self.weights is not None and name in saved and self.weights.has(name, shape):
                buffer.copy_(self.weights.read(name, shape, [(0, size) for size in shape]))


def _cut(contract: Contract, mesh: Mesh, cut: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """These rows of this rank's part, as a box of the global tensor."""
    box = list(contract.local(mesh))
    if box and cut is not None:
        first = box[0][0]
        box[0] = (first + cut[0], first + cut[1])
    return box


def place(parameter: nn.Parameter, memory: Tensor) -> None:
    """Its numbers lie there from now on. Nothing else of the engine writes `.data`."""
    parameter.data = memory


def become(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter other memory; it stays the same object for everything that refers to it."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, new)
