"""How gradients reach the owners of their rows, and how rows come back: as one flat tensor, cut among the owners.

The flat tensor has a chunk for each owner; in a chunk, the owner's rows of each parameter stand one after the other.
All chunks are equally long: an owner that has fewer rows of a parameter than the first one has padding in their place.
So a bucket is packed and unpacked by as many calls whatever the number of owners:

    pack     gradients [rows, ...] -> [owners, rows of one owner] each -> side by side -> flat
    unpack   flat -> [owners, chunk] -> split -> whole tensors

A matrix that has one owner (Engine(matrices=...)) is never cut: `WholeMatrices` packs such matrices in the order of
their owners, and chunks have the lengths that follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from isograd.comm import raw
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.engine.plan import Slot
from isograd.engine.tree import tree_sum


class Buffers:
    """Memory of flat tensors, kept from bucket to bucket and from step to step. On CUDA the allocator does that. malloc
    gives large blocks back, and to touch new ones takes seven times as long as the copy into them."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, like: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor on the device of `like`, of any content."""
        free = self._free.get((dtype, numel))
        return free.pop() if free else like.new_empty(numel, dtype=dtype)

    def give_back(self, flat: Tensor) -> None:
        """Nobody reads it any more, and nothing of it is under way."""
        if flat.device.type == "cpu":
            self._free.setdefault((flat.dtype, flat.numel()), []).append(flat)


class Packing:
    """Parameters of the same owners, cut by rows."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots, self.owners = list(slots), slots[0].owners
        self._shapes = [tuple(slot.parameter.shape) or (1,) for slot in slots]
        self._widths = [math.prod(shape[1:]) for shape in self._shapes]
        # Of each parameter in a chunk: what the first owner has, which has the most.
        self._lengths = [slot.cuts[1] * width for slot, width in zip(slots, self._widths, strict=True)]
        self._pads = [self.owners.size * n - math.prod(s) for n, s in zip(self._lengths, self._shapes, strict=True)]
        self._lengths_of = [self._lengths] * self.owners.size  # in the chunk of each owner
        self.sizes: tuple[int, ...] = (sum(self._lengths),) * self.owners.size

    def pack(self, tensors: Sequence[Tensor], buffers: Buffers) -> Tensor:
        """Full tensors as one flat tensor in the dtype of sums, which one launch casts where all have one dtype. It may
        be the memory of a tensor that is alone."""
        parts, dtype = [], self.slots[0].dtype
        for tensor, length, pad in zip(tensors, self._lengths, self._pads, strict=True):
            flat = tensor.reshape(-1)
            parts.append((functional.pad(flat, (0, pad)) if pad else flat).view(self.owners.size, length))
        if len(parts) == 1:
            return parts[0].view(-1).to(dtype)
        flat = buffers.take(parts[0], sum(self.sizes), dtype)
        alike = len({part.dtype for part in parts}) == 1
        parts = [part if alike else part.to(dtype) for part in parts if part.numel()]
        torch._chunk_cat(parts, 0, self.owners.size, out=flat.view(self.owners.size, -1))
        return flat

    def pack_rows(self, rows: Sequence[Tensor], chunk: Tensor) -> None:
        """My rows into my chunk, where they may be already, from wherever they lie and in whatever dtype they are."""
        moved = [(p, mine) for p, mine in zip(self.rows(chunk), rows, strict=True) if p.data_ptr() != mine.data_ptr()]
        if rows[0].device == chunk.device and moved:
            torch._foreach_copy_([place for place, _ in moved], [mine for _, mine in moved])
            return
        for place, mine in moved:
            place.copy_(mine, non_blocking=True)

    def rows(self, chunk: Tensor, owner: int | None = None) -> list[Tensor]:
        """The owner's rows (mine when left out) in its chunk, as views."""
        owner = self.owners.index if owner is None else owner
        found = []
        parts = chunk.split(self._lengths_of[owner])
        for part, slot, shape, width in zip(parts, self.slots, self._shapes, self._widths, strict=True):
            count = slot.cuts[owner + 1] - slot.cuts[owner]
            whole = part.numel() == count * width  # each view takes the host a while
            found.append((part if whole else part[: count * width]).view(count, *shape[1:]))
        return found

    def unpack(self, flat: Tensor, targets: Sequence[Tensor]) -> None:
        """A flat tensor into full ones."""
        size = self.owners.size
        direct = [t.is_contiguous() and not pad for t, pad in zip(targets, self._pads, strict=True)]
        places = [
            target.view(size, length) if here else flat.new_empty(size, length)
            for target, length, here in zip(targets, self._lengths, direct, strict=True)
        ]
        torch.split_with_sizes_copy(flat.view(size, -1), self._lengths, dim=1, out=places)
        for target, place, here in zip(targets, places, direct, strict=True):
            if not here:
                target.copy_(place.view(-1)[: target.numel()].view(target.shape))

    @property
    def is_flat(self) -> bool:
        """Whether the flat tensor has the elements of one full tensor in their order."""
        return len(self.slots) == 1 and not self._pads[0]


