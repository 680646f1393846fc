"""Rotary positions, plain or scaled for sequences longer than those of pretraining, as in Hugging Face's models.

A feature pair turns by position * frequency. A scaling changes the frequencies, some also the length of cos and sin:

    linear      all frequencies are divided by `factor`
    llama3      low ones are divided by `factor`, high ones stay, those between are interpolated
    yarn        the same with a linear ramp over features; cos and sin are multiplied with an attention factor
    longrope    each has a divisor of its own: `short`, or `long` for texts longer than those of pretraining; cos and
                sin are multiplied with an attention factor

Under longrope the length of each text decides, also where several are packed into one sequence: what one text is
turned by does not depend on the others of its batch, nor on which rank has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isograd.errors import did_you_mean
from isograd.nn import passes

NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_positions", "low_freq", "high_freq"),
    "yarn": ("factor", "original_positions"),
    "longrope": ("factor", "original_positions", "short", "long"),
}
TAKES = {
    "linear": (),
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How frequencies are scaled. Options that its kind does not have must be left out."""

    kind: str  # "linear" | "llama3" | "yarn" | "longrope"
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
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def problems(self, dims: int) -> list[str]:
        """What is wrong with these values for heads of which `dims` features turn."""
        if self.kind not in NEEDS:
            kinds = ", ".join(NEEDS)
            return [f"rope_scaling.kind is one of {kinds}, not {self.kind!r}{did_you_mean(self.kind, NEEDS)}"]
        needs, given = NEEDS[self.kind], [n for n in self.__dataclass_fields__ if getattr(self, n) not in (None, ())]
        found = [f"rope_scaling of kind {self.kind} needs {name}" for name in needs if name not in given]
        allowed = ("kind", *needs, *TAKES[self.kind])
        found += [f"rope_scaling of kind {self.kind} has no {name}" for name in given if name not in allowed]
        positive = (
            "factor",
            "original_positions",
            "low_freq",
            "high_freq",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                found.append(f"rope_scaling.{name} must be positive and finite, not {value}")
        if self.low_freq is not None and self.low_freq == self.high_freq:
            found.append(f"rope_scaling.low_freq and high_freq are both {self.low_freq}")
        if self.kind == "longrope" and self.original_positions == 1:
            found.append("rope_scaling.original_positions must be more than 1")
        for name in ("short", "long"):
            values = getattr(self, name)
            if values and len(values) != dims // 2:
                found.append(f"rope_scaling.{name} has {len(values)} divisors, and {dims // 2} pairs of features turn")
            if not all(value > 0 and math.isfinite(value) for value in values):
                found.append(f"rope_scaling.{name} must be positive and finite")
        return found


class Rotary:
    """Rotary positions on the first `dims` features of a head, in Hugging Face's convention of two halves."""

    def __init__(self, dims: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        self.dims, self.theta, self.scaling = dims, theta, scaling
        self.factor = (scaling.factor if scaling is not None else None) or 1.0
        self.original = (scaling.original_positions if scaling is not None else None) or 1

    @property
    def by_length(self) -> bool:
        """Whether the angles of a token depend on the length of its text."""
        return self.scaling is not None and self.scaling.kind == "longrope"

    def table(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, dims]. Angles are computed in fp32 in any dtype, as in the published models.

        lengths [T]: of each token's text; needed where angles depend on it.
        """
        frequencies = self.frequencies(positions.device)
        if self.by_length:
            assert lengths is not None
            long = self.frequencies(positions.device, long=True)
            frequencies = torch.where((lengths > self.original)[:, None], long, frequencies)
        angles = positions.float()[:, None] * frequencies
        cos, sin = ((half * self.attention_factor).to(dtype) for half in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), 1)[:, None, :], torch.cat((sin, sin), 1)[:, None, :]

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, d] by the angles of its tokens' positions."""
        part = x[..., : self.dims]
        turned = passes.turn(part, cos, sin)
        return turned if self.dims == x.shape[-1] else torch.cat((turned, x[..., self.dims :]), -1)

    def frequencies(self, device: torch.device, long: bool = False) -> Tensor:
        """[dims / 2], by which a position is multiplied. `long`: of longrope, those of long texts."""
        exponent = torch.arange(0, self.dims, 2, dtype=torch.int64, device=device).float() / self.dims
        plain = self.theta**exponent
        if self.scaling is None:
            return 1.0 / plain
        if self.scaling.kind == "longrope":
            divisors = self.scaling.long if long else self.scaling.short
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device=device) * plain)
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
        if scaling.kind == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if self.factor > 1 else 1.0
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


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
