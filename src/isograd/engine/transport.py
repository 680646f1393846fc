"""How a bucket's gradients reach the owners of their rows, and how rows come back: two ways with the same sums.

Direct (gloo, and everywhere when reproducible): slices of the gradients themselves go straight to their owners; only
small ones are packed into one message, and one larger one with them. The owner adds the pieces in rank order, or in one
binary tree.

Packed (NCCL): rows are copied into one flat buffer of equal chunks, one per owner, for the native reduce-scatter and
all-gather.

Both give the owner, for each slot, the sum over the data ranks of its rows, in fp32 (fp64 in fp64 models). On gloo a
gradient that half precision holds exactly travels in half precision, and is widened where it is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain

import torch
from torch import Tensor

from isograd.comm import halves, raw
from isograd.comm.raw import Group, Handle
from isograd.engine.bundle import Rows
from isograd.engine.sums import Sums

SMALL = 1 << 14  # elements: below this a slice is packed with others rather than sent by itself
CARRIER = 1 << 17  # elements: up to this a larger slice is copied, so that small ones need no message of their own

Pieces = list[Tensor]
Carry = Callable[[Pieces, list[Pieces]], None]


class Flight:
    """A bucket's reduction under way. `wait` returns my rows of each slot, summed over the group."""

    def __init__(
        self,
        handle: Handle,
        members: Callable[[], list[Pieces]],
        own: Pieces | None,
        tree: bool,
        sums: Sums | None,
        number: int,
        in_place: bool = False,
    ) -> None:
        """`members`: what each of them has sent, when it is there. `sums`: whether the messages and their sum are
        checked, as bucket `number`. `own`: my own rows, a slice of a gradient; `in_place`: the sum goes there."""
        self._handle, self._arrived, self._tree = handle, members, tree
        self._home = own if own is not None and in_place and not tree and not _has_halves(own) else None
        self._own = own if self._home is None else None
        self._members: list[Pieces] = []
        self._written: list[Pieces] = []  # members' memory that holds a sum now
        self._sums, self._number = sums, number

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._handle.ready()

    def wait(self) -> Pieces:
        """My rows of each slot, summed over the group."""
        self._handle.wait()
        self._members = self._arrived()
        if self._sums is None:
            return self._total(self._members, self._own, self._home)
        if len(self._members) > 1:
            self._sums.arrived(self._number, self._members)
        twins = [[piece.clone() for piece in pieces] for pieces in self._members]
        rows = self._total(self._members, self._own, self._home)
        self._sums.summed(self._number, rows, self._total(twins, None))
        return rows

    def not_finite(self, rows: Pieces) -> list[int]:
        """Members whose pieces were not finite, where `rows`, which `wait` has returned, are not. Pieces are still
        there but for those in whose memory others were added up: these are named when the rest were finite."""
        if _finite(rows):
            return []
        bad = [member for member, pieces in enumerate(self._members) if not _finite(pieces)]
        intact = [member for member in bad if not any(self._members[member] is one for one in self._written)]
        partial = [member for member in bad if self._members[member] is not rows]
        return intact or partial or bad

    def _total(self, members: list[Pieces], keep: Pieces | None, home: Pieces | None = None) -> Pieces:
        if self._tree:
            return tree_sum(members, keep, self._written)
        return reduce(lambda a, b: _add(a, b, keep, home, self._written), members)


def _add(a: Pieces, b: Pieces, keep: Pieces | None, home: Pieces | None, written: list[Pieces]) -> Pieces:
    """a + b, in the memory of one of them, which is noted in `written`: in `home`'s, if it is one of them; never in
    `keep`'s, which is a slice of something larger to be freed."""
    into, other = (b, a) if a is keep or b is home or _has_halves(a) else (a, b)
    if into is keep or _has_halves(into):
        into = [piece.to(torch.float32, copy=True) for piece in into]
    written.append(into)
    if not _has_halves(other):
        torch._foreach_add_(into, other)
        return into
    for piece, more in zip(into, other, strict=True):
        piece.add_(more)
    return into


def _has_halves(pieces: Pieces) -> bool:
    return any(piece.dtype in halves.HALVES for piece in pieces)


def _finite(pieces: Pieces) -> bool:
    return all(math.isfinite(piece.sum(dtype=torch.promote_types(piece.dtype, torch.float32))) for piece in pieces)


