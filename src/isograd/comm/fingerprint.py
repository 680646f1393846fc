"""A fingerprint of a tensor's contents: ranks compare fingerprints where their tensors must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from isograd.comm import raw
from isograd.comm.group import Group

_LINE = 1024  # words of 8 bytes
_BLOCK = 32 * 8 * _LINE  # bytes that a CPU reads at a time, twice: small enough for its cache
_MIX = 0x9E3779B97F4A7C1  # odd


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 that depends on the shape, and on every bit and its place: `fingerprints` says how."""
    return fingerprints([tensor])[0]


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """An int64 of each, on the device on which all of them are, with as few calls for many as for one.

    A tensor's bytes are lines of 1,024 words of 8 bytes. What is added up is every line and every column; each sum is
    mixed with its place, so that a change of a sum, and sums that change places, are found but for one case in 2^60 or
    so. A tensor of one line is mixed word by word. A change that leaves each line's and each column's sum as it was is
    not seen: no single word and no pair of words is of that kind.
    """
    sums = [_sums(tensor) for tensor in tensors]
    lengths = [len(each) for each in sums]
    places = torch.arange(max(lengths), device=sums[0].device) * _MIX
    mixed = torch.cat(sums) + torch.cat([places[:length] for length in lengths])
    for shift in (32, 29):  # as splitmix64: no two values have one result
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _MIX
    return torch.stack([m.sum() + _shape(t) for m, t in zip(mixed.split(lengths), tensors, strict=True)])


def _sums(tensor: Tensor) -> Tensor:
    """Of the columns of a tensor's words, and of its lines; the words themselves if they are one line."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(data) // (8 * _LINE) * 8 * _LINE
    if whole == 0:
        return _words(data)
    rest = _words(data[whole:])
    columns, lines = F.pad(rest, (0, _LINE - len(rest))), [rest.sum().view(1)]
    for block in data[:whole].split(_BLOCK if tensor.device.type == "cpu" else whole):
        words = _words(block).view(-1, _LINE)
        columns = columns + words.sum(0)
        lines.append(words.sum(1))
    return torch.cat([columns, *lines])


def _words(data: Tensor) -> Tensor:
    if len(data) % 8 or torch.compiler.is_compiling() or data.storage_offset() % 8:  # which a compiler does not know
        data = F.pad(data, (0, -len(data) % 8))
    return data.view(torch.int64)


def _shape(tensor: Tensor) -> int:
    number: int = sum(_MIX**n * (size + 1) for n, size in enumerate((tensor.dim(), *tensor.shape), 1))
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)  # signed


def first_unlike(mine: Mapping[str, Tensor], group: Group) -> tuple[int, list[str]] | None:
    """The global rank of the first member whose tensors differ from mine, and the names of those; None if all agree."""
    names = list(mine)
    prints = fingerprints([mine[name] for name in names])
    for rank, other in zip(group.ranks, raw.gather_list(prints, group), strict=True):
        if other is not prints and not torch.equal(other, prints):
            return rank, [name for name, a, b in zip(names, prints, other, strict=True) if a != b]
    return None


def ranks_unlike(mine: Tensor, group: Group) -> list[int]:
    """The global ranks of the members whose tensor differs from mine; the shape must be the same on all."""
    others = zip(group.ranks, raw.gather_list(mine, group), strict=True)
    return [rank for rank, other in others if not torch.equal(other, mine)]
