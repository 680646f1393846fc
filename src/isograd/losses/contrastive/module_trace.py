"""Names the module whose random draws differ in the replay of a chunk: equal inputs, but different outputs.

Inner modules finish before outer ones, so the first such module has no child that explains the difference. Only one
fingerprint is kept per input and output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from isograd.comm.fingerprint import fingerprint

Trace = list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # module, what went in, what came out


@contextmanager
def traced(model: nn.Module, into: Trace) -> Iterator[None]:
    """Record fingerprints of the inputs and outputs of every module of the model."""
    given: dict[int, list[tuple[int, ...]]] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.setdefault(id(module), []).append(_prints((args, kwargs)))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        into.append((names[id(module)], given[id(module)].pop(), _prints(output)))

    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(leave) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_difference(before: Trace, after: Trace) -> str | None:
    """The first module that turned equal inputs into different outputs; None when there is none."""
    for (name, given, made), (other, given_again, made_again) in zip(before, after, strict=False):
        if name != other:
            return None
        if given == given_again and made != made_again:
            return name
    return None


@torch.no_grad()
def _prints(what: Any) -> tuple[int, ...]:
    return tuple(int(fingerprint(t)) for t in tree.tree_leaves(what) if isinstance(t, Tensor))
