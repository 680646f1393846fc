"""Stand-ins for torch's flash kernels, by the CPU's: their signatures, dtypes, layouts and refusals. And for what
torch.compile makes: its graphs, traced as on cards, run operator by operator.

Causal masks and windows are aligned at the last query and the last key of each sequence, as flash attention does from
its version 2.1 on.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
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
    for name, kernel in {
        "_flash_attention_forward": _forward,
        "_flash_attention_backward": _backward,
        "_scaled_dot_product_flash_attention": _forward,
        "_scaled_dot_product_flash_attention_backward": _backward,
    }.items():
        _library.impl(name, _by_name(getattr(torch.ops.aten, name).default._schema, kernel), "CUDA")
    torch._TorchCompileInductorWrapper.__call__ = _compiled  # type: ignore[method-assign, assignment]
    watching = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")  # device.cpp's, whom operators alone concern
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(watching)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(watching)


def _by_name(schema: Any, kernel: Any) -> Any:
    """The kernel is given its arguments as the attributes that the schema names."""
    defaults = {one.name: one.default_value for one in schema.arguments}
    return lambda *args, **named: kernel(
        SimpleNamespace(**{**defaults, **dict(zip(defaults, args, strict=False)), **named})
    )


def _compiled(_: Any, graph: Any, inputs: Any, **__: Any) -> Any:
    """In place of inductor's kernels, of which FlexAttention's has no small heads."""
    from torch._dynamo.backends.debugging import aot_eager

    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.flex_attention:
            assert node.args[0].meta["example_value"].shape[-1] >= 16, "NYI: embedding dimension: at least 16"
            used["flex"] += 1
    return aot_eager(graph, inputs)


def _heads_first(given: Any, *names: str) -> list[Tensor]:
    """[b, heads, n, d], as scaled_dot_product_attention has them; varlen_attn has [tokens, heads, d]."""
    tensors = [getattr(given, name) for name in names]
    return [t[None].transpose(1, 2) for t in tensors] if _is_packed(given) else tensors


def _is_packed(given: Any) -> bool:
    return hasattr(given, "window_size_left")


def _prepared(given: Any) -> tuple[list[Tensor], Tensor, int]:
    """(q, and k and v as often as query heads share them; what is to be added to scores; as often)."""
    q, k, v = _heads_first(given, "query", "key", "value")
    assert {t.dtype for t in (q, k, v)} in ({HALF[0]}, {HALF[1]}), "FlashAttention only support fp16 and bf16 data type"
    assert q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head dimension: at most 256, a multiple of 8"
    assert k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0, "query heads: a multiple of key heads"
    assert all(t.stride(-1) == 1 for t in (q, k, v)), "Input tensor must have contiguous last dimension"
    assert given.dropout_p == 0, "no stand-in for dropout"
    bounds, left, right = (None, None), None, None
    if _is_packed(given):
        bounds, left, right = (given.cum_seq_q, given.cum_seq_k), given.window_size_left, given.window_size_right
    (in_q, q_end), (in_k, k_end) = (_places(of, t.shape[2], t.device) for of, t in zip(bounds, (q, k), strict=True))
    ahead = q_end[:, None] - k_end[None, :]  # how far the key stands behind the query
    right = 0 if given.is_causal else right
    seen = in_q[:, None] == in_k[None, :]
    seen = seen if right is None or right < 0 else seen & (ahead <= right)
    seen = seen if left is None or left < 0 else seen & (ahead >= -left)
    mask, share = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, -torch.inf), q.shape[1] // k.shape[1]
    return [q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)], mask, share


def _places(bounds: Tensor | None, count: int, device: Any) -> tuple[Tensor, Tensor]:
    """Of each token: its sequence, and how far it stands from that sequence's end."""
    place = torch.arange(count, device=device)
    if bounds is None:
        return torch.zeros_like(place), count - place
    assert bounds.dtype == torch.int32 and bounds.device.type == "cuda", "cu_seqlens: int32, on the card"
    sequence = torch.searchsorted(bounds[1:].contiguous(), place, right=True)
    return sequence, bounds[1:][sequence] - place


def _forward(given: Any) -> tuple[Any, ...]:
    used["varlen" if _is_packed(given) else "dense"] += 1
    (q, k, v), mask, _ = _prepared(given)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = kernel(q, k, v, attn_mask=mask, scale=given.scale)  # the second: [b, heads, n]
    nothing, state = q.new_empty(0), q.new_empty(2, dtype=torch.uint64)
    if _is_packed(given):
        return out.transpose(1, 2)[0], log_sum[0], state, nothing, nothing
    return out, log_sum, nothing, nothing, q.shape[2], k.shape[2], state, nothing, nothing


def _backward(given: Any) -> list[Tensor]:
    qkv, mask, share = _prepared(given)
    grad_out, out = _heads_first(given, "grad_out", "out")
    log_sum = given.logsumexp[None] if _is_packed(given) else given.logsumexp
    assert grad_out.dtype == out.dtype == qkv[0].dtype and log_sum.dtype == torch.float32
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, *others = kernel(grad_out, *qkv, out, log_sum.contiguous(), 0.0, False, attn_mask=mask, scale=given.scale)
    found = [dq, *(t.unflatten(1, (-1, share)).sum(2) for t in others)]
    return [t.transpose(1, 2)[0] for t in found] if _is_packed(given) else found
