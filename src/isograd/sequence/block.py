"""What one step of a ring computes: attention of some queries to some keys, and its gradients.

One device: out = softmax(scale q k^T + mask) v with log_sum = logsumexp(scale q k^T + mask); `fold` joins the results
of two sets of keys. Gradients are computed from the global log-sum-exp. torch's flash kernels compute both directions
where they apply. With a mask, and with a cap (scores become cap * tanh(scores / cap)), FlexAttention does on cards in
half precision; elsewhere the few lines below do, in fp32, or in fp64 for fp64 tensors.

q [b, heads, n, d]; k, v [b, kv_heads, m, d] with heads a multiple of kv_heads; log_sum [b, heads, n].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of several blocks, or of several experts, are added up. (torch.promote_types is an
    operator, and is dispatched as one.)"""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flash_takes(q: Tensor) -> bool:
    """Whether torch's flash kernel for cards takes such queries."""
    half, even = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return half and even and on_ampere(q)


def flex_takes(q: Tensor) -> bool:
    """Whether torch's FlexAttention is one kernel for such queries."""
    return flash_takes(q) and q.shape[-1] >= 16


def on_ampere(x: Tensor) -> bool:
    """Whether x is on a card of compute capability 8.0 or above: torch's flash and grouped kernels need one."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _fits_kernel(q: Tensor, mask: Tensor | None, softcap: float | None) -> bool:
    return mask is None and softcap is None and (q.device.type == "cpu" or flash_takes(q))


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log_sum), both in `wide`. mask [b, n, m]: True where attended; a row without any key gets 0 and -inf."""
    if _fits_kernel(q, mask, softcap):
        out, log_sum, *_ = (_cuda if q.is_cuda else _cpu)(q, k, v, 0.0, causal, scale=scale)
        return out.to(accumulation_dtype(q.dtype)), log_sum
    if flex_takes(q):
        out, log_sum = flex(q, k, v, scale, _pairs(q, causal, mask), softcap)
        return out.to(accumulation_dtype(q.dtype)), log_sum
    scores, _ = _scores(q, k, scale, causal, mask, softcap)
    log_sum = scores.logsumexp(-1)
    probabilities = (scores - log_sum.masked_fill(log_sum == -torch.inf, 0)[..., None]).exp()
    out = probabilities @ v.to(scores.dtype)[:, :, None]
    return out.flatten(1, 2), log_sum.flatten(1, 2)


def fold(out: Tensor, log_sum: Tensor, more_out: Tensor, more_log_sum: Tensor) -> None:
    """Join the result over further keys into (out, log_sum), in place. log_sum is finite: step 0 sees itself."""
    total = torch.logaddexp(log_sum, more_log_sum)
    out.mul_((log_sum - total).exp_()[..., None]).addcmul_(more_out, (more_log_sum - total).exp_()[..., None])
    log_sum.copy_(total)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, scale: float, causal: bool,
    mask: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """This block's summands of dq, dk and dv; `out` and `log_sum` are those over ALL keys."""
    if _fits_kernel(q, mask, softcap):
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        if q.is_cuda:  # no lengths of sequences, no seeds of dropout
            given = (None, None, q.shape[2], k.shape[2], 0.0, causal, *q.new_empty((2, 0), dtype=torch.uint64))
            return _cuda_backward(gradient, q, k, v, out, log_sum, *given, scale=scale)  # type: ignore[no-any-return]
        return _cpu_backward(gradient, q, k, v, out, log_sum, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    if flex_takes(q):
        return _flex_backward(gradient, q, k, v, out, log_sum, scale, _pairs(q, causal, mask), softcap)
    share = q.shape[1] // k.shape[1]
    scores, slope = _scores(q, k, scale, causal, mask, softcap)
    probabilities = (scores - log_sum.unflatten(1, (-1, share))[..., None]).exp()
    high = probabilities.dtype
    q, gradient, out = (t.to(high).unflatten(1, (-1, share)) for t in (q, gradient, out))  # [b, kv_heads, share, n, d]
    k, v = (t.to(high)[:, :, None] for t in (k, v))
    dv = (probabilities.mT @ gradient).sum(2)
    dscores = probabilities * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)) * scale
    dscores = dscores if slope is None else dscores * slope
    return (dscores @ k).flatten(1, 2), (dscores.mT @ q).sum(2), dv


def _scores(
    q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """[b, kv_heads, heads per kv head, n, m], wide; and of capped scores, their derivative by those without a cap."""
    high, slope = accumulation_dtype(q.dtype), None
    scores: Tensor = q.to(high).unflatten(1, (k.shape[1], -1)) @ k.to(high)[:, :, None].mT * scale
    if softcap is not None:
        bent = (scores / softcap).tanh_()
        scores, slope = bent * softcap, 1 - bent.square()
    if causal and mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()[None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return scores, slope


@cache
def _compiled() -> tuple[Any, Any]:
    """FlexAttention, and which of its blocks are seen: one kernel each, made by torch's compiler at the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # seconds of import

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def flex(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Any, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, log_sum) by torch's FlexAttention, differentiable. seen(batch, head, query, key): whether the
    query attends to the key; None: to all. It and the cap depend on tensors: a kernel is compiled for a number."""
    from torch.nn.attention.flex_attention import AuxRequest

    attention, blocks_seen = _compiled()
    blocks = seen and blocks_seen(seen, len(q), None, q.shape[2], k.shape[2], str(q.device))
    bent = None
    if softcap is not None:
        cap = torch.full((), softcap, dtype=accumulation_dtype(q.dtype), device=q.device)
        bent = lambda score, b, head, query, key: cap * torch.tanh(score / cap)  # noqa: E731
    more = {"enable_gqa": q.shape[1] != k.shape[1], "return_aux": AuxRequest(lse=True)}
    out, sums = attention(q, k, v, bent, blocks, scale, **more)
    return out, sums.lse


def _flex_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, scale: float, seen: Any,
    softcap: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out = sum of share * part over blocks, with share = exp(part's log-sum-exp - log_sum): autograd is given the
    derivatives by this block's part and by its log-sum-exp."""
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        part, its_sum = flex(q, k, v, scale, seen, softcap)
    to_part = gradient * (its_sum.detach() - log_sum).exp()[..., None]
    to_sum = (to_part * (part.detach() - out)).sum(-1)
    return torch.autograd.grad((part, its_sum), (q, k, v), (to_part.to(part.dtype), to_sum))


def _pairs(q: Tensor, causal: bool, mask: Tensor | None) -> Any:
    """A block's causal mask, or mask [b or 1, n, m], as FlexAttention takes it; None: every pair is seen."""
    if mask is None:
        return (lambda b, head, query, key: query >= key) if causal else None
    whole = mask.expand(len(q), -1, -1)
    return lambda b, head, query, key: whole[b, query, key]
