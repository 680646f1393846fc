"""A loss of several terms, each the mean of other things: `ig.Terms`.

    return ig.Terms(lm=(loss, tokens), balance=(aux, sequences, 0.01))     # from a model, or to engine.backward

A term is (value, weight) or (value, weight, coefficient). The value is a mean over this rank's things of one kind
(labels, routed tokens, sequences, ...), the weight is their number. The loss of a step is the sum over its terms of
coefficient * (the mean over the things of all ranks and micro-batches). engine/term_weights.py has the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from isograd.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


class Term(NamedTuple):
    """One term of a loss, as one rank has it in one micro-batch."""

    value: Tensor  # the mean, one number
    weight: Tensor | float  # of how many things; 0: the value is not looked at
    coefficient: float = 1.0  # of the mean in the loss; 0: the term is shown in the stats and has no gradient


class Terms(Mapping[str, Term]):
    """Terms of a loss by name: `Terms(lm=(loss, tokens), balance=(aux, sequences, 0.01))`."""

    def __init__(self, /, **terms: tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, float]) -> None:
        self._terms = {name: _term(name, given) for name, given in terms.items()}

    def __getitem__(self, name: str) -> Term:
        return self._terms[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._terms)

    def __len__(self) -> int:
        return len(self._terms)

    def __repr__(self) -> str:
        return f"Terms({', '.join(f'{name}={tuple(term)}' for name, term in self._terms.items())})"


def _term(name: str, given: object) -> Term:
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    number = isinstance(parts[-1], int | float) and math.isfinite(parts[-1])
    if len(parts) not in (2, 3) or (len(parts) == 3 and not number):
        shown = ", ".join(type(part).__name__ if hasattr(part, "shape") else repr(part) for part in parts)
        raise EngineError("IG560", seen=f"{name}=({shown})", name=name)
    return Term(*parts)
