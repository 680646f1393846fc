"""The ranks that communicate along some axes, which every collective is given; how they share what is cut evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

from isograd.comm.transport import Nccl
from isograd.errors import CommError


class Wait(NamedTuple):
    """What a rank waits for now, and who watches it (deadlock.py)."""

    handle: Any = None
    watch: Any = None


class RankContext:
    """Where one rank makes its groups: a process, a thread, or a simulation. Every rank makes them in one order."""

    def __init__(self) -> None:
        self.tags: Counter[tuple[int, ...]] = Counter()  # how many ranges of tags groups of these ranks have reserved
        self.made: dict[tuple[str, tuple[int, ...]], Any] = {}  # transports, by purpose and ranks: meshes share them
        self.wait = Wait()
        self.checks: WeakSet[Any] = WeakSet()  # of a step's messages, while they live (engine/sdc/reductions.py)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A pickled mesh of no world has groups of its own."""
        return RankContext, ()

    def awaited(self) -> int | None:
        """The global rank from which, or to which, a message is under way that this rank waits for, if it does."""
        handle = self.wait.handle
        at = None if handle is None else handle.at
        return handle.group.ranks[at[1]] if at is not None and handle.group is not None and at[1] >= 0 else None

    def leave(self, why: str) -> None:
        """Close this rank's connections."""
        if self.wait.watch is not None:
            self.wait.watch.over.set()


@dataclass(eq=False)
class Group:
    """The ranks along one axis (or several, flattened): global ranks in order, and this rank's index among them."""

    axes: str
    ranks: tuple[int, ...]
    index: int
    connections: Any = field(default=None, repr=False)  # a Transport; None for a group of one or an unbound mesh
    purpose: str = ""  # groups of different purposes have connections of their own
    context: RankContext = field(default_factory=RankContext, repr=False)

    def __deepcopy__(self, memo: object) -> Group:
        """The same group: connections cannot be copied."""
        return self

    @property
    def transport(self) -> Any:
        """How its messages travel, as long as they do."""
        return None if self.connections is None or self.connections.closed else self.connections

    @property
    def is_nccl(self) -> bool:
        """Whether its messages travel by NCCL: the host never waits for them, and they have no tags."""
        return isinstance(self.transport, Nccl)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def refuse_closed(self) -> None:
        """Raise where this rank's connections were closed: it may be a step behind the others, or ahead."""
        if self.connections is not None and self.connections.closed:
            raise CommError("IG207", axes=self.axes, closed=self.connections.closed)


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """`total` cut into `parts` that differ by at most one, larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))
