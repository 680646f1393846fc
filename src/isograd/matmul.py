"""Products of fp32 matrices on AMD's processors by oneDNN: torch hands them to MKL, which is slower there.

One device: a @ b, and F.linear(x, weight, bias).

docs/log.md (2026-11-25) has the measurements: a product of 256 to 2,048 rows takes 0.8 to 0.98 of MKL's time on Zen 4,
and half of it from Zen 5 on, whose 512-bit units MKL does not use. oneDNN, a part of torch's CPU builds, makes a
program for each new shape, which costs about a millisecond, once, and it does not add in place. So gradients of
weights, products that add to a sum, and models of others, whose shapes change, are its own from Zen 5 on only. Whatever
looks at operators (a dispatch mode), takes other types than fp32, or compiles gets torch's own operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

_torchs = F.linear  # isograd.products and others may put theirs in its place

LEAST = 1 << 23  # multiplications of a product, below which the call costs what oneDNN saves
LEAST_ONCE = 1 << 26  # below which the program for a shape costs what oneDNN saves, if the shape comes once
ADDED_AT_ONCE = 1 << 22  # numbers of a product that are made before they are added: 16 MiB, which caches hold


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] @ b [k, m], where nobody asks for its gradient."""
    transposed = b.t()
    if not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)) and _pays(a, transposed):
        return _times_transposed(a, transposed, None)
    return a @ b


def into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the memory of `out`, where nobody asks for a gradient."""
    if _pays(a, b.t()):
        return out.copy_(_times_transposed(a, b.t(), None))
    return torch.mm(a, b, out=out)


def gradient(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, where the sum goes over tokens: what a linear map's weight gets from them."""
    return multiply(a, b) if _twice() else a @ b


def add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total += a @ b, where nobody asks for a gradient."""
    transposed = b.t()
    if not (_twice() and a.dim() == 2 and _plain(total) and _pays(a, transposed)):
        return total.addmm_(a, b)
    return _add(total, a, transposed)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    if F.linear is not _torchs and F.linear is not _theirs:
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias, LEAST)


@contextmanager
def everywhere() -> Iterator[None]:
    """Every F.linear is made as here, in a model of others, too. To be entered around its forward and its backward, in
    which a forward may be made again. Shapes of others change from batch to batch: small products stay torch's. Nothing
    is replaced under a TorchFunctionMode: torch takes it away in a backward, and with it what it did in a forward."""
    with _changing:
        counted = _twice() and F.linear in (_torchs, _theirs) and not torch._C._len_torch_function_stack()
        if counted:
            _inside.append(get_ident())
            F.linear = _theirs
    try:
        yield
    finally:
        with _changing:
            if counted:
                _inside.remove(get_ident())
            if counted and not _inside and F.linear is _theirs:
                F.linear = _torchs


_inside: list[int] = []  # the threads in `everywhere`: the last one puts torch's back
_changing = Lock()


def _theirs(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What F.linear is in `everywhere`. A TorchFunctionMode of the model's own wants to see torch's."""
    if torch._C._len_torch_function_stack():
        return _torchs(input, weight, bias)
    return _linear(input, weight, bias, LEAST_ONCE)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, least: int) -> Tensor:
    if not (_pays(x, weight, least) and x.dim() > 1 and (bias is None or _fits(bias, weight))):
        return _torchs(x, weight, bias)
    # As a matrix outside of the Function: what is made inside as a view could not be changed in place.
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


def _pays(x: Tensor, weight: Tensor, least: int = LEAST) -> bool:
    """Whether oneDNN is the one to make x @ weight.t(). The cheapest questions come first."""
    if torch.compiler.is_compiling() or not (weight.dim() == 2 and x.numel() * len(weight) >= least and _faster()):
        return False
    dense = weight.is_contiguous() or weight.t().is_contiguous()
    return dense and _plain(x) and _plain(weight) and not _watched()


def _plain(t: Tensor) -> bool:
    ours = type(t) in {Tensor, torch.nn.Parameter} and t.dtype == torch.float32 and t.device.type == "cpu"
    return ours and not t.is_neg()  # as a part of a complex conjugate is


def _fits(bias: Tensor, weight: Tensor) -> bool:
    """oneDNN takes a bias for as many numbers, side by side, as the weight has rows."""
    return _plain(bias) and bias.shape == weight.shape[:1] and bias.is_contiguous()


def _watched() -> bool:
    return bool(
        torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0  # derivatives along with values
        or not torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled("cpu")
    )


@cache
def _faster() -> bool:
    """On AMD's processors with AVX-512, which is what was measured."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return _processor().get("vendor_id") == "AuthenticAMD"


@cache
def _twice() -> bool:
    """Whether it is twice as fast, which pays for programs and passes: from Zen 5 on, the family 26."""
    family = _processor().get("cpu family", "")
    return _faster() and family.isdecimal() and int(family) >= 26


@cache
def _processor() -> dict[str, str]:
    """What Linux says of the first processor."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = (line.partition(":") for line in file.read(1 << 16).partition("\n\n")[0].splitlines())
            return {key.strip(): value.strip() for key, _, value in lines}
    except OSError:
        return {}


def _times_transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _add(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rows = max(1, ADDED_AT_ONCE // total.shape[1])
    for at in range(0, len(x), rows):
        total[at : at + rows].add_(_times_transposed(x[at : at + rows], weight, None))
    return total


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _times_transposed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx = multiply(dy, weight) if need_x else None
        dweight = gradient(dy.t(), x) if need_weight else None
        return dx, dweight, dy.sum(0) if need_bias else None
