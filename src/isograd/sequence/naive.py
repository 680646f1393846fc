"""Causal attention over whole sequences on one device: the definition, and the oracle of the tests.

Query head h uses key and value head h // (heads / kv_heads). With `documents`, a number for each token, a token sees
only its own document, which begins where the number changes. With a `window` it sees itself and the window - 1 tokens
before it. With a `softcap`, scores become softcap * tanh(scores / softcap).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [b, s, heads, d]; k, v [b, s, kv_heads, d] -> [b, s, heads, d]."""
    length, share = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    sees = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()[None]
    if window is not None:
        sees = sees.triu(1 - window)
    if documents is not None:
        number = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0)).cumsum(1)
        sees = sees & (number[:, :, None] == number[:, None, :])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1), v)
