"""Causal attention of whole sequences, by the kernel of torch's that fits: with documents, a window, a cap on scores.

    what                          on a card, in bf16 or fp16      elsewhere
    a cap                         FlexAttention                   blocks of queries (band.py)
    a window                      varlen_attn                     blocks of queries
    documents                     varlen_attn                     scaled_dot_product_attention with a mask
    none of them                  scaled_dot_product_attention    the same

One device: softmax(scale q k^T + mask) v, where a token sees itself and earlier tokens of its own document.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.sequence import band, block
from isograd.sequence.block import flash_takes


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    starts: Tensor | None = None,
    bounds: Tensor | None = None,
) -> Tensor:
    """q [b, heads, s, d]; k, v [b, kv_heads, s, d] -> [b, heads, s, d].

    window: how many tokens each sees, itself included. starts [b, s]: where each token's document begins. bounds: what
    `document_bounds(starts)` says, asked once for all layers.
    """
    window = None if window is None or window >= q.shape[2] else window
    if softcap is None and (window is not None or starts is not None) and flash_takes(q):
        return _packed(q, k, v, scale, window, starts, bounds)
    if softcap is not None and block.flex_takes(q):
        return _capped(q, k, v, scale, window, softcap, starts)
    if softcap is not None or window is not None:
        return band.attention(q, k, v, scale=scale, window=window, softcap=softcap, starts=starts)
    seen = None if starts is None else same_document(starts)
    share = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=share)


def same_document(starts: Tensor) -> Tensor:
    """A mask [b, 1, query, key]: each token sees earlier tokens of its document, which begins at starts [b, s]."""
    return (starts[:, :, None] == starts[:, None, :]).tril()[:, None]


def document_bounds(starts: Tensor | None) -> Tensor | None:
    """[documents + 1]: where each document of a batch begins, all its sequences in a row, and where the last one ends.

    The host waits for their number. None on CPUs, where no kernel asks for it.
    """
    if starts is None or not starts.is_cuda:
        return None
    first = starts == torch.arange(starts.shape[1], device=starts.device)
    return F.pad(first.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).int()


def _packed(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, starts: Tensor | None,
    bounds: Tensor | None,
) -> Tensor:  # fmt: skip
    """All sequences as documents in a row. That none is longer than a sequence is known without waiting."""
    from torch.nn.attention.varlen import varlen_attn  # with torch's compiler: seconds of import

    batch, length = q.shape[0], q.shape[2]
    bounds = document_bounds(starts) if bounds is None else bounds
    if bounds is None:
        bounds = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    reach = (-1 if window is None else window - 1, 0)
    y = varlen_attn(
        q, k, v, bounds, bounds, length, length, scale=scale, window_size=reach, enable_gqa=q.shape[1] != k.shape[1]
    )
    assert isinstance(y, Tensor)
    whole: Tensor = y.unflatten(0, (batch, length)).transpose(1, 2)
    return whole


def _capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None, softcap: float, starts: Tensor | None
) -> Tensor:
    first = torch.zeros_like(q[:, 0, :, 0], dtype=torch.long) if starts is None else starts  # key of each query
    if window is not None:
        first = first.maximum(torch.arange(1 - window, q.shape[2] + 1 - window, device=q.device))

    def seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[b, query])

    return block.flex(q, k, v, scale or q.shape[-1] ** -0.5, seen, softcap)[0]
