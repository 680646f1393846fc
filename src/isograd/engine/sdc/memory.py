"""A fingerprint of every tensor that a rank keeps from one step to the next, by which a changed bit is found.

Between the end of a step and the optimizer of the next one nothing may change parameters, their fp32 rows, or the
optimizer's state: rows that one rank alone holds are no exception, and no other rank is needed to see it.

    seal = MemoryChecksum(engine)   # after a step: the fingerprints of this rank's tensors
    engine.accumulate(batch)   # the next one
    seal.check()               # on all ranks: IG583 names what has changed, and where
    engine.step()

    engine.discard()           # after IG583, on all ranks
    seal.restore(copies)       # from ranks that hold the same tensor, or from a copy; what remains changed
    engine.accumulate(batch)   # and the step again

What is restored has the fingerprint of before, or it counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.comm.fingerprint import fingerprints
from isograd.engine.engine import Engine
from isograd.engine.plan import slot_of
from isograd.engine.state import _saved_buffers, _state, _stepped
from isograd.errors import EngineError

SHOWN = 6


class MemoryChecksum:
    """Of what this rank holds when it is made: no message, and no wait for a device."""

    def __init__(self, engine: Engine, *, optimizer: bool = True) -> None:
        """`optimizer`: its state, too; else parameters and their fp32 rows alone."""
        self.engine, self.mesh, self._optimizer = engine, engine.mesh, optimizer
        self._prints = _fingerprints(self._tensors())

    def check(self) -> None:
        """Before the optimizer, on all ranks: raise when something has changed on any."""
        now, mine = _fingerprints(self._tensors()), torch.zeros(1, device=self.mesh.device)
        for device, before in self._prints.items():
            same = device in now and now[device].keys == before.keys
            changed = (now[device].values != before.values).any().to(mine) if same else torch.ones_like(mine)
            mine = torch.maximum(mine, changed)
        if bool(raw.all_max(mine, self.mesh.group("world"))):
            raise EngineError("IG583", seen=_spelled(self._changed()), where=self.mesh.describe_rank())

    def _changed(self) -> list[list[str]]:
        """By rank, on all of them."""
        return all_gather_object(self._broken(self._expected()), self.mesh)

    def _tensors(self) -> dict[str, Tensor]:
        held = tensors(self.engine)
        return held if self._optimizer else {key: t for key, t in held.items() if not key.startswith("optimizer/")}

    def _expected(self) -> dict[str, int]:
        return {key: value for each in self._prints.values() for key, value in each.by_key().items()}

    @torch.no_grad()
    def restore(self, from_copy: Callable[[Iterable[str]], None] | None = None) -> str:
        """On all ranks, after `check` has raised: bring back what has changed. Returns what could not be; "": nothing.

        from_copy: brings back rows of these tensors that this rank alone holds, from a copy of its own.
        """
        changed, rank = self._changed(), self.mesh.rank
        if from_copy is not None:
            from_copy(changed[rank])
        held = tensors(self.engine)
        for to, keys in enumerate(changed):
            for key in keys:
                self._from_replica(key, to, held, [rank for rank, broken in enumerate(changed) if key not in broken])
        return _spelled(all_gather_object(self._broken(changed[rank]), self.mesh))

    def _from_replica(self, key: str, to: int, held: dict[str, Tensor], right: Sequence[int]) -> None:
        """Send a tensor to a rank from the first one that holds all of it, too, and has it right."""
        zero = self.mesh.layout.zero
        record = self.engine.table.records.get(parameter_of(key))
        if record is None or zero == 3 or (zero > 0 and not key.startswith("model/")):
            return
        group = slot_of(record, self.mesh).owners
        healthy = [rank for rank in group.ranks if rank in right]
        if to not in group.ranks or not healthy or key not in held or self.mesh.rank not in (to, healthy[0]):
            return
        if self.mesh.rank == to:
            arrived = torch.empty_like(held[key], memory_format=torch.contiguous_format)
            raw.receive_start([arrived], group, group.ranks.index(healthy[0])).wait()
            held[key].copy_(arrived)
        else:
            raw.send_start([held[key].contiguous()], group, group.ranks.index(to)).wait()

    def _broken(self, keys: Iterable[str]) -> list[str]:
        held, expected = tensors(self.engine), self._expected()
        found = _fingerprints({key: held[key] for key in keys if key in held})
        now = {key: value for each in found.values() for key, value in each.by_key().items()}
        return [key for key in keys if now.get(key) != expected[key]]


class _Prints(NamedTuple):
    """Of tensors on one device, where they stay until somebody asks."""

    keys: list[str]
    values: Tensor

    def by_key(self) -> dict[str, int]:
        return dict(zip(self.keys, self.values.tolist(), strict=True))


def _fingerprints(tensors: dict[str, Tensor]) -> dict[torch.device, _Prints]:
    by_device: dict[torch.device, list[str]] = {}
    for key, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(key)
    return {device: _Prints(keys, fingerprints([tensors[key] for key in keys])) for device, keys in by_device.items()}


def _spelled(changed: list[list[str]]) -> str:
    words = [f"{key} on rank {rank}" for rank, keys in enumerate(changed) for key in keys]
    return "; ".join(words[:SHOWN]) + (f"; {len(words) - SHOWN} more" if len(words) > SHOWN else "")


def tensors(engine: Engine) -> dict[str, Tensor]:
    """{key: all that this rank holds of it}: what only a step may change. Memory that two keys share has the first."""
    found = {f"model/{record.name}": engine.local_shard(record.name) for record in engine.table}
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
    kept = [engine.local_shard(record.name) for record in engine.table] + [b for _, b in _saved_buffers(engine.model)]
    for member, _, _, master in _stepped(engine):
        kept += [master, *(value for value in _state(member, master).values() if isinstance(value, Tensor))]
    return tuple(tensor.data_ptr() for tensor in kept)
