"""Which ranks lie on which axis, as the text of a layout says: 'dp2 tp2' names the axes in what is said of a run.

Ranks are numbered with pp outermost, then dp, cp, and tp innermost; ep neighbours hold different experts, edp copies of
them. Words without one of these axes ('sp', 'zero1') change no rank's place.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cache

from isograd_verify.errors import VerifyError

DATA = "dp cp"  # the axes over which every parameter's gradient is a sum, but for routed experts
AXES = ("pp", "dp", "cp", "tp")  # outermost first
FOLDED = ("ep", "edp")  # of experts


@dataclass(frozen=True)
class Axes:
    """The sizes of the axes, by name; an axis that is not named has one rank."""

    sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    @cache
    def parse(cls, text: str, world: int) -> Axes:
        """'dp2 tp2 sp' in a world of that many ranks, which the sizes must be those of."""
        found = {m[1]: int(m[2]) for word in text.split() if (m := re.fullmatch(r"([a-z]+)(\d{1,9})", word))}
        axes = cls({name: size for name, size in found.items() if name in (*AXES, "ep")})
        ranks = math.prod(axes.size(name) for name in AXES)
        if ranks != world or not axes.size("ep") or world // axes.size("pp") % axes.size("ep"):
            raise VerifyError(
                "IG705", f"the layout {text[:100]!r} is not one of {world} ranks", seen=f"a product of {ranks}",
                expected="pp, dp, cp and tp with their sizes, as in 'dp2 tp2', and ep that divides a stage's ranks",
                fix="give the run's own layout, or none",
            )  # fmt: skip
        return axes

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return math.prod(self.size(name) for name in AXES)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return self.sizes.get(axis, 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of a rank on each of pp, dp, cp and tp."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def ranks(self, axes: str, rank: int) -> set[int]:
        """The ranks along one axis or several ('dp cp'), seen from one of them."""
        if axes in FOLDED:
            stage = self.world_size // self.size("pp")
            mine = range(rank - rank % stage, rank - rank % stage + stage)
            ep = self.size("ep")
            return {*range(rank - rank % ep, rank - rank % ep + ep)} if axes == "ep" else {*mine[rank % ep :: ep]}
        fixed = [axis for axis in AXES if axis not in axes.split()]
        here = self.coordinates(rank)
        spots = {other: self.coordinates(other) for other in range(self.world_size)}
        return {other for other, spot in spots.items() if all(spot[axis] == here[axis] for axis in fixed)}
