"""A fingerprint of a tensor's contents: ranks compare fingerprints where their tensors must be equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from isograd.comm import raw
from isograd.comm.raw import Group

_CHUNK = 1 << 16  # words at a time: small enough for the cache, and no copy of a large tensor is made
_MIX = 0x9E3779B97F4A7C1  # odd
_STEP = _MIX << 34 | 2 * _CHUNK  # from the weight of a word to that of the same word of the next chunk


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 that depends on the shape, and on every bit and its place.

    The sum of the tensor's 4-byte words, each times an odd weight of 8 bytes that no other place has: the lower 33 bits
    of a weight count places, those above are mixed. A change of one word, two words that are exchanged, and one bit
    that is changed in two words are found for certain (up to 8 GiB); anything else but for one case in 2^30 or so.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 4 or torch.compiler.is_compiling() or data.storage_offset() % 4:  # which a compiler does not know
        data = F.pad(data, (0, -len(data) % 4))
    words = data.view(torch.int32)
    sizes = _signed(sum(_MIX**n * (size + 1) for n, size in enumerate((tensor.dim(), *tensor.shape), 1)))
    total = torch.full((), sizes, dtype=torch.int64, device=tensor.device)  # no wait for a GPU
    place = torch.arange(min(len(words), _CHUNK), device=tensor.device)
    weights = (place * _MIX ^ place << 7) << 33 | place * 2 + 1
    for number in range(-(-len(words) // _CHUNK)):
        chunk = words[number * _CHUNK : (number + 1) * _CHUNK].long()
        total = total + (chunk * weights[: len(chunk)]).sum() + chunk.sum() * _signed(number * _STEP)
    return total


def _signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


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
