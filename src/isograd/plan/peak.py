"""The peak of what a rank's memory holds in a rehearsed step: when, how much, and whose it is.

Every later step begins with the optimizer's state, which the first one makes at its end: it is counted from the start.
Pieces are rounded up to 512 bytes, as allocators of GPUs do, or as the caller says. Not counted: memory that kernels
take for themselves, pieces below allocations.LEAST, what the allocator cannot use between pieces, and the program
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isograd.plan.allocations import KINDS, OPTIMIZER, Allocations

OWNERS = 10


@dataclass(frozen=True)
class Peak:
    """What a rank's memory holds in a step."""

    bytes: int
    when: str  # "backward 3 of 8"
    kinds: dict[str, int]  # bytes at the peak
    most: dict[str, int]  # the most bytes of each kind in the step, whenever that is
    left: dict[str, int]  # bytes of each kind when the step is over
    owners: tuple[tuple[str, int], ...]  # the ten largest, bytes at the peak


Taken = Callable[[int], int]  # the bytes that an allocator takes for a piece of so many


def of_gpu(size: int) -> int:
    """What PyTorch's allocator for GPUs takes."""
    return -(-size // 512) * 512


def peak(allocations: Allocations, began: int, taken: Taken = of_gpu) -> Peak:
    """`began`: the moment at which the step began."""
    pieces, end = allocations.pieces(), allocations.moment + 1
    sizes = np.array([taken(piece.bytes) for piece in pieces], dtype=np.int64)
    born = np.array([0 if piece.kind == OPTIMIZER else piece.born for piece in pieces], dtype=np.int64)
    died = np.array([piece.died for piece in pieces], dtype=np.int64)
    kinds = np.array([KINDS.index(piece.kind) for piece in pieces], dtype=np.int64)
    held_by = np.zeros((len(KINDS), end + 1), dtype=np.int64)
    np.add.at(held_by, (kinds, born), sizes)
    np.add.at(held_by, (kinds, died), -sizes)
    held_by = held_by.cumsum(1)[:, began:end]
    total = held_by.sum(0)
    top = int(total.argmax())
    there = (born <= began + top) & (died > began + top)
    owners: Counter[str] = Counter()
    for number in there.nonzero()[0].tolist():
        piece = pieces[number]
        owners[f"{piece.kind}: {piece.owner}"] += int(sizes[number])
    phases = _numbered(allocations.phases, began)
    here = [name for at, name in phases if at <= top][-1]
    return Peak(
        int(total[top]),
        here,
        {kind: int(held_by[row, top]) for row, kind in enumerate(KINDS)},
        {kind: int(held_by[row].max()) for row, kind in enumerate(KINDS)},
        {kind: int(sizes[(kinds == row) & (died == allocations.moment)].sum()) for row, kind in enumerate(KINDS)},
        tuple(owners.most_common(OWNERS)),
    )


def _numbered(phases: list[tuple[int, str]], began: int) -> list[tuple[int, str]]:
    """The phases of the step, from its first moment on; of several of one name, which of how many."""
    ours = [(max(0, at - began), name) for at, name in phases if at >= began] or [(0, "step")]
    many, seen = Counter(name for _, name in ours), Counter[str]()
    found = []
    for number, (at, name) in enumerate(ours):
        seen[name] += 1
        words = f"{name} {seen[name]} of {many[name]}" if many[name] > 1 else name
        found.append((at if number else 0, words))
    return found
