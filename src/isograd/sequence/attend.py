"""Causal attention over sequences cut over cp: Ulysses, a ring, or a ring of Ulysses blocks, as the layout says.

cp4 ulysses     one exchange within all 4, then whole sequences on a quarter of the heads
cp4 ring        blocks of keys travel around all 4
cp4 ulysses2    an exchange within 2 neighbours (group 'cp/2'), then a ring of 2 (group 'cp%2') on half the heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.comm.fingerprint import fingerprint, ranks_unlike
from isograd.core.mesh import Mesh
from isograd.errors import ModelError
from isograd.sequence import ring, ulysses
from isograd.sequence.token_layout import TokenLayout, lay_out_tokens


def token_layout_for(length: int, rows: int, mesh: Mesh) -> TokenLayout:
    """Which rank holds which tokens of `rows` sequences of `length`; under sp, tp divides the local tokens."""
    layout = mesh.layout
    return lay_out_tokens(
        length, ulysses=layout.ulysses, ring=layout.ring, rows=rows, multiple=layout.tp if layout.sp else 1
    )


def heads_here(heads: int, kv_heads: int, mesh: Mesh) -> tuple[int, int]:
    """(start, stop): which of the query heads that this rank projects it attends with."""
    group = mesh.group(f"cp/{mesh.layout.ulysses}")
    return ulysses.assign_heads(heads, kv_heads, group.size).queries[group.index]


@ops.uncompiled
def attend(
    whole: ulysses.Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh,
    places: TokenLayout,
    starts: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [b, local, heads, d]; k, v [b, local, kv_heads, d], my tokens of each sequence -> [b, local, heads, d].

    `whole` attends over whole sequences, [b, s, heads, d] of some heads. It is used where there is no ring, and may be
    any function (with masks, dropout, documents). A ring has its own arithmetic and needs only `starts`, the beginnings
    of documents, `scale`, if it is not 1 / sqrt(d), the `window` and the cap on scores.
    """
    layout = mesh.layout
    neighbours, circle = mesh.group(f"cp/{layout.ulysses}"), mesh.group(f"cp%{layout.ulysses}")

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return ring.attention(q, k, v, circle, places, starts, scale, window, softcap).transpose(1, 2)

    return ulysses.attention(whole if circle.size == 1 else around, q, k, v, neighbours)


def gather_whole(x: Tensor, mesh: Mesh, places: TokenLayout) -> Tensor:
    """My part [b, local, ...] -> [b, length, ...] in global order on every cp rank.

    V -> R, with the sum as adjoint: cp is a data axis. A loss of the whole sequences that every cp rank computes enters
    the step once per rank, with each rank's weight; its gradients are summed in the same way.
    """
    return places.unshard(ops.all_gather(x, mesh.group("cp"), 1))


@torch.no_grad()
def refuse_unlike(mesh: Mesh, *tensors: Tensor | None, axis: str = "cp") -> None:
    """Refuse different sequences on the ranks of a cp group: attention would join parts of different texts. So it is
    with a tp group."""
    mine = torch.stack([fingerprint(t) for t in tensors if t is not None])
    unlike = ranks_unlike(mine, mesh.group(axis))
    if unlike:
        raise ModelError("IG414", where=mesh.describe_rank(), unlike=unlike)
