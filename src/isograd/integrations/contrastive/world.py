"""The group of all ranks, for front ends whose callers have no mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import raw, world
from isograd.comm.group import Group
from isograd.comm.world import new_group
from isograd.errors import ContrastiveError
from isograd.losses.contrastive.losses import NegativesScope


def world_group() -> Group:
    """The group of all ranks of the running world; a group of one without torch.distributed."""
    rank, size = world.world()
    return new_group("world", tuple(range(size)), rank)


def count_pairs(towers: list[Tensor], group: Group) -> NegativesScope:
    """How many rows of each tower every rank has. Towers that do not pair up on any rank are refused on all (IG960).

    Vectors of different lengths on two ranks are refused, too: their gather would never end.
    """
    mine = [*(len(t) for t in towers), towers[0].shape[-1]]
    table = raw.gather(torch.tensor(mine, device=towers[0].device), group).tolist()
    here = f"rank {group.ranks[group.index]}"
    for rank, (*rows, width) in zip(group.ranks, table, strict=True):
        if len(rows) < 2 or len({*rows}) > 1:
            raise ContrastiveError("IG960", seen=f"{len(rows)} tower(s) of {rows} rows on rank {rank}", where=here)
        if width != table[0][-1]:
            seen = f"vectors [{table[0][-1]}] on rank {group.ranks[0]}, [{width}] on rank {rank}"
            raise ContrastiveError("IG960", seen=seen, where=here)
    return NegativesScope(group, tuple(zip(*(rows[:-1] for rows in table), strict=True)))
