"""What a rank keeps between steps, as named parts of global tensors: what checkpoints write and read.

A key says what a tensor is: "model/NAME" a parameter, "master/NAME" the fp32 rows of a half-precision one,
"optimizer/exp_avg/NAME" (or any other tensor of the optimizer shaped like the parameter), "buffer/NAME". Beside the
tensors there are numbers: steps and hyperparameters of the optimizer, the loss scale.

Each row of each tensor is written by one rank: the owner of the row (`slot.cuts`, the same at every ZeRO stage) among
the ranks whose copy stands for its replicas and ties (`contract.counted_here`). What a rank holds and what it writes
are therefore boxes of a global tensor under every layout, and any other layout can read its own boxes from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isograd.contract import contracts
from isograd.engine.plan import Slot, slot_of
from isograd.errors import EngineError
from isograd.mesh import DATA, Mesh

if TYPE_CHECKING:
    from isograd.engine.engine import Engine

Box = tuple[tuple[int, int], ...]

# How an optimizer computes on this machine, which is no part of what it has learned.
HOW = ("fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class Part:
    """A box of a global tensor, and the memory that holds it here. A number is a tensor of one row."""

    key: str
    shape: tuple[int, ...]  # global
    box: Box
    tensor: Tensor
    writes: tuple[int, int]  # the rows of `tensor` that this rank writes; (0, 0): another rank does

    @property
    def written(self) -> tuple[Box, Tensor]:
        """The box and the memory that this rank writes."""
        start, stop = self.writes
        first = self.box[0][0]
        return ((first + start, first + stop), *self.box[1:]), self.tensor[start:stop]


def parts(engine: Engine) -> list[Part]:
    """Everything this rank keeps. At ZeRO 0 to 2 whole parameters of its tensor-parallel part, at 3 rows."""
    slots = {slot.name: slot for slot in engine.plan.slots}
    states = {id(master): found for master, found in _states(engine.optimizer)}
    found = []
    for record in engine.table:
        slot = slots.get(record.name) or slot_of(record, engine.mesh)
        found.append(_part(f"model/{record.name}", slot, engine.held(record.name), engine.mesh))
        master = engine._optimized.masters.get(record.name)
        if master is None:
            continue
        if master.dtype != record.parameter.dtype:
            found.append(_part(f"master/{record.name}", slot, master.data, engine.mesh))
        for name, value in states.get(id(master), {}).items():
            if _is_elementwise(name, value, master):
                found.append(_part(f"optimizer/{name}/{record.name}", slot, value, engine.mesh))
    first = engine.mesh.index(DATA) == 0 and engine.mesh.index("tp") == 0
    for name, buffer in _saved_buffers(engine.model):
        rows = buffer.view(1) if buffer.dim() == 0 else buffer
        box = tuple((0, size) for size in rows.shape)
        found.append(Part(f"buffer/{name}", tuple(buffer.shape), box, rows, (0, len(rows) if first else 0)))
    return [part for part in found if math.prod(part.shape)]


def parts_of_model(model: nn.Module, mesh: Mesh) -> list[Part]:
    """The parameters of a model that no engine holds."""
    records = contracts(model, mesh)
    return [_part(f"model/{r.name}", slot_of(r, mesh), r.parameter.data, mesh) for r in records]


def _part(key: str, slot: Slot, tensor: Tensor, mesh: Mesh) -> Part:
    """`tensor` is this rank's whole part of the parameter, or its rows of it."""
    whole = list(slot.contract.local(mesh)) or [(0, 1)]
    tensor = tensor.view(1) if tensor.dim() == 0 else tensor
    start, stop = slot.cuts[slot.owner : slot.owner + 2]
    first, last = whole[0]
    if len(tensor) != last - first:
        whole[0] = (first + start, first + stop)
        start, stop = 0, stop - start
    writes = (start, stop) if slot.contract.counted_here(mesh) else (0, 0)
    return Part(key, slot.contract.shape, tuple(whole), tensor, writes)


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that a state dict would have, under the same names; one that two modules share once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, buffer in module.named_buffers(prefix, recurse=False):
            if leaf.rpartition(".")[2] not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield leaf, buffer


# -- the optimizer ---------------------------------------------------------------------------------------------------


