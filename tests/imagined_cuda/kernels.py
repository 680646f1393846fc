"""Stand-ins for torch's flash kernels, composed of operators: their signatures, dtypes, layouts and refusals. And for
what torch.compile makes: its graphs, traced as on cards, run operator by operator.

Scores are fp32 and results are rounded to the inputs' dtype, as the kernels do. Causal masks and windows are aligned at
the last query and the last key of each sequence, as flash attention does from its version 2.1 on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from . import layers

HALF = (torch.float16, torch.bfloat16)
_library: Any = None
used: Counter[str] = Counter()  # how often each was called


def register() -> None:
    """Give the imagined cards these kernels, once for the process."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_flash_attention_forward": _forward,
        "_flash_attention_backward": _backward,
        "_scaled_dot_product_flash_attention": _heads_first,
        "_scaled_dot_product_flash_attention_backward": _heads_first_backward,
    }.items():
        _library.impl(name, function, "CUDA")
    layers.register(_library)
    torch._TorchCompileInductorWrapper.__call__ = _compiled  # type: ignore[method-assign, assignment]
    watching = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")  # device.cpp's, whom operators alone concern
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(watching)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(watching)


def _compiled(_: Any, graph: Any, inputs: Any, **__: Any) -> Any:
    """In place of inductor's kernels, of which FlexAttention's has no small heads."""
    from torch._dynamo.backends.debugging import aot_eager

    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.flex_attention:
            assert node.args[0].meta["example_value"].shape[-1] >= 16, "NYI: embedding dimension: at least 16"
            used["flex"] += 1
    return aot_eager(graph, inputs)


def _check(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    assert {t.dtype for t in (q, k, v)} in ({HALF[0]}, {HALF[1]}), "FlashAttention only support fp16 and bf16 data type"
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head dimension: at most 256, a multiple of 8"
    assert k.shape[-2] == v.shape[-2] and q.shape[-2] % k.shape[-2] == 0, "query heads: a multiple of key heads"
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "Input tensor must have contiguous last dimension"
    assert dropout == 0, "no stand-in for dropout"


def _places(bounds: Tensor | None, count: int, device: Any) -> tuple[Tensor, Tensor]:
    """Of each token: its sequence, and how far it stands from that sequence's end."""
    place = torch.arange(count, device=device)
    if bounds is None:
        return torch.zeros_like(place), count - place
    assert bounds.dtype == torch.int32 and bounds.device.type == "cuda", "cu_seqlens: int32, on the card"
    sequence = torch.searchsorted(bounds[1:].contiguous(), place, right=True)
    return sequence, bounds[1:][sequence] - place


def _seen(
    q: Tensor, k: Tensor, bounds: tuple[Tensor | None, Tensor | None], causal: bool, left: Any, right: Any
) -> Any:
    (of_q, q_end), (of_k, k_end) = (_places(b, t.shape[1], t.device) for b, t in zip(bounds, (q, k), strict=True))
    ahead = q_end[:, None] - k_end[None, :]  # how far the key stands behind the query
    right = 0 if causal else right
    seen = of_q[:, None] == of_k[None, :]
    seen = seen if right is None or right < 0 else seen & (ahead <= right)
    return seen if left is None or left < 0 else seen & (ahead >= -left)


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    """[b, kv_heads, heads per kv head, n, m]."""
    share = q.shape[2] // k.shape[2]
    queries = q.float().transpose(1, 2).unflatten(1, (-1, share))
    scores = queries @ k.float().transpose(1, 2)[:, :, None].mT * (scale or q.shape[-1] ** -0.5)
    return scores.masked_fill(~seen, -torch.inf)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """[b, n, heads, d], or with lengths of sequences [tokens, heads, d] and log-sum-exp [heads, tokens]."""
    _check(q, k, v, dropout_p)
    packed = cum_seq_q is not None
    used["varlen" if packed else "dense"] += 1
    q, k, v = (t[None] if packed else t for t in (q, k, v))
    seen = _seen(q, k, (cum_seq_q, cum_seq_k), is_causal, window_size_left, window_size_right)
    scores = _scores(q, k, seen, scale)
    log_sum = scores.logsumexp(-1)
    out = ((scores - log_sum[..., None]).exp() @ v.float().transpose(1, 2)[:, :, None]).flatten(1, 2).transpose(1, 2)
    out, log_sum = out.to(q.dtype).contiguous(), log_sum.flatten(1, 2)
    nothing = q.new_empty(0)
    state = q.new_empty(2, dtype=torch.uint64)
    return (out[0], log_sum[0], state, nothing, nothing) if packed else (out, log_sum, state, nothing, nothing)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
    unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, dropout_p)
    assert grad_out.dtype == out.dtype == q.dtype and logsumexp.dtype == torch.float32
    packed = cum_seq_q is not None
    if packed:
        grad_out, q, k, v, out, logsumexp = (t[None] for t in (grad_out, q, k, v, out, logsumexp))
    share, factor = q.shape[2] // k.shape[2], scale or q.shape[-1] ** -0.5
    seen = _seen(q, k, (cum_seq_q, cum_seq_k), is_causal, window_size_left, window_size_right)
    chances = (_scores(q, k, seen, scale) - logsumexp.unflatten(1, (-1, share))[..., None]).exp()
    queries, gradient, result = (t.float().transpose(1, 2).unflatten(1, (-1, share)) for t in (q, grad_out, out))
    keys, values = (t.float().transpose(1, 2)[:, :, None] for t in (k, v))
    dscores = chances * (gradient @ values.mT - (gradient * result).sum(-1, keepdim=True)) * factor
    dq, dk, dv = (dscores @ keys).flatten(1, 2), (dscores.mT @ queries).sum(2), (chances.mT @ gradient).sum(2)
    dq, dk, dv = (t.transpose(1, 2).to(q.dtype).contiguous() for t in (dq, dk, dv))
    return (dq[0], dk[0], dv[0]) if packed else (dq, dk, dv)


def _heads_first(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """[b, heads, n, d], as scaled_dot_product_attention calls it."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    sizes = (q.shape[1], k.shape[1])
    out, log_sum, state, nothing, _ = _forward(q, k, v, None, None, *sizes, dropout_p, is_causal, False, scale=scale)
    return out.transpose(1, 2), log_sum, nothing, nothing, *sizes, state, nothing, nothing


def _heads_first_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    tensors = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    found = _backward(
        *tensors, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, scale=scale
    )
    return tuple(t.transpose(1, 2) for t in found)
