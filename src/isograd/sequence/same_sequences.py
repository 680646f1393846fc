"""What is equal on all ranks of a cp group: the whole input sequences, and gathered outputs such as logits."""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.comm.fingerprint import fingerprint, ranks_unlike
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.sequence.token_layout import TokenLayout


def gather_whole(x: Tensor, mesh: Mesh, places: TokenLayout) -> Tensor:
    """My part [b, local, ...] -> [b, length, ...] in global order on every cp rank.

    V -> R, with the sum as adjoint: cp is a data axis. A loss of the whole sequences that every cp rank computes enters
    the step once per rank, with each rank's weight; its gradients are summed in the same way.
    """
    return places.unshard(ops.all_gather(x, mesh.group("cp"), 1))


@torch.no_grad()
def refuse_unlike(mesh: Mesh, *tensors: Tensor | None) -> None:
    """Refuse different sequences on the ranks of a cp group: attention would join parts of different texts."""
    mine = torch.stack([fingerprint(t) for t in tensors if t is not None])
    unlike = ranks_unlike(mine, mesh.group("cp"))
    if unlike:
        raise ModelError("IG414", where=mesh.describe_rank(), unlike=unlike)
