"""What is the same on every rank of a cp group: the sequences that come in, and the logits that go out."""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.comm.fingerprint import fingerprint, ranks_unlike
from isograd.errors import ModelError
from isograd.mesh import Mesh
from isograd.sequence.places import Places


def gather_whole(x: Tensor, mesh: Mesh, places: Places) -> Tensor:
    """My part [b, local, ...] -> [b, length, ...] in global order on every cp rank.

    V -> R, with the sum as adjoint: cp is a data axis. A loss of the whole sequences, computed on every cp rank, is
    weighed once by each of them, and so must its gradient be.
    """
    return places.unshard(ops.all_gather(x, mesh.group("cp"), 1))


@torch.no_grad()
def refuse_unlike(mesh: Mesh, *tensors: Tensor | None) -> None:
    """All ranks of a cp group are given the same whole sequences: attention would join parts of different ones."""
    mine = torch.stack([fingerprint(t) for t in tensors if t is not None])
    unlike = ranks_unlike(mine, mesh.group("cp"))
    if unlike:
        raise ModelError(
            "IG414",
            "ranks of one cp group were given different sequences",
            seen=f"tokens, labels or documents unlike those of ranks {unlike}",
            expected="the same whole sequences on every rank of a cp group: the model takes its own part of each",
            fix="index the data by mesh.index('dp'), not by mesh.index('dp cp') or the global rank",
            where=mesh.where(),
        )
