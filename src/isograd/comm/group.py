"""The ranks that communicate along some axes, which every collective is given; how they share what is cut evenly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Group:
    """The ranks along one axis (or several, flattened): global ranks in order, and this rank's index among them."""

    axes: str
    ranks: tuple[int, ...]
    index: int
    handle: Any = field(default=None, repr=False)  # torch ProcessGroup; None for a group of one or an unbound mesh
    purpose: str = ""  # groups of different purposes have connections of their own
    near: Any = field(default=None, repr=False)  # what near.channels_of says; None: not yet known

    def __deepcopy__(self, memo: object) -> Group:
        """The same group: connections cannot be copied."""
        return self

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`total` cut into `parts` that differ by at most one, larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))
