"""Precision: what difference is rounding, and what is a bug; and a test of a gradient that needs no reference.

In a working precision the noise is measured: one-device runs that differ only by the order in which the same numbers
are added each have their distance from the fp64 truth of the same rounded weights, and a layout is judged by its own
distance in units of theirs. Where a kernel has no fp64, the runs' mean stands for the truth.

The Taylor test compares the gradient with the loss itself: along a random direction v, (L(w + h v) - L(w - h v)) / 2h
must be <gradient, v>, by Richardson's rule to about 1e-9 in fp64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isograd_verify import tolerances
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, PASS


@dataclass(frozen=True)
class Noise:
    """Per tensor of step 1: the truth (or the ensemble's mean), and each element's mean squared distance from it."""

    truth: str  # "fp64", or "mean" where there is no fp64
    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    factor: float  # how far from 1 the one factor lies that fits a member to the truth best (root mean square)
    factors: tuple[dict[str, float], ...] = ()  # of each member: the factor of each tensor

    def ratio(self, name: str, found: Tensor, part: Callable[[Tensor], Tensor], whole: float) -> float:
        """Distance from the mean in units of the spread; a tensor without noise is held to the format's own."""
        expected = part(self.mean[name])
        share = (expected.numel() / max(self.mean[name].numel(), 1)) ** 0.5
        floor = torch.finfo(found.dtype).eps * max(float(expected.norm()) * 0.5, tolerances.NOISE_FLOOR * whole * share)
        spread = float(part(self.variance[name]).sum().sqrt())
        return float((found.double() - expected).norm()) / float(max(spread, floor))


def verdict(ratio: float, limits: tuple[float, float] = tolerances.NOISE) -> str:
    """The verdict on an error in units of the measured noise."""
    low, high = limits
    return PASS if ratio <= low else BUG if not ratio <= high else INCONCLUSIVE


class Associated(TorchDispatchMode):
    """Every matrix product as a sum of `terms` products over parts of the contracted dimension."""

    def __init__(self, terms: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.terms = terms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if self.terms > 1 and name in ("aten::mm", "aten::bmm") and not kwargs:
            left, right = (t.tensor_split(self.terms, dim) for t, dim in zip(args, (-1, -2), strict=True))
            return sum(func(a, b) for a, b in zip(left, right, strict=True))
        if self.terms > 1 and name == "aten::addmm" and not kwargs:
            return args[0] + self.__torch_dispatch__(torch.ops.aten.mm.default, types, args[1:])
        return func(*args, **(kwargs or {}))


def direction(name: str, parameter: Tensor, seed: int = 0) -> Tensor:
    """A random direction that is a function of the parameter's name and whole shape alone."""
    digest = hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def taylor(
    loss: Callable[[], float],
    parameters: dict[str, Tensor],
    gradients: dict[str, Tensor],
    directions: dict[str, Tensor] | None = None,
    h: float = 1e-3,
) -> float:
    """Relative error between <gradient, v> and the loss's own slope along v; `loss` is evaluated four times.

    `directions`: v by name, as large as the steps should be (default: random, of each parameter's own size).
    """
    if directions is None:
        directions = {n: direction(n, p).to(p) * scale_of(p) for n, p in parameters.items()}
    expected = sum(float((gradients[n].double() * v.double()).sum()) for n, v in directions.items() if n in gradients)
    slope = slope_along(loss, parameters, directions, h)
    return abs(slope - expected) / max(abs(slope), 1e-12)


def scale_of(parameter: Tensor) -> float:
    """A typical size of an element, so that a step of h changes every tensor by about h of itself."""
    return float(parameter.detach().double().square().mean().sqrt()) + 1e-4


def slope_along(loss: Callable[[], float], parameters: dict[str, Tensor], steps: dict[str, Tensor], h: float) -> float:
    """dL/dt of L(w + t v) at 0, by central differences and Richardson's rule; the parameters are left as they were."""
    kept = {name: p.detach().clone() for name, p in parameters.items() if name in steps}

    def at(distance: float) -> float:
        with torch.no_grad():
            for name, start in kept.items():
                parameters[name].copy_(start + distance * steps[name])
            value = loss()
            for name, start in kept.items():
                parameters[name].copy_(start)
        return value

    coarse = (at(h) - at(-h)) / (2 * h)
    fine = (at(h / 2) - at(-h / 2)) / h
    return float((4 * fine - coarse) / 3)
