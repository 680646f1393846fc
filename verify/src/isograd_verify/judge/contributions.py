"""Which contributions is a gradient made of, and how often does each count?

A contribution is what one backward added to a parameter on one rank before any communication. The gradient that reached
clip and optimizer must be all of them with one coefficient. `fit` finds the coefficients from sketches: first the
single one that explains everything, else by least squares. Equal contributions cannot be told apart and count as one;
zero ones say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.record.events import Key
from isograd_verify.tell.wording import equal


@dataclass(frozen=True)
class Fit:
    """A gradient as a sum of contributions."""

    coefficients: dict[Key, float]  # one per class of equal contributions, under its first member: of all of them
    classes: dict[Key, tuple[Key, ...]]  # the members of each class
    residual: float  # what is left, relative to the gradient
    uniform: bool  # one coefficient explains everything: one for each class, or one for each member of every class
    determined: bool  # false: the coefficients are one solution of many

    @property
    def each(self) -> tuple[float, ...]:
        """The coefficients that a single contribution may have, the largest first, and which fit all classes. Of equal
        contributions of n ranks one may count, or all n, or copies of parts."""
        found: list[float] = []
        for i, (first, total) in enumerate(self.coefficients.items()):
            possible = [total / k for k in range(1, len(self.classes[first]) + 1) if len(self.classes[first]) % k == 0]
            found = possible if i == 0 else [x for x in found if any(equal((x, y)) for y in possible)]
        return tuple(found)


def fit(gradient: Tensor, parts: dict[Key, Tensor], tolerance: float, own: int | None = None) -> Fit | None:
    """None when there is nothing to explain the gradient with. `own` puts that rank first among equals."""
    if not all(bool(t.isfinite().all()) for t in (gradient, *parts.values())):
        return None
    largest = max((float(p.norm()) for p in parts.values()), default=0.0)
    keys = [k for k in parts if float(parts[k].norm()) > tolerances.NOTHING * largest] if largest else []
    if not keys:
        return None
    keys.sort(key=lambda k: (k[0] != own, k))
    classes: dict[Key, list[Key]] = {}
    for key in keys:
        sizes_of = {first: tolerances.SAME * float(parts[first].norm()) for first in classes if first[0] != key[0]}
        same = (first for first, size in sizes_of.items() if float((parts[key] - parts[first]).norm()) <= size)
        classes.setdefault(next(same, key), []).append(key)
    firsts = list(classes)
    matrix = torch.stack([parts[k] for k in firsts], 1)
    used = matrix.abs().sum(1) > 0
    matrix, wanted = matrix[used], gradient[used]
    outside = float(gradient[~used].norm())  # nothing that was added reaches these elements
    size = max(float(gradient.norm()), tolerances.NOTHING * largest)
    members = {k: tuple(v) for k, v in classes.items()}

    sizes = torch.tensor([float(len(members[k])) for k in firsts], dtype=matrix.dtype)
    for weights in (torch.ones_like(sizes), sizes):  # classes count alike, or members do
        together = matrix @ weights
        c = float(together @ wanted) / max(float(together @ together), 1e-300)
        residual = _left(together * c - wanted, outside) / size
        if residual <= tolerance:
            values = {k: c * w for k, w in zip(firsts, weights.tolist(), strict=True)}
            return Fit(values, members, residual, True, _independent(matrix))
    found = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution[:, 0]
    residual = _left(matrix @ found - wanted, outside) / size
    values = {k: _tidy(float(v), tolerance) for k, v in zip(firsts, found, strict=True)}
    return Fit(values, members, residual, False, _independent(matrix))


def _independent(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    if columns >= rows and columns > 1:
        return False
    scaled = matrix / matrix.norm(dim=0).clamp_min(1e-300)
    values = torch.linalg.svdvals(scaled)
    return bool(values[-1] > tolerances.INDEPENDENT * values[0])


def _left(difference: Tensor, outside: float) -> float:
    return float((difference.square().sum() + outside**2).sqrt())


def _tidy(value: float, tolerance: float) -> float:
    """The small fraction a coefficient is near to, else itself: for reading, not for judging."""
    for below in (1, 2, 3, 4, 6, 8, 16):
        whole = round(value * below)
        if abs(value * below - whole) <= tolerances.LOOSER * tolerance * max(1.0, abs(whole)):
            return whole / below
    return value
