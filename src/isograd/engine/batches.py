"""Cuts a batch into micro-batches: rows of every tensor in it, in parts that differ by at most one row.

A list is taken as micro-batches already cut, which may then differ in length, or share no rows at all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.comm.raw import even_sizes
from isograd.errors import EngineError


def micro_batches(batch: Any, count: int | None) -> list[Any]:
    """`batch`: a tensor, or a dict or tuple of tensors (and of what is not per row); or a list of such."""
    if isinstance(batch, list):
        if not batch or count not in (None, len(batch)):
            raise _refusal("the list of micro-batches has another length", f"{len(batch)} in the list", f"{count}")
        return batch
    leaves = [t for t in tree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    rows = {len(t) for t in leaves}
    count = 1 if count is None else count
    if len(rows) != 1:
        raise _refusal("the tensors of the batch have no common number of rows", f"{sorted(rows)}", "one")
    total = rows.pop()
    if not 1 <= count <= total:
        raise _refusal(f"{total} rows cannot be cut into {count} micro-batches", f"{count}", f"from 1 to {total}")
    ends = [sum(even_sizes(total, count)[:i]) for i in range(count + 1)]
    return [
        tree.tree_map(lambda t, a=a, b=b: t[a:b] if isinstance(t, Tensor) and t.dim() else t, batch)
        for a, b in pairwise(ends)
    ]


def call(model: nn.Module, micro: Any) -> Any:
    """The model on a micro-batch: a dict gives keyword arguments, a tuple positional ones."""
    if isinstance(micro, dict):
        return model(**micro)
    return model(*micro) if isinstance(micro, tuple) else model(micro)


def _refusal(what: str, seen: str, expected: str) -> EngineError:
    return EngineError(
        "IG518",
        what,
        seen=seen,
        expected=expected,
        fix="give train_step a dict or tuple of tensors with samples in dim 0, or a list of micro-batches",
    )
