"""Whole tensors on rank 0, one at a time, from the rows that all ranks hold: for exports.

Who writes which box in a checkpoint sends that box here. So every row travels once, under every layout and ZeRO stage,
and no rank but the first ever holds more than its own part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from isograd.checkpoint.files import DTYPES, TORCH, TensorEntry
from isograd.checkpoint.manifest import Box
from isograd.comm import raw
from isograd.comm.consensus import all_gather_object
from isograd.core.mesh import Mesh
from isograd.engine.state import Part


class Gathered:
    """Which rank holds which box of each tensor, and a way to have each tensor whole on rank 0."""

    def __init__(self, parts: Sequence[Part], mesh: Mesh) -> None:
        """All ranks learn who holds what."""
        self.mesh = mesh
        self._mine = {part.key: part.written for part in parts if part.writes[0] < part.writes[1]}
        note = {p.key: [p.shape, DTYPES[p.tensor.dtype], p.written[0]] for p in parts if p.key in self._mine}
        self._holders: dict[str, list[tuple[int, Box]]] = {}
        self.entries: dict[str, TensorEntry] = {}
        for rank, said in enumerate(all_gather_object(note, mesh)):
            for key, (shape, dtype, box) in said.items():
                known = self._holders.setdefault(key, [])
                spelled = tuple((start, stop) for start, stop in box)
                if spelled not in [other for _, other in known]:  # stages of a pipeline may hold the same buffer
                    known.append((rank, spelled))
                self.entries[key] = TensorEntry(key, dtype, tuple(shape))

    @torch.no_grad()
    def to_rank_0(self, keys: Iterable[str]) -> Iterator[Tensor]:
        """On rank 0 each tensor in turn; elsewhere an empty one. All ranks iterate over the same keys."""
        for key in keys:
            yield self._receive(key) if self.mesh.rank == 0 else self._send(key)

    def _receive(self, key: str) -> Tensor:
        entry, world = self.entries[key], self.mesh.group("world")
        whole = torch.empty(entry.shape or (1,), dtype=TORCH[entry.dtype])
        for rank, box in self._holders[key]:
            place = whole[tuple(slice(start, stop) for start, stop in box)]
            if rank == 0:
                place.copy_(self._mine[key][1])
            else:
                arrived = torch.empty(place.shape, dtype=whole.dtype, device=self.mesh.device)
                raw.receive_start([arrived], world, rank).wait()
                place.copy_(arrived)
        return whole.view(entry.shape)

    def _send(self, key: str) -> Tensor:
        if key in self._mine and (self.mesh.rank, self._mine[key][0]) in self._holders[key]:
            tensor = self._mine[key][1].to(self.mesh.device).contiguous()
            raw.send_start([tensor], self.mesh.group("world"), 0).wait()
        return torch.empty(0)
