"""The group of all ranks, for front ends whose callers know no mesh: they are called the same way in any world."""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group
from isograd.contrastive.losses import Across


def everyone() -> Group:
    rank, size = raw.world()
    return raw.new_group("world", tuple(range(size)), rank)


def counted(towers: list[Tensor], group: Group) -> Across:
    """How many rows of each tower every rank has."""
    table = torch.stack(raw.gather_list(torch.tensor([len(t) for t in towers], device=towers[0].device), group))
    return Across(group, tuple(tuple(column) for column in table.T.tolist()))
