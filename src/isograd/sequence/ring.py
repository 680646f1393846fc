"""Ring attention: queries stay, and the keys and values of the other blocks arrive one block at a time.

Who owns what: member i of the ring holds block i of the sequence (token_layout.py: an early and a late chunk) of q, k,
v and the output. In step t = 0 ... r - 1 member i attends from its queries to the keys of member j = i - t.

Forward, in step t:
1. The keys and values of step t + 1 are sent while phase 2 runs: member i sends to i + t + 1 and receives from
   i - t - 1. Only the leading keys that the receiver's queries attend to are sent (`reach`): half a block to later
   members, a whole one to earlier ones. Passing whole blocks from neighbour to neighbour would move a third more.
   (Between machines, passing on crosses each border once, and a direct send crosses it once per member behind it. Use
   'cpN ulyssesM' with M ranks per machine there: it makes rings of one member per machine.)
2. The part of the block pair that the causal mask keeps is computed, one rectangle per step: step 0 is causal, later
   ones are all rows x half the keys, or half the rows x all keys. Empty parts are skipped. All members do equal work.
3. The result is folded into the running (output, log of the sum of exponentials), in fp32, or fp64 for fp64 tensors.

Backward, in step t: the same keys and values arrive again; probabilities are exp(score - log-sum-exp) with the GLOBAL
log-sum-exp, so each rectangle's gradients are exact summands. dq is accumulated here. The gradients
that step t computed for the keys of member j are sent to j while step t + 1 runs, in fp32 (fp64). Member j adds its own
part first and then those of i = j + 1, j + 2, ...: a fixed order, so every run has the same bits.

Key and value heads are never expanded to query heads, neither on the wire nor in memory.
Documents and a window restrict which keys a query attends to: blocks of which no query sees a key are not computed, and
those of a window are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isograd.comm import ops, raw
from isograd.comm.first_order import first_order_only
from isograd.comm.group import Group
from isograd.comm.handle import Handle
from isograd.sequence import block
from isograd.sequence.token_layout import BlockMask, Spans, TokenLayout, block_masks, positions_of, visible_keys


@ops.uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    places: TokenLayout,
    starts: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """My block of causal attention. q [b, heads, n, d]; k, v [b, kv_heads, n, d]: block `group.index` of places.blocks.

    starts [b, padded]: where the document of each token of the whole sequences begins (places.document_starts).
    window: how many tokens each sees, itself included. softcap: scores become softcap * tanh(scores / softcap).
    """
    blocks, scale = places.blocks, scale or q.shape[-1] ** -0.5
    by_block = None if starts is None else [torch.cat([starts[:, a:b] for a, b in spans], 1) for spans in blocks]
    trip = _RingSchedule(group, blocks, by_block, window)
    return _Ring.apply(q, k, v, trip, scale, softcap)  # type: ignore[no-any-return, no-untyped-call]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, trip: _RingSchedule, scale: float, softcap: float | None
    ) -> Tensor:
        k, v = (t.permute(2, 0, 1, 3).contiguous() for t in (k, v))  # [n, b, kv_heads, d]: leading keys are one piece
        out = log_sum = None
        for step, (keys, values) in enumerate(trip.iter_kv(k, v)):
            for sight, mask in trip.seen(step, q):
                rows = slice(sight.start, sight.stop)
                part = block.forward(
                    q[:, :, rows], _heads(keys, sight), _heads(values, sight), scale, sight.causal, mask, softcap
                )
                if out is None or log_sum is None:
                    out, log_sum = part  # step 0 has all rows
                else:
                    block.fold(out[:, :, rows], log_sum[:, :, rows], *part)
        assert out is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.trip, ctx.scale, ctx.softcap = trip, scale, softcap
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        trip, wide = ctx.trip, log_sum.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
        homing = _GradReturn(trip, dk, dv)
        for step, (keys, values) in enumerate(trip.iter_kv(k, v)):
            here = (dk, dv) if step == 0 else homing.parcel(step)
            for sight, mask in trip.seen(step, q):
                rows = slice(sight.start, sight.stop)
                to_q, to_k, to_v = block.backward(
                    gradient[:, :, rows], q[:, :, rows], _heads(keys, sight), _heads(values, sight),
                    out[:, :, rows], log_sum[:, :, rows], ctx.scale, sight.causal, mask, ctx.softcap,
                )  # fmt: skip
                dq[:, :, rows] += to_q
                for total, part in zip(here, (to_k, to_v), strict=True):
                    total[: sight.keys] += part.permute(2, 0, 1, 3)
            if step:
                homing.send(step)
        homing.land()
        return dq.to(q.dtype), *(t.permute(1, 2, 0, 3).to(q.dtype) for t in (dk, dv)), None, None, None


def _heads(t: Tensor, sight: BlockMask) -> Tensor:
    """[n, b, kv_heads, d] -> the keys of a sight as [b, kv_heads, keys, d], a view."""
    return t[: sight.keys].permute(1, 2, 0, 3)


class _RingSchedule:
    """The r steps of one member: whose keys arrive in which step, which of them are used, and what must be sent."""

    def __init__(
        self, group: Group, blocks: tuple[Spans, ...], starts: list[Tensor] | None, window: int | None
    ) -> None:
        self.group, self.blocks, self.starts, self.window = group, blocks, starts, window

    def member(self, step: int) -> int:
        """The member whose keys arrive in this step."""
        return (self.group.index - step) % self.group.size

    def block_masks(self, step: int) -> tuple[BlockMask, ...]:
        """Which of my queries attend to which of the keys of this step."""
        return block_masks(self.blocks[self.group.index], self.blocks[self.member(step)], self.window)

    def keys_in(self, step: int) -> int:
        """How many keys I receive in this step."""
        return visible_keys(self.blocks[self.group.index], self.blocks[self.member(step)], self.window)

    def keys_out(self, step: int) -> int:
        """How many of my keys member index + step receives."""
        return visible_keys(self.blocks[self.member(-step)], self.blocks[self.group.index], self.window)

    def mask(self, step: int, sight: BlockMask, device: torch.device) -> Tensor | None:
        """[b or 1, rows, keys]: which pairs are in one document and in the window, and causal if the sight is. None
        where neither documents nor the window leave out a pair."""
        me, other = self.group.index, self.member(step)
        seen = None
        if self.window is not None and self.blocks[me][-1][1] - self.blocks[other][0][0] > self.window:
            queries, keys = (positions_of(self.blocks[member], device) for member in (me, other))
            seen = (queries[sight.start : sight.stop, None] - keys[: sight.keys] < self.window)[None]
        if self.starts is not None:
            same = self.starts[me][:, sight.start : sight.stop, None] == self.starts[other][:, None, : sight.keys]
            seen = same if seen is None else seen & same
        return seen.tril() if seen is not None and sight.causal else seen

    def seen(self, step: int, q: Tensor) -> Iterator[tuple[BlockMask, Tensor | None]]:
        """(sight, mask) of every block in which some query sees some key. FlexAttention leaves out the others itself,
        and the host need not wait for their masks."""
        for sight in self.block_masks(step):
            mask = self.mask(step, sight, q.device)
            if mask is None or block.flex_takes(q) or mask.any():
                yield sight, mask

    def iter_kv(self, k: Tensor, v: Tensor) -> Any:
        """Keys and values [n, b, kv_heads, d] of each step; the next ones travel while the caller computes."""
        held, size = (k, v), self.group.size
        for step in range(size):
            coming = (
                tuple(t.new_empty((self.keys_in(step + 1), *t.shape[1:])) for t in (k, v)) if step + 1 < size else ()
            )
            flight = (
                self.send_recv([t[: self.keys_out(step + 1)] for t in (k, v)], coming, step + 1) if coming else None
            )
            yield held
            if flight is not None:
                flight.wait()
                held = coming  # type: ignore[assignment]

    def send_recv(self, out: Any, into: Any, step: int) -> Handle:
        """Start sending `out` to member index + step and receiving `into` from index - step (step < 0: back)."""
        members = range(self.group.size)
        to, source = self.member(-step), self.member(step)
        return raw.exchange(
            [list(out) if m == to else [] for m in members],
            [list(into) if m == source else [] for m in members],
            self.group,
        )


class _GradReturn:
    """Sends the gradients of other members' keys and values to their owners, and adds up those of mine."""

    def __init__(self, trip: _RingSchedule, dk: Tensor, dv: Tensor) -> None:
        self.trip, self.mine = trip, (dk, dv)
        self.leaving: tuple[Tensor, ...] = ()
        self.arriving: tuple[Tensor, ...] = ()
        self.flight: Handle | None = None

    def parcel(self, step: int) -> tuple[Tensor, ...]:
        """Zeros to which the gradients of this step's keys and values are added."""
        self.leaving = tuple(t.new_zeros((self.trip.keys_in(step), *t.shape[1:])) for t in self.mine)
        return self.leaving

    def send(self, step: int) -> None:
        """Start sending this step's gradients to their owner; first add what arrived for the last step."""
        self.land()
        self.arriving = tuple(t.new_empty((self.trip.keys_out(step), *t.shape[1:])) for t in self.mine)
        self.flight = self.trip.send_recv(self.leaving, self.arriving, -step)

    def land(self) -> None:
        """Wait for the gradients on their way to me, and add them to mine."""
        if self.flight is not None:
            self.flight.wait()
            for total, part in zip(self.mine, self.arriving, strict=True):
                total[: len(part)] += part
        self.flight = None