def tree_sum(members: Sequence[Pieces], keep: Pieces | None = None, written: list[Pieces] | None = None) -> Pieces:
    """((0 + 1) + (2 + 3)) + ...: the order that a power-of-two split into ranks and micro-batches leaves unchanged."""
    level, noted = list(members), [] if written is None else written
    while len(level) > 1:
        pairs = [_add(level[i], level[i + 1], keep, None, noted) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def reduce_rows(
    slots: Sequence[Rows],
    gradients: Pieces,
    group: Group,
    *,
    tree: bool,
    number: int = -1,
    sums: Sums | None = None,
    half: torch.dtype | None = None,
    in_place: bool = False,
) -> Flight:
    """Start sending each owner its rows of my full gradients.

    `number`: what these slots are to all members. On gloo, rows of different numbers never meet, so members may send
    their buckets in different orders; rows of one number meet in the order in which they were sent. After a backward in
    which some members did not send a bucket, use numbers that were not used before: the unsent ones would be paired
    with those of the next backward. `sums`: check the messages and their sum. `half`: any of any member's gradients may
    be of this dtype; the others are fp32. `in_place`: the sum may take the place of my rows in my own gradients.
    """
    if group.size == 1:
        alone = [g.view(1) if g.dim() == 0 else g for g in gradients]
        return Flight(Handle(), lambda: [alone], None, tree, None, number)
    if sums is not None:
        sums.sending(number, [[slot.rows(g, m) for slot, g in zip(slots, gradients, strict=True)]
                              for m in range(group.size)])  # fmt: skip
    if raw.native(group) and not tree:
        return _reduce_packed(slots, gradients, group, sums, number)
    rows = [slot.cut(g) for slot, g in zip(slots, gradients, strict=True)]
    own = [of_slot[group.index] for of_slot in rows]
    dtype = own[0].dtype if half is None else torch.float32
    out: list[Pieces] = []
    into: list[Pieces] = []
    for member in range(group.size):
        here = member == group.index
        out.append([] if here else _outgoing([of_slot[member] for of_slot in rows]))
        into.append([] if here else _incoming(own, dtype))

    if half is not None:
        for message in chain(*out):
            halves.unmark(message)
        for message in chain(*into):
            halves.mark(message, half)

    def members() -> list[Pieces]:
        came = [[halves.arrived(message) for message in messages] for messages in into]
        return [own if i == group.index else _unpacked(messages, own) for i, messages in enumerate(came)]

    return Flight(raw.exchange(out, into, group, number + 1), members, own, tree, sums, number, in_place)


def gather_rows(slots: Sequence[Rows], whole: Pieces, group: Group, tag: int = 0, carry: Carry | None = None) -> Handle:
    """Start filling the rows of others in whole tensors, in which each member has already put its own rows.

    `tag`: on gloo, rows that are sent with different tags never meet. `carry`: takes my small rows to every member, and
    puts those of each member where it is told.
    """
    if group.size == 1:
        return Handle()
    if raw.native(group):
        return _gather_packed(slots, whole, group)
    rows = [slot.cut(w) for slot, w in zip(slots, whole, strict=True)]
    parted = [_parted([of_slot[member] for of_slot in rows]) for member in range(group.size)]
    small = [pieces if member != group.index else [] for member, (pieces, _) in enumerate(parted)]
    into = [pieces if member != group.index else [] for member, (_, pieces) in enumerate(parted)]
    mine, out = parted[group.index]
    if carry is not None:
        carry(mine, small)
        return raw.exchange([out] * group.size, into, group, tag, beside=([mine] * group.size, small))
    packed = [_flat_like(pieces) for pieces in small]
    into = [[*pieces, flat] if flat is not None else pieces for pieces, flat in zip(into, packed, strict=True)]

    def place() -> None:
        for targets, flat in zip(small, packed, strict=True):
            if flat is not None:
                torch._foreach_copy_(targets, _views(flat, targets))

    return raw.exchange([[*out, *_joined(mine)]] * group.size, into, group, tag).and_then(place)


def most_small(slots: Sequence[Rows], like: Pieces, owners: int) -> int:
    """The most bytes of small rows that a member ever sends of some of these slots."""
    most = 0
    for member in range(owners):
        sizes = [(slot.cut(t)[member].numel(), t.itemsize) for slot, t in zip(slots, like, strict=True)]
        carrier = max((n * width for n, width in sizes if SMALL <= n <= CARRIER), default=0)
        most = max(most, carrier + sum(n * width for n, width in sizes if n < SMALL))
    return most


def _parted(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """(slices that travel in one message, slices that travel by themselves); both ends of a message part them alike.

    A message costs as much as copying some hundred kilobytes: the least of the large slices carries the small ones."""
    small = [p for p in pieces if p.numel() < SMALL]
    large = [p for p in pieces if p.numel() >= SMALL]
    least = min(range(len(large)), key=lambda i: large[i].numel(), default=None) if small else None
    if least is not None and large[least].numel() <= CARRIER:
        small.append(large.pop(least))
    return small, large


def _outgoing(pieces: Pieces) -> Pieces:
    """The messages for one owner: each large slice by itself, all small ones in one."""
    small, large = _parted(pieces)
    return large + _joined(small)


def _joined(small: Pieces) -> Pieces:
    return [torch.cat([p.reshape(-1) for p in small])] if small else []


def _incoming(like: Pieces, dtype: torch.dtype) -> Pieces:
    """Memory for the messages with one member's rows."""
    small, large = _parted(like)
    packed = _flat_like(small, dtype)
    return [torch.empty_like(p, dtype=dtype) for p in large] + ([packed] if packed is not None else [])


def _unpacked(messages: Pieces, like: Pieces) -> Pieces:
    """A tensor per slot, out of the messages that hold them."""
    small, large = _parted(like)
    found = dict(zip(map(id, large), messages, strict=False))
    found |= zip(map(id, small), _views(messages[-1], small) if small else [], strict=True)
    return [found[id(p)] for p in like]


def _flat_like(pieces: Pieces, dtype: torch.dtype | None = None) -> Tensor | None:
    return pieces[0].new_empty(sum(p.numel() for p in pieces), dtype=dtype) if pieces else None


def _views(flat: Tensor, like: Pieces) -> Pieces:
    return [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in like]), like, strict=True)]


