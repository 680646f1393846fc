"""Rotary positions, plain or scaled for sequences longer than those of pretraining, as in Hugging Face's models.

A feature pair turns by position * frequency. A scaling changes the frequencies, some also the length of cos and sin:

    linear      all frequencies are divided by `factor`
    llama3      low ones are divided by `factor`, high ones stay, those between are interpolated
    yarn        the same with a linear ramp over features; cos and sin are multiplied with an attention factor
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.errors import did_you_mean

NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_positions", "low_freq", "high_freq"),
    "yarn": ("factor", "original_positions"),
}
TAKES = {
    "linear": (),
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How frequencies are scaled. Options that its kind does not have must be left out."""

    kind: str  # "linear" | "llama3" | "yarn"
    factor: float | None = None
    original_positions: int | None = None  # how many positions pretraining had
    low_freq: float | None = None
    high_freq: float | None = None
    attention_factor: float | None = None  # None: the usual function of `factor`
    beta_fast: float | None = None  # None: 32
    beta_slow: float | None = None  # None: 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None  # None: True

    def problems(self) -> list[str]:
        """What is wrong with these values."""
        if self.kind not in NEEDS:
            kinds = ", ".join(NEEDS)
            return [f"rope_scaling.kind is one of {kinds}, not {self.kind!r}{did_you_mean(self.kind, NEEDS)}"]
        needs, given = NEEDS[self.kind], [n for n in self.__dataclass_fields__ if getattr(self, n) is not None]
        found = [f"rope_scaling of kind {self.kind} needs {name}" for name in needs if name not in given]
        allowed = ("kind", *needs, *TAKES[self.kind])
        found += [f"rope_scaling of kind {self.kind} has no {name}" for name in given if name not in allowed]
        for name in given:
            if name not in ("kind", "mscale", "mscale_all_dim", "truncate") and not 0 < getattr(self, name) < math.inf:
                found.append(f"rope_scaling.{name} must be positive and finite, not {getattr(self, name)}")
        if self.low_freq is not None and self.low_freq == self.high_freq:
            found.append(f"rope_scaling.low_freq and high_freq are both {self.low_freq}")
        return found


class Rotary:
    """Rotary positions on the first `dims` features of a head, in Hugging Face's convention of two halves."""

    def __init__(self, dims: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        self.dims, self.theta, self.scaling = dims, theta, scaling
        self.factor = (scaling.factor if scaling is not None else None) or 1.0
        self.original = (scaling.original_positions if scaling is not None else None) or 1

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, dims]. Angles are computed in fp32 in any dtype, as in the published models."""
        angles = positions.float()[:, None] * self.frequencies(positions.device)
        cos, sin = ((half * self.attention_factor).to(dtype) for half in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), 1)[:, None, :], torch.cat((sin, sin), 1)[:, None, :]

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, d] by the angles of its tokens' positions."""
        part = x[..., : self.dims]
        turned = apply_rotary(part, cos, sin)
        return turned if self.dims == x.shape[-1] else torch.cat((turned, x[..., self.dims :]), -1)

    def frequencies(self, device: torch.device) -> Tensor:
        """[dims / 2], by which a position is multiplied."""
        exponent = torch.arange(0, self.dims, 2, dtype=torch.int64, device=device).float() / self.dims
        plain = self.theta**exponent
        if self.scaling is None:
            return 1.0 / plain
        if self.scaling.kind == "linear":
            return 1.0 / plain / self.factor
        return self._llama3(1.0 / plain) if self.scaling.kind == "llama3" else self._yarn(plain)

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied with."""
        scaling = self.scaling
        if scaling is None or scaling.kind in ("linear", "llama3"):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if scaling.mscale and scaling.mscale_all_dim:
            return _mscale(self.factor, scaling.mscale) / _mscale(self.factor, scaling.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def _llama3(self, plain: Tensor) -> Tensor:
        assert self.scaling is not None
        low, high = self.scaling.low_freq, self.scaling.high_freq
        assert low is not None
        assert high is not None
        wavelength = 2 * math.pi / plain
        scaled = torch.where(wavelength > self.original / low, plain / self.factor, plain)
        smooth = (self.original / wavelength - low) / (high - low)
        between = (wavelength >= self.original / high) & (wavelength <= self.original / low)
        return torch.where(between, (1 - smooth) * scaled / self.factor + smooth * scaled, scaled)

    def _yarn(self, plain: Tensor) -> Tensor:
        scaling = self.scaling
        assert scaling is not None
        low, high = (self._feature(beta) for beta in (scaling.beta_fast or 32, scaling.beta_slow or 1))
        if scaling.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dims - 1)
        ramp = torch.arange(self.dims // 2, dtype=torch.float32, device=plain.device) - low
        kept = 1 - (ramp / (high - low if high != low else 0.001)).clamp(0, 1)
        return 1.0 / (self.factor * plain) * (1 - kept) + 1.0 / plain * kept

    def _feature(self, rotations: float) -> float:
        """The pair of features that turns so often within the positions of pretraining."""
        return self.dims * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [..., d] by angles whose cos and sin are [..., d], both halves alike."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
