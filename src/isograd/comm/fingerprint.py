"""A fingerprint of a tensor's contents: ranks compare fingerprints where their tensors must be equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isograd.comm import raw
from isograd.comm.raw import Group

_CHUNK = 1 << 16  # elements at a time: small enough for the cache, and no copy of a large tensor is made
_WHOLE_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 that depends on the shape, and on every bit and its place."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_WHOLE_BITS.get(flat.element_size(), torch.int64))
    head = (*tensor.shape, tensor.dim())
    total = torch.full((), _weighed_sizes(head), dtype=torch.int64, device=tensor.device)  # no wait for a GPU
    for start in range(0, len(bits), _CHUNK):
        total = total + _weighed(bits[start : start + _CHUNK].long(), 1 + len(head) + start)
    return total


def checksum(tensor: Tensor) -> Tensor:
    """An int64 that changes with every change of one 8-byte word: the sum of all words, at the speed of memory.

    For one tensor at two times, or two copies of it; it does not depend on the places of words.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = len(data) // 8 * 8
    total = data[:whole].view(torch.int64).sum()
    for place, byte in enumerate(data[whole:].long()):
        total = total + (byte << 8 * place)
    return total


def _weighed(values: Tensor, first: int) -> Tensor:
    place = torch.arange(first, first + len(values), device=values.device)
    return ((values + 1) * (place * 0x9E3779B97F4A7C1 ^ (place << 7))).sum()


def _weighed_sizes(sizes: tuple[int, ...]) -> int:
    """The same of a few numbers that the CPU knows."""
    total = sum((size + 1) * (place * 0x9E3779B97F4A7C1 ^ (place << 7)) for place, size in enumerate(sizes, 1))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def first_unlike(mine: Mapping[str, Tensor], group: Group) -> tuple[int, list[str]] | None:
    """The global rank of the first member whose tensors differ from mine, and the names of those; None if all agree."""
    names = list(mine)
    prints = torch.stack([fingerprint(mine[name]) for name in names])
    for rank, other in zip(group.ranks, raw.gather_list(prints, group), strict=True):
        if other is not prints and not torch.equal(other, prints):
            return rank, [name for name, a, b in zip(names, prints, other, strict=True) if a != b]
    return None


def ranks_unlike(mine: Tensor, group: Group) -> list[int]:
    """The global ranks of the members whose tensor differs from mine; the shape must be the same on all."""
    others = raw.gather_list(mine, group)
    return [
        rank
        for rank, other in zip(group.ranks, others, strict=True)
        if other is not mine and not torch.equal(other, mine)
    ]
