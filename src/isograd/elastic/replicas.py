"""What needs no copy: under dp and cp alone, at ZeRO 0, every rank holds the whole state.

A rank that lives when another has died offers its own tensors, as they are. They are the state after the last step that
it has finished, unless the optimizer has begun to write since then, during which ranks exchange nothing at ZeRO 0. What
ranks do not have in common, torch's generators and the model's buffers, must not have changed since they were equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from isograd.checkpoint.write import Copied
from isograd.comm.consensus import all_gather_object
from isograd.comm.fingerprint import fingerprint
from isograd.core.mesh import DATA
from isograd.engine import Engine, state
from isograd.engine.state import Part


class Replicas:
    """Of a world whose ranks may all hold the same."""

    def __init__(self, engine: Engine) -> None:
        """All ranks make it together."""
        self.engine, mesh = engine, engine.mesh
        layout = mesh.layout
        alone = layout.zero == 0 and mesh.size(DATA) == layout.world_size and mesh.size("ep") == 1
        self._first, self._writes = self._own(), 0
        self.equal = alone and len(set(all_gather_object(self._first, mesh))) == 1

    def mark(self) -> None:
        """A step has ended."""
        self._writes = self.engine.step_state.now.writes

    def usable(self) -> bool:
        """Whether this rank holds the state after the marked step, and nothing that others do not."""
        return self.equal and self.engine.step_state.now.writes == self._writes and self._own() == self._first

    def _own(self) -> str:
        parts = [part for part in state.parts(self.engine) if part.key.startswith("buffer/")]
        tensors = [part.tensor for part in parts + state.generators(self.engine.mesh)]
        return " ".join(str(int(fingerprint(tensor))) for tensor in tensors)

    def rows(self, declared: state.Declared) -> dict[int, tuple[list[Part], dict[str, Any]]]:
        """Of each rank, what it might write: rank 0 everything, and each the generators of its own."""
        engine, mesh = self.engine, self.engine.mesh
        found = state.parts(engine, state.elementwise(engine, declared))
        every = [replace(part, tensor=part.tensor.detach(), writes=(0, len(part.tensor))) for part in found]
        counts = state.counts(engine, declared, every=True)
        drawn = state.generators(mesh)
        rows: dict[int, tuple[list[Part], dict[str, Any]]] = {}
        for rank in range(mesh.layout.world_size):
            own = [replace(part, key=f"{part.key.rpartition('/')[0]}/{rank:05d}") for part in drawn]
            rows[rank] = (own, {}) if rank else (every + own, counts)
        return rows


def copied(parts: list[Part]) -> list[Copied]:
    """As a checkpoint's writer takes them."""
    return [
        Copied(part.key, part.shape, box, tensor if tensor.device == torch.device("cpu") else tensor.cpu())
        for part in parts
        for box, tensor in [part.written]
        if tensor.numel()
    ]
