"""Mutants that talk to the wrong ranks: a collective over tp that runs over the data ranks, and so on.

Numbers of the wrong ranks arrive, in tensors of the right sizes. A message of the wrong length would only show that the
transport ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.core.mesh import Mesh

Broken = Callable[..., Any]

OTHER = {"tp": "dp cp", "dp cp": "tp", "ep": "edp", "edp": "ep"}


MESH: list[Mesh] = []  # the mesh of the case that runs in this rank


def _other_group(group: Group) -> Group:
    """Data ranks for tp, tp for data, my tp group for the world."""
    return MESH[0].group(OTHER.get(group.axes, "tp"))


GATHERS = ("gather", "gather_list")


def gathered(kind: str, found: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """As such a call returns it."""
    return torch.stack(found) if kind == "gather" else found


def regrouped(kind: str) -> Callable[[Broken], Broken]:
    """The same call over the wrong group."""
    if kind in GATHERS:
        return lambda f: (
            lambda x, group, **more: gathered(kind, _repeated([*f(x, _other_group(group), **more)], group.size))
        )
    if kind == "all_reduce":
        return lambda f: lambda x, group: sum(_of_others(x, group))
    if kind == "reduce_rows":
        return lambda f: _rows_of_others
    if kind == "exchange":
        return lambda f: _messages_of_others
    if kind == "uneven all_gather":
        return lambda f: _joined_of_others
    if kind == "exchange_rows":
        return lambda f: lambda x, group, *counts: _values_of_others(f(x, group, *counts), group)
    return lambda f: lambda *a, **k: f(*[_other_group(x) if isinstance(x, Group) else x for x in a], **k)


def _repeated(found: list[torch.Tensor], length: int) -> list[torch.Tensor]:
    return [found[i % len(found)] for i in range(length)]


def _of_others(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """What each member of the wrong group gave, cut or filled with zeros to the size of mine."""
    other = _other_group(group)
    longest = max(int(n) for n in raw.gather_list(torch.tensor(x.numel()), other))
    padded = x.new_zeros(longest)
    padded[: x.numel()] = x.detach().reshape(-1)
    return [t[: x.numel()].view(x.shape) for t in raw.gather_list(padded, other)]


def _rows_of_others(packing: Any, flat: torch.Tensor, group: Group, **_: Any) -> Any:
    total: Any = sum(_of_others(flat, group))
    return Landed([rows.clone() for rows in packing.rows(total.split(packing.sizes)[group.index])])


def _joined_of_others(x: torch.Tensor, group: Group, sizes: tuple[int, ...]) -> torch.Tensor:
    """Members of the wrong group have other numbers of rows: cut, or filled up with zeros."""
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    others = raw.gather_list(padded, _other_group(group))
    return torch.cat([others[i % len(others)][:size] for i, size in enumerate(sizes)])


def _values_of_others(y: torch.Tensor, group: Group) -> torch.Tensor:
    """With the gradient of y: what the next member of the wrong group has in its place."""
    others = _of_others(y, group)
    return y + (others[(_other_group(group).index + 1) % len(others)] - y).detach()


def _messages_of_others(out: Any, into: Any, group: Group, *_: Any) -> Handle:
    """The next member of the wrong group sends what the right group's member should have sent."""
    sent = [t.reshape(-1) for pieces in out for t in pieces]
    targets = [t for pieces in into for t in pieces]
    if sent:
        others = _of_others(torch.cat(sent), group)
        arrived = others[(_other_group(group).index + 1) % len(others)]
        for t in targets:
            t.copy_(arrived.repeat(-(-t.numel() // len(arrived)))[: t.numel()].view(t.shape))
    return Handle()


class Landed:
    """The flight of a bucket that has arrived."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows

    def arrived_within(self, seconds: float) -> bool:
        return True

    def wait(self) -> list[torch.Tensor]:
        return self.rows