class WholeMatrices(Packing):
    """Matrices of which each has one owner, in the order of the owners."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        homes = [next(o for o in range(self.owners.size) if s.cuts[o + 1]) for s in slots]
        self._order = sorted(range(len(slots)), key=homes.__getitem__)
        self._lengths, self._pads = [math.prod(shape) for shape in self._shapes], [0] * len(slots)
        of = list(zip(self._lengths, homes, strict=True))
        self._lengths_of = [[n if home == owner else 0 for n, home in of] for owner in range(self.owners.size)]
        self.sizes = tuple(map(sum, self._lengths_of))

    def pack(self, tensors: Sequence[Tensor], buffers: Buffers) -> Tensor:
        """Full matrices as one flat tensor."""
        flat = buffers.take(tensors[0], sum(self.sizes), self.slots[0].dtype)
        return torch.cat([tensors[i].reshape(-1) for i in self._order], out=flat)

    def unpack(self, flat: Tensor, targets: Sequence[Tensor]) -> None:
        """A flat tensor into full matrices."""
        for i, part in zip(self._order, flat.split([self._lengths[i] for i in self._order]), strict=True):
            targets[i].copy_(part.view(targets[i].shape))


class Reduction:
    """A reduce-scatter under way. `wait` returns my rows of each slot, summed over the group."""

    def __init__(self, packing: Packing, pieces: list[Tensor], handle: Handle, *, tree: bool) -> None:
        """`pieces` add up to my chunk when the handle has been waited for."""
        self.packing, self._pieces, self._tree = packing, pieces, tree
        self._handle, self.arrived_within = handle, handle.arrived_within

    def wait(self) -> list[Tensor]:
        """My rows of each slot, summed over the group."""
        return self.packing.rows(self.sum(self.wait_for_pieces()))

    def wait_for_pieces(self) -> list[Tensor]:
        """What is added up."""
        self._handle.wait()
        return self._pieces

    def sum(self, pieces: list[Tensor]) -> Tensor:
        """Of the pieces, in whose memory it may be."""
        if len(pieces) == 1:
            return pieces[0]
        return tree_sum(pieces) if self._tree else raw.add_up(pieces, self.packing.owners.index)


def reduce_rows(packing: Packing, flat: Tensor, group: Group, *, tree: bool, number: int) -> Reduction:
    """Start sending each owner its rows of my packed gradients.

    `number`: on gloo, rows of different numbers never meet. `tree`: add in one binary tree, else in rank order; NCCL
    chooses its own order.
    """
    start = raw.scatter_start if tree else raw.reduce_scatter_start
    pieces, handle = start(flat, group, packing.sizes, number + 1)
    return Reduction(packing, pieces, handle, tree=tree)


def gather_rows(
    packing: Packing,
    rows: Sequence[Tensor],
    targets: Sequence[Tensor],
    group: Group,
    tag: int = 0,
    buffers: Buffers | None = None,
    alloc: Sequence[Callable[[], None]] = (),
) -> Handle:
    """Start filling full tensors with every owner's rows; mine are given, perhaps in their place already.

    `tag`: on gloo, gathers with different tags never meet. `buffers`: for what lies in between. `alloc`: give the full
    tensors their memory, as late as they need it.
    """
    in_place = group.size == 1 or (packing.is_flat and targets[0].is_contiguous())
    for give in alloc if in_place else ():
        give()
    if group.size == 1:
        for target, mine in zip(targets, rows, strict=True):
            target.copy_(mine.view(target.shape))
        return Handle()
    buffers = buffers or Buffers()
    flat = targets[0].view(-1) if in_place else buffers.take(targets[0], sum(packing.sizes), targets[0].dtype)
    chunk = flat.split(list(packing.sizes))[group.index]
    packing.pack_rows(rows, chunk)
    handle = raw.all_gather_start(flat, chunk, group, packing.sizes, tag)
    if not in_place:
        for give in alloc:
            handle.and_then(give)
        handle.and_then(lambda: packing.unpack(flat, targets)).and_then(lambda: buffers.give_back(flat))
    return handle


def packing_of(slots: Sequence[Slot]) -> Packing:
    """For parameters of the same owners, all cut by rows or none."""
    return WholeMatrices(slots) if slots[0].has_one_owner else Packing(slots)
