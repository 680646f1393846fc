"""Which layout goes on with fewer ranks: the first of a list that fits, or the nearest that divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isograd.core.layout import Layout


def shrunk_layout(
    layout: Layout, ranks: int, listed: Sequence[Layout], fits: Callable[[Layout], bool]
) -> Layout | None:
    """For at most `ranks` ranks. listed: the only ones that may be taken, if there are any; None: none fits.

    Without a list: as many ranks as possible, with every axis the same or a divisor of it. Such an axis cuts a model
    that the longer one cuts. `fits`: whether the batch can be cut so.
    """
    if listed:
        return next((each for each in listed if each.world_size <= ranks), None)
    for size in range(ranks, 0, -1):
        for each in layout.fits(size):
            divides = all(getattr(layout, axis) % getattr(each, axis) == 0 for axis in ("pp", "cp", "tp", "ep"))
            if divides and fits(each):
                return each
    return None
