"""Which rank of the cp axis holds which tokens, as data. Nothing here communicates.

A sequence is cut into `ring` blocks, and each block over `ulysses` neighbours (either may be 1):

    cp 4, length 16                 rank 0        rank 1        rank 2        rank 3
    ulysses   (one block)           0 1 2 3       4 5 6 7       8 9 10 11     12 13 14 15
    ring      (four blocks)         0 1 14 15     2 3 12 13     4 5 10 11     6 7 8 9
    ulysses2  (two blocks)          0 1 2 3       12 13 14 15   4 5 6 7       8 9 10 11

A ring's blocks are in zig-zag order: block r holds chunks r and 2 * ring - 1 - r, an early one and a late one, so that
under a causal mask all blocks cost the same. Inside a block, tokens keep their global order and Ulysses ranks hold
equal contiguous parts of it, so their parts joined in rank order are the block.

Invariant: all ranks hold equally many tokens. Sequences are padded at their END, which no causal token attends to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.errors import ModelError

Spans = tuple[tuple[int, int], ...]  # (start, stop) ranges of global positions, ascending
ORDERS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class TokenLayout:
    """How sequences of one length are cut over the cp axis."""

    length: int  # of the sequences before padding
    ulysses: int  # neighbours that exchange heads
    blocks: tuple[Spans, ...]  # one per member of a ring

    @property
    def ring(self) -> int:
        """The number of members of a ring."""
        return len(self.blocks)

    @property
    def cp(self) -> int:
        """The number of ranks of the cp axis."""
        return self.ulysses * self.ring

    @property
    def padded(self) -> int:
        """The length of the sequences after padding."""
        return sum(stop - start for block in self.blocks for start, stop in block)

    @property
    def local(self) -> int:
        """How many tokens of a sequence each rank holds."""
        return self.padded // self.cp

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """The ranges of global positions that each cp rank holds."""
        parts = range(self.ulysses)
        return tuple(_cut(block, part * self.local, (part + 1) * self.local) for block in self.blocks for part in parts)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions [local] of the tokens of cp rank `rank`, in the order it holds them."""
        return positions_of(self.spans[rank], device)

    def pad(self, x: Tensor, value: int | float = 0) -> Tensor:
        """x [b, length, ...] -> [b, padded, ...]."""
        extra = self.padded - x.shape[1]
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, extra), value=value) if extra else x

    def shard(self, x: Tensor, rank: int, pad: int | float = 0) -> Tensor:
        """The part [b, local, ...] of x [b, length, ...] that cp rank `rank` holds."""
        x = self.pad(x, pad)
        parts = [x[:, start:stop] for start, stop in self.spans[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def unshard(self, joined: Tensor) -> Tensor:
        """All ranks' parts, joined along dim 1 in rank order -> [b, length, ...] in global order, without pads."""
        if self.cp == 1:
            return joined[:, : self.length]
        held = torch.cat([self.positions(rank, joined.device) for rank in range(self.cp)])
        return joined.index_select(1, held.argsort()[: self.length])


def lay_out_tokens(
    length: int,
    *,
    ulysses: int = 1,
    ring: int = 1,
    order: str = "zigzag",
    rows: int = 1,
    multiple: int = 1,
) -> TokenLayout:
    """TokenLayout for `rows` sequences of `length`. `multiple` divides the tokens of a rank, flattened (for sp)."""
    if order not in ORDERS:
        raise ModelError("IG430", seen=order, expected=" or ".join(ORDERS), order=order)
    paired = order == "zigzag" and ring > 1
    unit = ring * (math.lcm(2, ulysses) if paired else ulysses)
    padded = -(-length // unit) * unit
    while rows * (padded // (ring * ulysses)) % multiple:
        padded += unit
    chunk = padded // (2 * ring if paired else ring)
    numbers = [(r, 2 * ring - 1 - r) if paired else (r,) for r in range(ring)]
    blocks = tuple(_joined(tuple((n * chunk, (n + 1) * chunk) for n in pair)) for pair in numbers)
    return TokenLayout(length, ulysses, blocks)


def _joined(spans: Spans) -> Spans:
    """The same positions, with adjacent spans merged."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _cut(spans: Spans, first: int, last: int) -> Spans:
    """The spans of elements first to last, counted along `spans`."""
    found, at = [], 0
    for start, stop in spans:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return tuple(found)


def positions_of(spans: Spans, device: torch.device | str | None = None) -> Tensor:
    """All positions of some spans, in their order."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


@dataclass(frozen=True)
class BlockMask:
    """Queries start..stop of my block attend to the first `keys` keys of another; causal: each up to itself."""

    start: int
    stop: int
    keys: int
    causal: bool = False


def block_masks(mine: Spans, theirs: Spans, window: int | None = None) -> tuple[BlockMask, ...]:
    """Which queries of one block attend to which keys of another under the causal mask; () for none.

    Spans of different blocks lie entirely before or after each other, so a query attends to a prefix of the keys. Spans
    of queries that see none of them through the `window` are left out.
    """
    if mine == theirs:
        rows = sum(stop - start for start, stop in mine)
        return (BlockMask(0, rows, rows, causal=True),)
    found: list[BlockMask] = []
    at = 0
    for start, stop in mine:
        before = [(a, b) for a, b in theirs if b <= start]
        keys = sum(b - a for a, b in before)
        if window is not None and all(start - b + 1 >= window for _, b in before):
            keys = 0
        if keys and found and found[-1].keys == keys and found[-1].stop == at:
            found[-1] = BlockMask(found[-1].start, at + stop - start, keys)
        elif keys:
            found.append(BlockMask(at, at + stop - start, keys))
        at += stop - start
    return tuple(found)


def visible_keys(mine: Spans, theirs: Spans, window: int | None = None) -> int:
    """How many leading keys of another block any of my queries attends to: only these must be sent."""
    return max((sight.keys for sight in block_masks(mine, theirs, window)), default=0)


def document_starts(documents: Tensor) -> Tensor:
    """[b, s]: the position at which each token's document begins. A new document begins where the number changes."""
    place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    changed = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    starts: Tensor = torch.where(changed, place, 0).cummax(1).values
    return starts
