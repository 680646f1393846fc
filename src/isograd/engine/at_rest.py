"""Where what a rank keeps between two steps lies: for checks of memory (seal.py), and for copies of each step."""

from __future__ import annotations

from torch import Tensor

from isograd.engine.engine import Engine
from isograd.engine.state import _saved_buffers, _state, _stepped


def tensors(engine: Engine) -> dict[str, Tensor]:
    """{key: all that this rank holds of it}: what only a step may change. Memory that two keys share has the first."""
    found = {f"model/{record.name}": engine.held(record.name) for record in engine.table}
    for member, _, name, master in _stepped(engine):
        if master.untyped_storage().data_ptr() != found[f"model/{name}"].untyped_storage().data_ptr():
            found[f"master/{name}"] = master.data
        for entry, value in _state(member, master).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{entry}/{name}"] = value
    return {key: tensor for key, tensor in found.items() if tensor.numel()}


def parameter_of(key: str) -> str:
    """The name of the parameter that a key of `tensors` or `parts` belongs to."""
    return key.split("/", 2 if key.startswith("optimizer/") else 1)[-1]


def places(engine: Engine) -> tuple[int, ...]:
    """Where the tensors lie that `parts` lists: as long as these are the same, so are the parts."""
    kept = [engine.held(record.name) for record in engine.table] + [b for _, b in _saved_buffers(engine.model)]
    for member, _, _, master in _stepped(engine):
        kept += [master, *(value for value in _state(member, master).values() if isinstance(value, Tensor))]
    return tuple(tensor.data_ptr() for tensor in kept)
