"""Stand-ins for the kernels of batch norm over ranks and of recurrent cells, which a CPU build of torch does not have.

Composed of operators; halves are computed in fp32. Recurrent layers run cell by cell, as torch does without cuDNN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Maybe = Tensor | None
Tensors = tuple[Tensor, ...]


def register(library: torch.library.Library) -> None:
    """Give the imagined cards these kernels."""
    for name, function in {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _normalize,
        "batch_norm_backward_reduce": _backward_reduce,
        "batch_norm_backward_elemt": _backward_normalize,
        "_thnn_fused_lstm_cell": _lstm,
        "_thnn_fused_gru_cell": _gru,
    }.items():
        library.impl(name, function, "CUDA")
        if "cell" in name:
            library.impl(name, function, "AutogradCUDA")


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _rows(t: Tensor) -> Tensor:
    return _wide(t).movedim(1, 0).flatten(1)  # [channels, values]


def _spread(t: Tensor, like: Tensor) -> Tensor:
    return t.view(-1, *[1] * (like.dim() - 2))  # a value per channel


# -- batch norm: statistics of a rank, of all ranks, and what is done with them ----------------------------------------


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = _rows(input)
    return rows.mean(1), (rows.var(1, unbiased=False) + eps).rsqrt()


def _gather_stats(_: Tensor, mean: Tensor, invstd: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """[ranks, channels] -> [channels]: the mean and deviation of all ranks' values."""
    running_mean, running_var, momentum, eps, counts = more
    shares, total = counts[:, None].to(mean.dtype), counts.sum()
    whole = (mean * shares).sum(0) / total
    spread = ((invstd**-2 - eps + (mean - whole) ** 2) * shares).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
        running_var.lerp_((spread * total / (total - 1)).to(running_var.dtype), momentum)
    return whole, (spread + eps).rsqrt()


def _normalize(input: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, invstd: Tensor, _: float) -> Tensor:
    out = (_wide(input) - _spread(mean, input)) * _spread(invstd, input)
    out = out if weight is None else out * _spread(weight, input)
    return (out if bias is None else out + _spread(bias, input)).to(input.dtype)


def _backward_reduce(grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Maybe, *_: bool) -> Tensors:
    """Of this rank: the sums of dy and of dy (x - mean), and the gradients of weight and bias."""
    gradient, own = _rows(grad_out), mean if weight is None else weight
    total, product = gradient.sum(1), (gradient * (_rows(input) - mean[:, None])).sum(1)
    return total, product, (product * invstd).to(own.dtype), total.to(own.dtype)


def _backward_normalize(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Maybe, *of_all_ranks: Tensor
) -> Tensor:
    sum_dy, sum_dy_xmu, count = of_all_ranks
    total = count.sum()
    slope = _spread(invstd**2 * sum_dy_xmu / total, input) * (_wide(input) - _spread(mean, input))
    found = (_wide(grad_out) - _spread(sum_dy / total, input) - slope) * _spread(invstd, input)
    return (found if weight is None else found * _spread(weight, input)).to(input.dtype)


# -- recurrent cells, which autograd sees through: gates [batch, gates x hidden] ---------------------------------------


def _gates(gates: Tensor, bias: Maybe, number: int) -> Tensors:
    return _wide(gates if bias is None else gates + bias).chunk(number, -1)


def _lstm(of_input: Tensor, of_hidden: Tensor, cx: Tensor, *biases: Maybe) -> Tensors:
    """The hidden and the cell's state, and the kernel's workspace, which nobody reads."""
    first, second = biases or (None, None)
    i, f, g, o = (a + b for a, b in zip(_gates(of_input, first, 4), _gates(of_hidden, second, 4), strict=True))
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return (o.sigmoid() * cy.tanh()).to(cx.dtype), cy.to(cx.dtype), cx.new_empty(0)


def _gru(of_input: Tensor, of_hidden: Tensor, hx: Tensor, *biases: Maybe) -> Tensors:
    first, second = biases or (None, None)
    (ir, iz, new), (hr, hz, hn) = _gates(of_input, first, 3), _gates(of_hidden, second, 3)
    n = (new + (ir + hr).sigmoid() * hn).tanh()
    return (n + (iz + hz).sigmoid() * (hx - n)).to(hx.dtype), hx.new_empty(0)
