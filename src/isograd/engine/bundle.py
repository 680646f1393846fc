"""Small parameters of a bucket travel as one tensor, so that Python does no work per parameter and rank.

A bundle is the small tensors of a bucket, flattened, one after the other, and put in the order of their owners: first
all elements that the first owner has, then those of the second. That is a tensor of one dimension whose rows are cut
like any other's, so engine/transport.py moves it like any other. One index orders it, and its inverse undoes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

SMALL = 1 << 12  # elements of a parameter that is bundled
FEW = 8  # as many are not worth it


class Rows(Protocol):
    """Knows who owns which rows of a tensor."""

    def rows(self, tensor: Tensor, owner: int | None = None) -> Tensor:
        """The owner's rows; mine when left out."""
        ...

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """The rows of each owner."""
        ...


@dataclass(frozen=True, eq=False)
class Cut:
    """Who owns which elements of the one tensor."""

    cuts: tuple[int, ...]
    owner: int

    def rows(self, tensor: Tensor, owner: int | None = None) -> Tensor:
        """The owner's elements; mine when left out."""
        owner = self.owner if owner is None else owner
        return tensor[self.cuts[owner] : self.cuts[owner + 1]]

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """The elements of each owner."""
        return cut_at(self.cuts, tensor)


def cut_at(cuts: Sequence[int], tensor: Tensor) -> Sequence[Tensor]:
    """A tensor's rows between each two of these cuts, by one call, however many there are."""
    return tensor.split_with_sizes([stop - start for start, stop in pairwise(cuts)])


class Bundle:
    """The small slots among some slots. `slots`: what travels instead, the large ones and the bundle."""

    def __init__(
        self, slots: Sequence[Rows], like: Sequence[Tensor], cuts: Sequence[tuple[int, ...]], owner: int
    ) -> None:
        """`like`: tensors of the slots' shapes; `cuts`: of their rows."""
        small = [i for i, t in enumerate(like) if t.numel() <= SMALL]
        owners = len(cuts[0]) - 1
        self._small = small if len(small) > FEW and owners > 1 else []
        self._large = [i for i in range(len(like)) if i not in set(self._small)]
        self.slots: list[Rows] = [slots[i] for i in self._large]
        if not self._small:
            return
        order: list[list[Tensor]] = [[] for _ in range(owners)]
        mine, first = [], 0
        for i in self._small:
            width = like[i].numel() // len(like[i]) if like[i].dim() and len(like[i]) else 1
            for who, (start, stop) in enumerate(zip(cuts[i], cuts[i][1:], strict=False)):
                order[who].append(torch.arange(first + start * width, first + stop * width))
            start, stop = cuts[i][owner], cuts[i][owner + 1]
            mine.append((stop - start, *like[i].shape[1:]))
            first += like[i].numel()
        ends = [0]
        for pieces in order:
            ends.append(ends[-1] + sum(map(len, pieces)))
        device = like[0].device
        self._order = torch.cat([piece for pieces in order for piece in pieces]).to(device)
        self._back = torch.empty_like(self._order)
        self._back[self._order] = torch.arange(first, device=device)
        self._shapes = mine
        self._lengths = [torch.Size(shape).numel() for shape in mine]
        self._wholes = [like[i].numel() for i in self._small]
        self.slots.append(Cut(tuple(ends), owner))

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What travels of one tensor per slot: the large ones themselves, and one for the small ones."""
        if not self._small:
            return list(tensors)
        flat = torch.cat([tensors[i].reshape(-1) for i in self._small])
        return [*(tensors[i] for i in self._large), flat[self._order]]

    def names(self, names: Sequence[str]) -> list[list[str]]:
        """The names of the slots that each of `slots` stands for."""
        return [[names[i]] for i in self._large] + ([[names[i] for i in self._small]] if self._small else [])

    def rows(self, travelled: Sequence[Tensor]) -> list[Tensor]:
        """My rows of each slot, from my rows of what has travelled."""
        if not self._small:
            return list(travelled)
        found: dict[int, Tensor] = dict(zip(self._large, travelled, strict=False))
        parts = travelled[-1].split(self._lengths)
        found |= {i: p.view(shape) for i, p, shape in zip(self._small, parts, self._shapes, strict=True)}
        return [found[i] for i in range(len(found))]

    def unpack(self, packed: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Whole tensors out of what has travelled; the large ones are already where they belong."""
        if self._small:
            parts = packed[-1][self._back].split(self._wholes)
            torch._foreach_copy_([tensors[i].view(-1) for i in self._small], list(parts))
