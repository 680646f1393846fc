"""Stand-ins for torch's flash kernels, by the CPU's: their signatures, dtypes, layouts and refusals. And for what
torch.compile makes: its graphs, traced as on cards, run operator by operator.

Causal masks and windows are aligned at the last query and the last key of each sequence, as flash attention does from
its version 2.1 on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_library: Any = None
used: Counter[str] = Counter()  # how often each was called


def register() -> None:
    """Give the imagined cards these kernels, once for the process."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_flash_attention_forward": _packed,
        "_flash_attention_backward": _packed_backward,
        "_scaled_dot_product_flash_attention": _heads_first,
        "_scaled_dot_product_flash_attention_backward": _heads_first_backward,
    }.items():
        _library.impl(name, function, "CUDA")
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


def _mask(
    q: Tensor, k: Tensor, causal: bool, of_q: Any = None, of_k: Any = None, window_size_left: Any = None,
    window_size_right: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """To be added to scores. `of_q`, `of_k`: bounds of the sequences, or None: there is one."""
    (in_q, q_end), (in_k, k_end) = _places(of_q, q.shape[2], q.device), _places(of_k, k.shape[2], k.device)
    ahead = q_end[:, None] - k_end[None, :]  # how far the key stands behind the query
    right = 0 if causal else -1 if window_size_right is None else window_size_right
    left = -1 if window_size_left is None else window_size_left
    seen = in_q[:, None] == in_k[None, :]
    seen = seen & (ahead <= right) if right >= 0 else seen
    seen = seen & (ahead >= -left) if left >= 0 else seen
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf)


def _places(bounds: Tensor | None, count: int, device: Any) -> tuple[Tensor, Tensor]:
    """Of each token: its sequence, and how far it stands from that sequence's end."""
    place = torch.arange(count, device=device)
    if bounds is None:
        return torch.zeros_like(place), count - place
    assert bounds.dtype == torch.int32 and bounds.device.type == "cuda", "cu_seqlens: int32, on the card"
    sequence = torch.searchsorted(bounds[1:].contiguous(), place, right=True)
    return sequence, bounds[1:][sequence] - place


def _checked(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> tuple[list[Tensor], int]:
    """Heads first, with keys and values as often as query heads share them: as often."""
    assert {t.dtype for t in (q, k, v)} in ({HALF[0]}, {HALF[1]}), "FlashAttention only support fp16 and bf16 data type"
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head dimension: at most 256, a multiple of 8"
    assert k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0, "query heads: a multiple of key heads"
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "Input tensor must have contiguous last dimension"
    assert dropout == 0, "no stand-in for dropout"
    share = q.shape[1] // k.shape[1]
    return [q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)], share


def _attend(qkv: Sequence[Tensor], mask: Tensor, dropout: float, scale: float | None) -> tuple[Tensor, Tensor]:
    """Of heads first: the output, and the scores' log-sum-exp [b, heads, n]."""
    heads, _ = _checked(*qkv, dropout)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, attn_mask=mask, scale=scale)


def _attend_backward(
    grad_out: Tensor, qkv: Sequence[Tensor], out: Tensor, log_sum: Tensor, mask: Tensor, dropout: float, scale: Any
) -> list[Tensor]:
    heads, share = _checked(*qkv, dropout)
    assert grad_out.dtype == out.dtype == heads[0].dtype and log_sum.dtype == torch.float32
    dq, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *heads, out, log_sum.contiguous(), dropout, False, attn_mask=mask, scale=scale
    )
    return [dq, *(t.unflatten(1, (-1, share)).sum(2) for t in others)]


def _heads_first(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: bool, scale: Any = None
) -> tuple[Any, ...]:
    """[b, heads, n, d], as scaled_dot_product_attention calls it."""
    used["dense"] += 1
    out, log_sum = _attend((q, k, v), _mask(q, k, is_causal), dropout_p, scale)
    nothing, state = q.new_empty(0), q.new_empty(2, dtype=torch.uint64)
    return out, log_sum, nothing, nothing, q.shape[2], k.shape[2], state, nothing, nothing


def _heads_first_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any, cum_seq_k: Any,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, *_: Tensor, scale: float | None = None,
) -> list[Tensor]:  # fmt: skip
    return _attend_backward(grad_out, (q, k, v), out, logsumexp, _mask(q, k, is_causal), dropout_p, scale)


def _first(*tensors: Tensor) -> Iterator[Tensor]:
    return (t[None].transpose(1, 2) for t in tensors)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, *_: bool, scale: Any = None, **window: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """[tokens, heads, d] of sequences of their own lengths, as varlen_attn calls it; log-sum-exp [heads, tokens]."""
    used["varlen"] += 1
    q, k, v = _first(q, k, v)
    mask = _mask(q, k, is_causal, cum_seq_q, cum_seq_k, **window)
    out, log_sum = _attend((q, k, v), mask, dropout_p, scale)
    nothing = q.new_empty(0)
    return out.transpose(1, 2)[0], log_sum[0], q.new_empty(2, dtype=torch.uint64), nothing, nothing


def _packed_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *_: Tensor, scale: Any = None,
    **window: Any,
) -> list[Tensor]:  # fmt: skip
    grad_out, q, k, v, out = _first(grad_out, q, k, v, out)
    mask = _mask(q, k, is_causal, cum_seq_q, cum_seq_k, **window)
    found = _attend_backward(grad_out, (q, k, v), out, logsumexp[None], mask, dropout_p, scale)
    return [t.transpose(1, 2)[0] for t in found]
