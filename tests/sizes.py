"""Which tests run how often: `make test-fast` after an edit, `make test` before a push and in CI, `make full`.

Fast are tests of up to two ranks that take little time. A test that uses `worlds` (gloo) or `threads` and whose
parameters name a layout of more than two ranks is medium, without a mark; so is what medium.txt lists, by file and the
beginning of the name: tests of more than 0.5 s (`pytest --cpu-times FILE`, tests/cpu_times.py). A file marks its slow
tests; slow.txt lists those beside which `make test` has another one of the same thing: it has 15 minutes on two cores,
of which 8 are for the engine and what is not named here, 3 for the verifier, 2 for imagined_cuda, 1.5 for integrations
and half a one for the fuzzer. Tests marked `peers` need packages of an environment of their own: those of them that are
not slow run in `make test-peers`, which has 90 seconds. Of a product of settings (`sized`), the cases in which every
pair of values meets are medium, the rest are slow. With RANKS=gloo, as in `make full`, what runs on threads elsewhere
runs on processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

MEDIUM, SLOW = (tuple(Path(__file__).with_name(f"{size}.txt").read_text().splitlines()) for size in ("medium", "slow"))


def on_gloo() -> bool:
    """Whether every rank is a process."""
    return os.environ.get("RANKS") == "gloo"


def pairwise(
    cases: Iterable[Case], values: Callable[[Any], Sequence[Hashable]] = tuple, met: Iterable[Case] = ()
) -> list[Case]:
    """As few cases as a greedy choice finds in which any two values that meet in some case, and not in `met`, meet."""
    pairs = {case: {*combinations(enumerate(values(case)), 2)} for case in cases}
    chosen: list[Case] = []
    left = set().union(*pairs.values()) - set().union(*(pairs[case] for case in met))
    while left:
        chosen.append(max(pairs, key=lambda case: len(pairs[case] & left)))
        left -= pairs[chosen[-1]]
    return chosen


def sized(
    cases: Sequence[tuple[Any, ...]], values: Callable[[Any], Sequence[Hashable]], fast: Callable[[Any], bool]
) -> list[Any]:
    """The cases as parameters of a test. As few of them as any two values need to meet are unmarked when `fast`, else
    medium; the rest are slow."""
    quick = pairwise(filter(fast, cases), values)
    medium = pairwise(cases, values, quick)
    size = {case: () if case in quick else pytest.mark.medium if case in medium else pytest.mark.slow for case in cases}
    return [pytest.param(*case, marks=size[case]) for case in cases]


def one_of_each(firsts: Sequence[Any], others: Iterable[Any], at_most: int | None = None) -> list[Any]:
    """All pairs as parameters of a test: those of `make test` have each of the first (`at_most`) values once, beside
    another one of the others."""
    others = list(others)
    kept = [(first, others[number % len(others)]) for number, first in enumerate(firsts[:at_most])]
    every = [(first, other) for first in firsts for other in others]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in kept)) for pair in every]


def few(values: Iterable[Case], slow: Iterable[Case]) -> list[Any]:
    """The values as parameters of a test: those of `slow` for `make full` only."""
    slow = list(slow)
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]


def mark(item: pytest.Item) -> None:
    """Mark a collected test by its parameters, by medium.txt and by slow.txt."""
    name = item.nodeid.removeprefix("tests/").replace(".py::", "::", 1)
    if name.startswith(MEDIUM) or _most_ranks(item) > 2:
        item.add_marker("medium")
    if name.startswith(SLOW):
        item.add_marker("slow")


def _most_ranks(item: pytest.Item) -> int:
    if not (
        isinstance(item, pytest.Function) and hasattr(item, "callspec") and {"worlds", "threads"} & {*item.fixturenames}
    ):
        return 1
    layouts = [value for value in item.callspec.params.values() if isinstance(value, str)]
    return max((prod(map(int, re.findall(r"\b[dctp]p(\d+)", layout))) for layout in layouts), default=1)
