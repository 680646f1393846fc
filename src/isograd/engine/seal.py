"""What a rank keeps from one step to the next has a seal: a checksum of every tensor, of which a changed bit is found.

Between the end of a step and the optimizer of the next one nothing may change parameters, their fp32 rows, or the
optimizer's state: rows that one rank alone holds are no exception, and no other rank is needed to see it.

    seal = Seal(engine)
    seal.set()                 # after a step: the checksums of this rank's tensors
    engine.accumulate(batch)   # the next one
    seal.check()               # on all ranks: IG583 names what has changed, and where
    engine.step()

    engine.discard()           # after IG583, on all ranks
    seal.restore(copies)       # from ranks that hold the same tensor, or from a copy; what remains changed
    engine.accumulate(batch)   # and the step again

The checksum is the sum of a tensor's 8-byte words: any change within one word is found for certain. What is restored
has the checksum of before, or it counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.fingerprint import checksum
from isograd.comm.notes import gather_notes
from isograd.engine import at_rest
from isograd.engine.engine import Engine
from isograd.engine.plan import slot_of
from isograd.errors import EngineError

SHOWN = 6


class Seal:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self._sums: dict[str, int] = {}
        self._changed: list[list[str]] = []  # by rank, what the last check found

    def set(self) -> None:
        """What this rank holds now is what the next check expects. No message."""
        self._sums = _sums(at_rest.tensors(self.engine))

    def check(self) -> None:
        """Before the optimizer, on all ranks, which have all called `set`: raise when something has changed on any."""
        mine = self._broken(self._sums)
        world = self.mesh.group("world")
        anywhere = raw.all_max(torch.tensor([float(bool(mine))], device=self.mesh.device), world)
        if not bool(anywhere):
            return
        self._changed = gather_notes(mine, world, self.mesh.device)
        raise EngineError(
            "IG583", "what a rank keeps has changed between two steps", seen=_spelled(self._changed),
            expected="the bits that the step before has left",
            fix="engine.discard() on all ranks, Seal.restore, and the step again; or resume from the last checkpoint; "
            "if it happens again, leave that machine out: its memory is faulty", where=self.mesh.where(),
        )  # fmt: skip

    @torch.no_grad()
    def restore(self, from_copy: Callable[[Iterable[str]], None] | None = None) -> str:
        """On all ranks, after `check` has raised: bring back what has changed. Returns what could not be; "": nothing.

        from_copy: brings back rows of these tensors that this rank alone holds, from a copy of its own.
        """
        rank = self.mesh.rank
        if from_copy is not None:
            from_copy(self._changed[rank])
        held = at_rest.tensors(self.engine)
        for to, keys in enumerate(self._changed):
            for key in keys:
                self._from_replica(key, to, held)
        left = self._broken(self._changed[rank])
        return _spelled(gather_notes(left, self.mesh.group("world"), self.mesh.device))

    def _from_replica(self, key: str, to: int, held: dict[str, Tensor]) -> None:
        """Send a tensor to a rank from the first one that holds all of it, too, and has it unchanged."""
        zero = self.mesh.layout.zero
        record = self.engine.table.records.get(at_rest.parameter_of(key))
        if record is None or zero == 3 or (zero > 0 and not key.startswith("model/")):
            return
        group = slot_of(record, self.mesh).owners
        healthy = [rank for rank in group.ranks if key not in self._changed[rank]]
        if to not in group.ranks or not healthy or key not in held or self.mesh.rank not in (to, healthy[0]):
            return
        if self.mesh.rank == to:
            arrived = torch.empty_like(held[key], memory_format=torch.contiguous_format)
            raw.receive_start([arrived], group, group.ranks.index(healthy[0])).wait()
            held[key].copy_(arrived)
        else:
            raw.send_start([held[key].contiguous()], group, group.ranks.index(to)).wait()

    def _broken(self, keys: Iterable[str]) -> list[str]:
        held = at_rest.tensors(self.engine)
        now = _sums({key: held[key] for key in keys if key in held})
        return [key for key in keys if now.get(key) != self._sums[key]]


def _sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """One wait for each device, not for each tensor."""
    found: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {key: checksum(tensor) for key, tensor in tensors.items() if tensor.device == device}
        found |= dict(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
    return found


def _spelled(changed: list[list[str]]) -> str:
    words = [f"{key} on rank {rank}" for rank, keys in enumerate(changed) for key in keys]
    return "; ".join(words[:SHOWN]) + (f"; {len(words) - SHOWN} more" if len(words) > SHOWN else "")
