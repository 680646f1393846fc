"""Ulysses: for attention, exchange a cut over the sequence for a cut over heads, and back.

Who owns what, with n ranks of the group and local sequences of s tokens (in rank order: the whole sequence of n * s):

    before and after    rank r holds its s tokens of all heads
    inside attention    rank r holds all n * s tokens of its heads: `deal` says which

1. Pack. q, k and v become one tensor, heads first, in the order of their destinations: the query heads of rank 0 and
   the key and value heads they need, then those of rank 1, ... With fewer key/value heads than ranks, or a number of
   heads that n does not divide, two ranks may need the same key/value head. It is sent to both, and the adjoint of that
   copy (index_select) sums both gradients. Nothing else is sent twice.
2. ONE all-to-all, in the dtype of q, k and v; each rank sends (n - 1) / n of what it packed.
3. `attend`, any function of (q, k, v), runs over the whole sequence in global order and needs to know nothing of cp.
4. One all-to-all of its output back.

Backward runs the same two exchanges in the opposite direction. Elements are moved, never scaled or averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.comm.group import Group, even_sizes
from isograd.errors import ModelError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYOUTS = ("bshd", "sbhd", "bhsd")


@dataclass(frozen=True)
class HeadAssignment:
    """Which heads each rank attends with: (start, stop) of the query heads, and of the key/value heads they need."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]
    share: int  # query heads per key/value head

    @property
    def replicated(self) -> bool:
        """Whether some key/value head is sent to more than one rank."""
        return any(low < before for (_, before), (low, _) in zip(self.keys, self.keys[1:], strict=False))

    def sizes(self) -> list[int]:
        """How many heads are packed for each rank."""
        return [b - a + 2 * (d - c) for (a, b), (c, d) in zip(self.queries, self.keys, strict=True)]

    def key_of_query(self, rank: int) -> list[int] | None:
        """For each query head of `rank`, the index of its key/value head; None when equal runs of heads share one."""
        (first, last), (low, high) = self.queries[rank], self.keys[rank]
        wanted = [head // self.share - low for head in range(first, last)]
        run, odd = divmod(last - first, high - low)
        return None if not odd and wanted == [i // run for i in range(last - first)] else wanted


def assign_heads(heads: int, kv_heads: int, ranks: int) -> HeadAssignment:
    """Distribute query heads as evenly as possible, neighbours together."""
    if heads < ranks:
        raise ModelError("IG407", seen=f"{heads} query heads (of one tp rank)", ranks=ranks, heads=heads)
    share, at = heads // kv_heads, 0
    queries, keys = [], []
    for size in even_sizes(heads, ranks):
        queries.append((at, at + size))
        keys.append((at // share, -(-(at + size) // share)))
        at += size
    return HeadAssignment(tuple(queries), tuple(keys), share)


def attention(attend: Attend, q: Tensor, k: Tensor, v: Tensor, group: Group, layout: str = "bshd") -> Tensor:
    """attend(q, k, v) over the whole sequence; my tokens of the result. `layout`: the order of the dimensions."""
    if layout not in LAYOUTS:
        raise ModelError("IG431", f"unknown order of dimensions {layout!r}", seen=layout, expected=", ".join(LAYOUTS))
    if group.size == 1:
        return attend(q, k, v)
    inward = [layout.index(name) for name in "hbsd"]
    outward = ["hbsd".index(name) for name in layout]
    dealt = assign_heads(q.shape[inward[0]], k.shape[inward[0]], group.size)
    q, k, v = (t.permute(inward) for t in (q, k, v))
    wire = pack(q, k, v, dealt)
    mine = ops.all_to_all(wire, group, 0, 2, split_sizes=dealt.sizes())  # [my heads, b, whole sequence, d]
    parts = unpack(mine, dealt, group.index)
    y = attend(*(t.permute(outward) for t in parts)).permute(inward)
    if y.shape != parts[0].shape:
        seen, expected = (tuple(t.permute(outward).shape) for t in (y, parts[0]))
        raise ModelError("IG432", seen=f"{seen} as {layout!r}", expected=expected, order=", ".join(layout))
    heads = [stop - start for start, stop in dealt.queries]
    return ops.all_to_all(y, group, 2, 0, cat_sizes=heads).permute(outward)


def pack(q: Tensor, k: Tensor, v: Tensor, dealt: HeadAssignment) -> Tensor:
    """[heads, b, s, d] each -> [packed heads, b, s, d], in the order of destinations."""
    counts = [high - low for low, high in dealt.keys]
    if dealt.replicated:
        wanted = torch.tensor([head for low, high in dealt.keys for head in range(low, high)], device=k.device)
        k, v = k.index_select(0, wanted), v.index_select(0, wanted)
    queries = q.split([stop - start for start, stop in dealt.queries])
    return torch.cat([t for three in zip(queries, k.split(counts), v.split(counts), strict=True) for t in three])


def unpack(mine: Tensor, dealt: HeadAssignment, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What arrived, [packed heads of this rank, b, whole sequence, d], as q, k, v with heads in equal runs."""
    (first, last), (low, high) = dealt.queries[rank], dealt.keys[rank]
    q, k, v = mine.split([last - first, high - low, high - low])
    wanted = dealt.key_of_query(rank)
    if wanted is not None:
        index = torch.tensor(wanted, device=mine.device)
        k, v = k.index_select(0, index), v.index_select(0, index)
    return q, k, v
