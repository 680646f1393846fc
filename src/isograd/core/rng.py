"""Counter-based randomness: the value at a global index is the same under every layout, shape and device.

There is no state: a value is a function of (key, index). Weights are indexed by their position in the global tensor and
dropout by (token id, feature), so that each shard draws exactly the part that one device would draw for it.

Invariant: only integer operations and IEEE-exact + - * / are used, so bits depend on neither vector width nor device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit number
_MIX1 = -49064778989728563  # the multipliers of MurmurHash3's 64-bit finalizer
_MIX2 = -4265267296055464877
_FRACTION = (1 << 53) - 1
_CHUNK = 1 << 20  # elements initialised at a time: bounds the int64 temporaries


@dataclass(frozen=True)
class Key:
    """Names a stream of random values. Different keys give independent streams."""

    seed: int

    def fold(self, *words: int | str) -> Key:
        """The key of a stream inside this one: of a layer, a step, a site of dropout."""
        text = repr((self.seed, *words)).encode()
        return Key(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True))


def key(seed: int, *words: int | str) -> Key:
    """The key named by a seed and any words: key(0, "dropout", step)."""
    return Key(seed).fold(*words)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * _MIX1
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * _MIX2
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def bits(k: Key, index: Tensor) -> Tensor:
    """53 random bits for each int64 index."""
    return (_mix(_mix(index * _GOLDEN + k.seed) + k.seed) >> 11) & _FRACTION


def uniform(k: Key, index: Tensor) -> Tensor:
    """A uniform fp64 value in [0, 1) for each int64 index."""
    return bits(k, index).double() * 2.0**-53


# Acklam's rational approximation of the inverse normal distribution, central region: |z| < 1.973.
_TAIL = 0.02425
_A = (
    -39.69683028665376,
    220.9460984245205,
    -275.9285104469687,
    138.3577518672690,
    -30.66479806614716,
    2.506628277459239,
)
_B = (-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572, 1.0)
_STD = 0.8739229427164339  # of the normal distribution cut at those tails


def trunc_normal(k: Key, index: Tensor, std: float) -> Tensor:
    """Normal fp64 values truncated at about two standard deviations; `std` is the deviation after truncation."""
    q = (uniform(k, index) - 0.5) * (1 - 2 * _TAIL)
    r = q * q
    return q * _horner(_A, r) / _horner(_B, r) * (std / _STD)


def _horner(coefficients: Sequence[float], r: Tensor) -> Tensor:
    total = torch.full_like(r, coefficients[0])
    for c in coefficients[1:]:
        total = total * r + c
    return total


@torch.no_grad()
def init_(tensor: Tensor, k: Key, std: float, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> None:
    """Fill `tensor`, a rank's `box` (start, stop per dimension) of a global `shape`, with truncated normal values."""
    inner = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    for (start, stop), stride in list(zip(box, strides, strict=True))[1:]:
        inner = (inner[:, None] + torch.arange(start, stop, device=tensor.device) * stride).view(-1)
    rows = tensor.view(tensor.shape[0], -1)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        part = rows[first : first + step]
        outer = (torch.arange(len(part), device=tensor.device) + first + box[0][0]) * strides[0]
        part.copy_(trunc_normal(k, outer[:, None] + inner, std))


def keep(p: float, k: Key, rows: Tensor, cols: Tensor) -> Tensor:
    """A dropout mask [len(rows), len(cols)]: False with probability p for each (row id, column)."""
    streams = _mix(rows * _GOLDEN + k.seed)
    return (_mix(streams[:, None] + cols * _GOLDEN) >> 11) & _FRACTION >= int(p * 2.0**53)


def dropout(x: Tensor, p: float, k: Key, rows: Tensor, first_col: int = 0) -> Tensor:
    """x [T, h] with each element zeroed with probability p and the rest scaled; `rows`: global token ids [T]."""
    cols = torch.arange(first_col, first_col + x.shape[1], device=x.device)
    return torch.where(keep(p, k, rows, cols), x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def random_state(device: torch.device) -> list[Tensor]:
    """For models that draw from torch: the states of the CPU's generator, and of the device's if it has one."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state[0])
    for own in state[1:]:
        torch.get_device_module(device).set_rng_state(own, device)


def has_drawn(state: list[Tensor], device: torch.device) -> bool:
    """Whether anyone has drawn from torch since `random_state` returned this."""
    return not all(map(torch.equal, state, random_state(device)))
