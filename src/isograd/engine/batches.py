"""Cuts a batch into micro-batches: rows of every tensor in it, in parts that differ by at most one row.

A list is taken as micro-batches already cut, which may then differ in length, or share no rows at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils import _pytree as tree

from isograd.comm.group import even_sizes
from isograd.core.loss_terms import Terms
from isograd.engine.tree import tree_sum
from isograd.errors import EngineError

CUT = "give train_step a dict or tuple of tensors with samples in dim 0, or a list of micro-batches"


def micro_batches(batch: Any, count: int | None) -> list[Any]:
    """`batch`: a tensor, or a dict or tuple of tensors (and of what is not per row); or a list of such."""
    if isinstance(batch, list):
        if not batch or count not in (None, len(batch)):
            raise _refusal("the list of micro-batches has another length", f"{len(batch)} in the list", f"{count}")
        return batch
    leaves = [t for t in tree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    rows = {len(t) for t in leaves}
    count = 1 if count is None else count
    if not isinstance(count, int):
        raise _refusal("the number of micro-batches is no whole number", repr(count), "None, or a number from 1")
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


def call(model: Callable[..., Any], micro: Any) -> Any:
    """The model on a micro-batch: a dict gives keyword arguments, a tuple positional ones."""
    with record_function("isograd: forward" if isinstance(model, nn.Module) else "isograd: weights"):
        if isinstance(micro, dict):
            return model(**micro)
        return model(*micro) if isinstance(micro, tuple) else model(micro)


def loss_of(model: Callable[..., Any], micro: Any) -> Any:
    """What the model returns for a micro-batch: (loss, weight), or Terms."""
    result = call(model, micro)
    if isinstance(result, Terms) or (isinstance(result, tuple | list) and len(result) == 2):
        return result
    kind = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple | list) else type(result).__name__
    raise _refusal("the model returns no loss with its weight", kind, "(loss, weight), or ig.Terms", fix=None)


def said_weights(model: nn.Module, micros: Sequence[Any]) -> dict[str, Tensor] | None:
    """The weights of a step's terms on this rank, as the model's `term_weights` says them for each micro-batch."""
    says = getattr(model, "term_weights", None)
    if says is None:
        return None
    said: list[Mapping[str, Any] | None] = [call(says, micro) for micro in micros]
    return _sums(weights or {} for weights in said) if any(said) else None


def counted_weights(model: nn.Module, first: Terms, others: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
    """The same of a model that does not say them: by a pass without gradients over the micro-batches after the first.

    It leaves buffers and torch's generators as they were: the pass with gradients draws and counts as without this one.
    """
    results = [first]
    with torch.no_grad(), _untouched(model, device):
        results += [call(model, micro) for micro in others]
    return _sums({name: term.weight for name, term in terms.items()} for terms in results)


def _sums(weights: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for said in weights:
        for name, weight in said.items():
            found.setdefault(name, []).append(torch.as_tensor(weight, dtype=torch.float64))
    return {name: tree_sum(each) for name, each in found.items()}


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        yield
    for buffer, value in before:
        buffer.data.copy_(value)  # .data: a graph that has saved the buffer may still be used


def _refusal(what: str, seen: str, expected: str, fix: str | None = CUT) -> EngineError:
    return EngineError("IG518", what, seen=seen, expected=expected, fix=fix)
