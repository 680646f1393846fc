"""How a recording tells what was chosen for each token (its experts), and how a token is recognised in another run.

    choice/MICRO/NUMBER/K/DTYPE/MODULE      [tokens, FEATURES + numbers + K], one row per token: a few products of what
        the module was given; the numbers of which the largest K were chosen; which these are

A layout cuts tokens over ranks, micro-batches and positions, so a token has no number that all layouts know: it is the
row of the other run whose features are the same to rounding, and its scores are so, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from isograd_verify import tolerances
from isograd_verify.record.sketch import dtype_name

FEATURES = 16
MOST_NUMBERS = 4096  # of which some are chosen; a vocabulary has more
_AT_ONCE = 1 << 10  # tokens that are looked for at a time
_SIZES = {"float64": 8, "float32": 4}


@dataclass(frozen=True)
class Choices:
    """What a module chose for some tokens."""

    module: str
    dtype: str  # in which its numbers were computed: how large their rounding is
    features: Tensor  # [tokens, FEATURES]
    scores: Tensor  # [tokens, numbers]
    indices: Tensor  # int64 [tokens, K]

    @property
    def kind(self) -> tuple[int, int]:
        """Of how many numbers how many are chosen."""
        return self.scores.shape[1], self.indices.shape[1]

    @classmethod
    def of(cls, module: str, given: Tensor | None, scores: Tensor, indices: Tensor, narrow: str) -> Choices:
        """`given`: what the module got, a row per token; without it tokens are recognised by their scores. `narrow`: a
        precision in which products are computed, if it is another one than the tensors'."""
        scores, indices = scores.detach().flatten(0, -2), indices.detach().flatten(0, -2)
        rows = scores if given is None else given.detach().reshape(len(scores), -1)
        wide = torch.float64 if scores.dtype == rows.dtype == torch.float64 else torch.float32
        features = rows.to(wide).nan_to_num() @ _directions(rows.shape[1]).to(rows.device, wide)
        names = [name for name in (dtype_name(scores), dtype_name(rows), narrow) if name]
        dtype = min(names, key=lambda name: _SIZES.get(name, 2))
        return cls(module, dtype, features.cpu(), scores.to(wide).cpu(), indices.cpu())

    def tensor(self) -> Tensor:
        """As a recording holds it."""
        return torch.cat([self.features, self.scores, self.indices.to(self.scores.dtype)], 1)

    def path(self, micro: int, number: int) -> str:
        """Under which name."""
        return f"choice/{micro}/{number:06d}/{self.indices.shape[1]}/{self.dtype}/{self.module}"

    def find(self, known: Choices) -> Tensor:
        """For each token its row in `known`; -1 for a token that is not there."""
        limit = max(_rounding(self.dtype), _rounding(known.dtype))
        theirs = known.features.double()
        found = []
        for mine in self.features.double().split(_AT_ONCE):
            nearest = torch.cdist(mine, theirs, compute_mode="donot_use_mm_for_euclid_dist").min(1)
            near = nearest.values <= limit * theirs[nearest.indices].norm(dim=1)
            found.append(nearest.indices.where(near, -1))
        return torch.cat(found)

    def same_scores(self, known: Choices, rows: Tensor) -> Tensor:
        """Whether a token's scores are those of its row in `known`, to rounding."""
        limit = max(_rounding(self.dtype), _rounding(known.dtype))
        mine, theirs = self.scores.double(), known.scores.double()[rows.clamp(min=0)]
        finite = theirs[theirs.isfinite()].abs()
        usual = finite.median() if len(finite) else 0.0
        near = (mine - theirs).abs() <= limit * (theirs.abs() + usual)
        return (near | (mine == theirs)).all(1) & (rows >= 0)

    def same_choice(self, known: Choices, rows: Tensor) -> Tensor:
        """Whether a token's choice is that of its row in `known`, in any order."""
        theirs = known.indices[rows.clamp(min=0)]
        return (self.indices.sort(1).values == theirs.sort(1).values).all(1)


def read(tensors: dict[str, Tensor]) -> list[Choices]:
    """The choices among the tensors of a step, in the order in which they were made."""
    found = []
    for path in sorted(path for path in tensors if path.startswith("choice/")):
        _, _, _, count, dtype, module = path.split("/", 5)
        columns = tensors[path].shape[1] - FEATURES - int(count)
        features, scores, indices = tensors[path].split([FEATURES, columns, int(count)], 1)
        found.append(Choices(module, dtype, features, scores, indices.long()))
    return found


def joined(choices: Iterable[Choices]) -> dict[tuple[str, tuple[int, int]], Choices]:
    """All tokens of a module's calls as one, by (module, kind); under module '' those of every module."""
    lists: dict[tuple[str, tuple[int, int]], list[Choices]] = {}
    for one in choices:
        for module in {one.module, ""}:
            lists.setdefault((module, one.kind), []).append(one)
    together = {}
    for key, found in lists.items():
        dtype = min((one.dtype for one in found), key=lambda name: _SIZES.get(name, 2))
        tensors = (torch.cat(of) for of in zip(*((c.features, c.scores, c.indices) for c in found), strict=True))
        together[key] = Choices(key[0], dtype, *tensors)
    return together


def counterpart(known: dict[tuple[str, tuple[int, int]], Choices], one: Choices) -> Choices | None:
    """Where the tokens of a call are looked for: among the same module's, or else among all modules'."""
    return known.get((one.module, one.kind)) or known.get(("", one.kind))


def _rounding(dtype: str) -> float:
    return tolerances.ACTIVATION.get(dtype, tolerances.ACTIVATION_HALF)


@lru_cache(maxsize=64)
def _directions(size: int) -> Tensor:
    return torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
