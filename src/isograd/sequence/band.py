"""Causal attention on whole sequences by blocks of queries: with a window, a cap on scores, and documents.

One device: softmax(cap * tanh(scale q k^T / cap) + mask) v, where a token sees itself and the `window` - 1 tokens
before it, of its own document.

Keys outside the band of a block are neither multiplied nor masked: n tokens cost n * (window + BLOCK) scores and not
n * n, of which one block's exist at a time. Backward computes them again from the log-sum-exp, as a ring does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isograd.comm import ops
from isograd.comm.first_order import first_order_only
from isograd.sequence import block

BLOCK = 128  # queries


@dataclass(frozen=True)
class BandPiece:
    """Queries start..stop and keys first..last of a sequence. `kind`: every pair is seen, the causal ones, or a mask
    says which."""

    start: int
    stop: int
    first: int
    last: int
    kind: str  # "all" | "causal" | "mask"


def pieces(start: int, stop: int, window: int | None) -> Iterator[BandPiece]:
    """The keys that a block of queries sees, its own block first, so that each query has seen something after it."""
    own = "causal" if window is None or window >= stop - start else "mask"
    yield BandPiece(start, stop, start, stop, own)
    edge = 0 if window is None else min(start, max(0, stop - window))  # all queries see keys from here on
    if edge < start:
        yield BandPiece(start, stop, edge, start, "all")
    first = 0 if window is None else max(0, start - window + 1)
    if first < edge:
        yield BandPiece(start, stop, first, edge, "mask")


@ops.uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    starts: Tensor | None = None,
    size: int = BLOCK,
) -> Tensor:
    """q [b, heads, s, d]; k, v [b, kv_heads, s, d] -> [b, heads, s, d]. starts [b, s]: where documents begin."""
    scale = scale or q.shape[-1] ** -0.5
    return _Band.apply(q, k, v, scale, window, softcap, starts, size)  # type: ignore[no-any-return, no-untyped-call]


def _mask(piece: BandPiece, window: int | None, starts: Tensor | None, device: torch.device) -> Tensor | None:
    """[b or 1, queries, keys]: which pairs are seen. None where the piece's kind says it."""
    if piece.kind != "mask" and starts is None:
        return None
    queries = torch.arange(piece.start, piece.stop, device=device)[:, None]
    keys = torch.arange(piece.first, piece.last, device=device)
    seen = ((keys <= queries) & (keys > queries - (window or piece.stop)))[None]
    if starts is None:
        return seen
    mine, theirs = starts[:, piece.start : piece.stop, None], starts[:, None, piece.first : piece.last]
    return seen & (mine == theirs)


def _work(length: int, window: int | None, starts: Tensor | None, size: int, device: torch.device) -> Any:
    """(piece, mask) of every piece in which some query sees some key."""
    for start in range(0, length, size):
        for piece in pieces(start, min(length, start + size), window):
            mask = _mask(piece, window, starts, device)
            if starts is None or mask is None or mask.any():
                yield piece, mask


class _Band(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None,
        starts: Tensor | None, size: int,
    ) -> Tensor:  # fmt: skip
        wide = block.accumulation_dtype(q.dtype)
        out = torch.empty(q.shape, dtype=wide, device=q.device)
        log_sum = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        for piece, mask in _work(q.shape[2], window, starts, size, q.device):
            rows, keys = slice(piece.start, piece.stop), slice(piece.first, piece.last)
            part = block.forward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], scale, piece.kind == "causal", mask, softcap
            )
            if piece.first == piece.start:  # its own block
                out[:, :, rows], log_sum[:, :, rows] = part
            else:
                block.fold(out[:, :, rows], log_sum[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum, starts)
        ctx.scale, ctx.window, ctx.softcap, ctx.size = scale, window, softcap, size
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum, starts = ctx.saved_tensors
        wide = block.accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=q.device) for t in (q, k, v))
        for piece, mask in _work(q.shape[2], ctx.window, starts, ctx.size, q.device):
            rows, keys = slice(piece.start, piece.stop), slice(piece.first, piece.last)
            to_q, to_k, to_v = block.backward(
                gradient[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
                log_sum[:, :, rows], ctx.scale, piece.kind == "causal", mask, ctx.softcap,
            )  # fmt: skip
            dq[:, :, rows] += to_q
            dk[:, :, keys] += to_k
            dv[:, :, keys] += to_v
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None, None