def single(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that one made of several consists of."""
    inner = getattr(optimizer, "optimizers", None)
    return [optimizer] if inner is None else [one for each in inner for one in single(each)]


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for one in single(optimizer):
        yield from one.state.items()


def _is_elementwise(name: str, value: object, master: Tensor) -> bool:
    """'step' counts steps, also of a parameter that is one number."""
    return isinstance(value, Tensor) and value.shape == master.shape and name != "step"


def numbers(engine: Engine) -> dict[str, Any]:
    """What is no tensor of a parameter's shape, as JSON."""
    names = {id(master): name for name, master in engine._optimized.masters.items()}
    groups: list[dict[str, Any]] = []
    counts: dict[str, dict[str, Any]] = {}
    for optimizer in single(engine.optimizer):
        for group in optimizer.param_groups:
            options = {k: _plain(v) for k, v in group.items() if k != "params" and k not in HOW and _is_plain(v)}
            own = [names[id(p)] for p in group["params"]]
            groups.append({"kind": type(optimizer).__name__, "options": options, "names": own})
            for master in group["params"]:
                for key, value in optimizer.state.get(master, {}).items():
                    if value is not None and not _is_elementwise(key, value, master):
                        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else None
                        counts.setdefault(key, {})[names[id(master)]] = (_number(key, value, names[id(master)]), dtype)
    scale = engine.loss_scale
    return {
        "groups": groups,
        "counts": counts,
        "loss_scale": {"value": scale.value, "good_steps": scale.good_steps} if scale else None,
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str) or (
        isinstance(value, Tensor) and value.numel() == 1
    )  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.item() if isinstance(value, Tensor) else value


def _number(key: str, value: object, name: str) -> Any:
    if not _is_plain(value) or isinstance(value, list | tuple):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise EngineError(
            "IG540",
            f"the optimizer keeps a {key!r} that rows of a parameter cannot be found in",
            seen=f"{shape} for {name!r}",
            expected="tensors of the parameter's shape, and numbers: AdamW, SGD, Muon, ...",
            fix="take an elementwise optimizer; others cannot be cut into rows, neither in memory nor in a checkpoint",
        )
    return _plain(value)


def make_room(engine: Engine, saved: Mapping[str, Mapping[str, torch.dtype]]) -> None:
    """Give the optimizer state of these names and dtypes: {parameter: {name: dtype}}. Memory that fits is kept."""
    names = {id(master): name for name, master in engine._optimized.masters.items()}
    for optimizer in single(engine.optimizer):
        for master in [p for group in optimizer.param_groups for p in group["params"]]:
            before = optimizer.state.pop(master, {})
            for name, dtype in saved.get(names[id(master)], {}).items():
                old = before.get(name)
                fits = isinstance(old, Tensor) and old.shape == master.shape and old.dtype == dtype
                optimizer.state[master][name] = old if fits else torch.zeros_like(master.data, dtype=dtype)


def take_numbers(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Numbers as `numbers` gave them, of all ranks together: `groups` and `counts` know every parameter."""
    names = {id(master): name for name, master in engine._optimized.masters.items()}
    options = {name: group["options"] for group in saved["groups"] for name in group["names"]}
    for optimizer in single(engine.optimizer):
        for group in optimizer.param_groups:
            own = options[names[id(group["params"][0])]] if group["params"] else {}
            for key, value in own.items():
                group[key] = _like(group.get(key), value)
            on_device = group.get("fused") or group.get("capturable")
            for master in group["params"]:
                for key, counted in saved["counts"].items():
                    if names[id(master)] in counted:
                        value, dtype = counted[names[id(master)]]
                        device = master.device if on_device else torch.device("cpu")
                        if dtype is not None:
                            value = torch.tensor(value, dtype=getattr(torch, dtype), device=device)
                        optimizer.state[master][key] = value
    if engine.loss_scale and saved["loss_scale"]:
        engine.loss_scale.value = saved["loss_scale"]["value"]
        engine.loss_scale.good_steps = saved["loss_scale"]["good_steps"]


def _like(before: Any, value: Any) -> Any:
    """JSON has no tuples, and a learning rate may be a tensor that a captured graph reads."""
    if isinstance(before, Tensor):
        return before.fill_(value)
    return tuple(value) if isinstance(before, tuple) else value


# -- between saving and loading --------------------------------------------------------------------------------------


def is_between_steps(engine: Engine) -> bool:
    """Whether nothing of a step is under way: a gradient is not part of what is kept."""
    return not engine._losses and not engine._reducer.pending()


@torch.no_grad()
def settle(engine: Engine) -> None:
    """After tensors were read into parts: what is kept twice becomes equal again."""
    for slot in engine.plan.slots:
        master, kept = engine._optimized.masters[slot.name], engine.held(slot.name)
        rows = kept if kept.shape == master.shape else slot.rows(kept)
        if master.dtype == rows.dtype and master.device != rows.device:  # offloaded fp32
            master.copy_(rows)
    if engine._units is not None:
        engine._units.stepped()
