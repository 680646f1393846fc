"""Records large tensors by sketches alone (record/projection.py): because it was asked for, or because the whole ones
of a step would not fit into a rank's file.

    along/KIND/D/NAME       sums of a gradient ('final'), or of a parameter before or after the step, along dimension D
    along/MICRO/D/NAME      a sketch of the sums of what one backward added
"""

from __future__ import annotations

import torch
from torch import Tensor

from isograd_verify.record.projection import SMALL, Projected, project, project_row, worthwhile
from isograd_verify.record.sketch import sketch
from isograd_verify.watch import foreign

MOST_CUT = 16  # ranks over which a tensor is cut whose shards are too small to be recorded by sketches


class Sketching:
    """`beyond`: elements of a tensor that is recorded by sketches alone; None: only where whole ones do not fit."""

    def __init__(self, limit: int, boxes: dict[str, tuple[foreign.Box, tuple[int, ...]]], beyond: int | None) -> None:
        self.limit, self.boxes, self.asked = limit, boxes, beyond is not None
        self.small = SMALL if beyond is None else beyond
        self.on = self.asked

    def reserve(self, size: int) -> None:
        """Before a step's first forward: so many bytes of whole gradients and parameters would be written."""
        self.on = self.asked or size > self.limit

    def instead(self, path: str, value: Tensor, of: foreign.Held) -> dict[str, Tensor]:
        """The sketches to keep instead of a whole tensor, by path; none: the tensor is kept as a whole."""
        kind, _, name = path.partition("/")
        box, whole = self.boxes.get(name) or (foreign.box_of(of), foreign.whole_shape(of))
        in_a_row = box is not None and len(box) == 1 != len(whole)
        shape = whole if in_a_row else tuple(value.shape)
        if not self.on or not value.is_floating_point() or not worthwhile(shape, value.numel(), self.small):
            return {}
        if in_a_row and box is not None:
            sums = project_row(value, whole, box[0][0])
        else:
            own = box is not None and tuple(b - a for a, b in box) == shape
            sums = project(value, tuple(a for a, _ in box) if box is not None and own else ())
        return _paths(kind, name, sums, torch.float64 if value.dtype == torch.float64 else torch.float32)

    def contribution(self, number: int, name: str, value: Tensor) -> dict[str, Tensor]:
        """What a backward added on this rank: a shard's is explained by these where its place is not known yet."""
        least = self.small // MOST_CUT  # of a large tensor's shard
        if not self.on or not worthwhile(tuple(value.shape), value.numel(), least):
            return {}
        sums = project(value)
        small = {d: torch.stack([sketch(row) for row in along]) for d, along in sums.along.items()}
        return _paths(str(number), name, Projected(sums.shape, small), torch.float64)


def _paths(kind: str, name: str, sums: Projected, dtype: torch.dtype) -> dict[str, Tensor]:
    return {f"along/{kind}/{dim}/{name}": along.to(dtype) for dim, along in sums.along.items()}


_DEPTH = {
    "sum": 1,
    "final": 1,
    "clipped": 1,
    "early": 1,
    "whole": 1,
    "part": 2,
    "along": 3,
}  # words of a path before a parameter's name


def gradient_of(path: str) -> str | None:
    """The parameter whose gradient, or a part of it, a tensor of a step's file tells; None of any other tensor."""
    words = path.split("/", _DEPTH.get(path.partition("/")[0], 0))
    state = words[0] == "along" and words[1] in ("parameter", "after")
    return words[-1] if len(words) > 1 and not state else None


def number_of(path: str) -> int | None:
    """The number of the contribution that a tensor of a step's file tells; None of any other tensor."""
    kind, *rest = path.split("/", 2)
    return int(rest[0]) if kind in ("part", "along") and rest[0].isdigit() else None
