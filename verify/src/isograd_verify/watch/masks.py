"""How many numbers a sum adds up: all that it is given, or those that a mask lets through.

    (loss * mask).sum()    loss.masked_fill(mask, 0).sum()    torch.where(mask, loss, 0).sum(-1).sum()

The mask is read off the graph in front of the sum, where autograd has kept it. What a hook of the program has put
elsewhere (checkpointing, offloading) is not asked for: that would bring it back, or compute it again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DEEPEST = 12  # operators between a mask and the sum
_PASSES = (
    "Neg", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "Transpose", "T",
    "Permute", "Sum", "Mul", "Div",
)  # fmt: skip


def added(summed: Tensor) -> tuple[int, bool]:
    """(how many numbers, whether a mask says so) of a tensor whose elements are all summed."""
    node: Any = summed.grad_fn
    size = summed.numel()
    for _ in range(DEEPEST):
        kind = type(node).__name__.partition("Backward")[0] if node is not None else ""
        mask = _mask(node, kind)
        if mask is not None and mask.numel() and size % mask.numel() == 0:
            return int(mask.sum()) * (size // mask.numel()), True
        if kind not in _PASSES or (kind == "Div" and not _number(_saved_tensor(node, "other"))):
            break
        if kind == "Sum":
            size = math.prod(node._saved_self_sym_sizes)
        edges = [edge for edge, _ in node.next_functions if edge is not None]
        if len(edges) != 1:
            break
        node = edges[0]
    return size, False


def _mask(node: Any, kind: str) -> Tensor | None:
    """Which numbers this operator lets through, as zeros and ones; None when it is no mask."""
    if kind == "Mul":
        for kept in (_saved_tensor(node, "other"), _saved_tensor(node, "self")):
            if kept is not None and kept.dim() and not kept.requires_grad and bool(((kept == 0) | (kept == 1)).all()):
                return kept
    if kind == "MaskedFill":
        kept = _saved_tensor(node, "mask")
        return None if kept is None else ~kept
    if kind == "Where":
        kept = _saved_tensor(node, "condition")
        learns = [edge is not None for edge, _ in node.next_functions]
        return None if kept is None or sum(learns) != 1 else kept if learns[0] else ~kept
    return None


def _saved_tensor(node: Any, name: str) -> Tensor | None:
    """A tensor that autograd has kept for a backward, where no hook stands in between."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    data = getattr(saved, "data", None) if getattr(saved, "unpack_hook", None) is None else None
    return data if isinstance(data, Tensor) and data.layout is torch.strided else None


def _number(kept: Tensor | None) -> bool:
    return kept is None or kept.numel() == 1
