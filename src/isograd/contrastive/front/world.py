"""The group of all ranks, for front ends whose callers have no mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group
from isograd.contrastive.losses import Across


def everyone() -> Group:
    """The group of all ranks of the running world; a group of one without torch.distributed."""
    rank, size = raw.world()
    return raw.new_group("world", tuple(range(size)), rank)


def counted(towers: list[Tensor], group: Group) -> Across:
    """Gather how many rows of each tower every rank has."""
    table = torch.stack(raw.gather_list(torch.tensor([len(t) for t in towers], device=towers[0].device), group))
    return Across(group, tuple(tuple(column) for column in table.T.tolist()))