def _chunks(slots: Sequence[Rows], like: Pieces, flat: Tensor, owners: int) -> list[Pieces]:
    """Views into a flat buffer of `owners` equal chunks: where each owner's rows of each slot lie."""
    chunk = flat.numel() // owners
    found = []
    for owner in range(owners):
        rows = [slot.rows(t, owner) for slot, t in zip(slots, like, strict=True)]
        used = sum(r.numel() for r in rows)
        found.append(_views(flat[owner * chunk : owner * chunk + used], rows))
    return found


def _chunk_size(slots: Sequence[Rows], like: Pieces, owners: int) -> int:
    pairs = list(zip(slots, like, strict=True))
    return max(sum(slot.rows(t, owner).numel() for slot, t in pairs) for owner in range(owners))


def _reduce_packed(slots: Sequence[Rows], gradients: Pieces, group: Group, sums: Sums | None, number: int) -> Flight:
    size = _chunk_size(slots, gradients, group.size)
    flat = gradients[0].new_zeros(size * group.size)
    for owner, places in enumerate(_chunks(slots, gradients, flat, group.size)):
        torch._foreach_copy_(places, [s.rows(g, owner) for s, g in zip(slots, gradients, strict=True)])
    mine, handle = raw.reduce_scatter_start(flat, group)
    rows = [slot.rows(g) for slot, g in zip(slots, gradients, strict=True)]
    views = _views(mine[: sum(r.numel() for r in rows)], rows)
    return Flight(handle, lambda: [views], None, False, sums, number)


def _gather_packed(slots: Sequence[Rows], whole: Pieces, group: Group) -> Handle:
    size = _chunk_size(slots, whole, group.size)
    flat = whole[0].new_empty(size * group.size)
    places = _chunks(slots, whole, flat, group.size)
    torch._foreach_copy_(places[group.index], [s.rows(w) for s, w in zip(slots, whole, strict=True)])
    mine = flat[group.index * size : (group.index + 1) * size].clone()
    handle = raw.all_gather_start(flat, mine, group)

    def place() -> None:
        handle.wait()
        for member in range(group.size):
            if member != group.index:
                targets = [slot.rows(w, member) for slot, w in zip(slots, whole, strict=True)]
                torch._foreach_copy_(targets, places[member])

    return Handle(then=place)
