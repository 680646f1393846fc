"""What a model was given: every tensor of a call by name (of forward's parameters, and of the keys of dicts), as hashes
that add up over ranks and micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from isograd_verify.record.events import ForwardInputs, GivenTensor
from isograd_verify.record.sketch import content_hash, dtype_name, element_hashes, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder

MOST_FILLERS = 8
MOST_OUTPUTS = 16  # of a model that are asked whether a backward reaches them


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor in a call's arguments, by name; a wrapper's arguments go to the module inside it."""
    found: dict[str, Tensor] = {}
    try:
        signature = inspect.signature(foreign.unwrapped(module).forward)
        bound = dict(signature.bind(*args, **kwargs).arguments)
        rest = [name for name, one in signature.parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD]
    except (TypeError, ValueError):
        bound, rest = {str(i): value for i, value in enumerate(args)} | kwargs, []
    for name in rest:
        bound |= bound.pop(name, {})
    for path, key, tensor in _walk(bound, "", ""):
        found[key if key not in found else path] = tensor
    return found


def _walk(value: Any, path: str, key: str) -> Iterator[tuple[str, str, Tensor]]:
    """(path, the last key with what follows it, tensor) for each tensor in a nest of mappings and sequences."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested and value.numel() and not value.requires_grad:
            yield path, key, value
    elif isinstance(value, Mapping):  # a dict, a BatchEncoding, a ModelOutput
        for name, inner in value.items():
            yield from _walk(inner, f"{path}.{name}".lstrip("."), str(name))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _walk(inner, f"{path}.{i}", f"{key}.{i}")


def described(tensors: dict[str, Tensor]) -> dict[str, GivenTensor]:
    """By name: the hash of a tensor's contents, its shape and dtype, and the hashes of what may be its padding."""
    about = {}
    for name, tensor in tensors.items():
        local = foreign.local(tensor)
        hashed, fillers = str(content_hash(local)), tuple[str, ...]()
        if local.dim() > 1:  # padding stands first or last in a row, and often: the commonest elements that do
            ends = torch.cat([local[:, 0].reshape(-1), local[:, -1].reshape(-1)])
            hashes, counts = element_hashes(ends).unique(return_counts=True)
            fillers = tuple(str(int(h) % 2**64) for h in hashes[counts.argsort(descending=True)[:MOST_FILLERS]])
        about[name] = GivenTensor(hash=hashed, shape=tuple(local.shape), dtype=dtype_name(local), fillers=fillers)
    return about


def tell(c: Recorder, tensors: dict[str, Tensor], outputs: list[Tensor]) -> None:
    """Notes what the outermost module was given, when a backward reaches one of its outputs. At the end of the step the
    others are told: rows without a label, an evaluation, or a pipeline that learned its stages' shapes."""
    about = described(tensors)
    reached = [t for t in outputs if t.requires_grad][:MOST_OUTPUTS]
    if not reached:
        c.event(ForwardInputs(*c.now, forward=c.micro + 1, tensors=about, reached=False))  # a teacher, say
        return
    c.calls += 1
    mark = c.calls
    c.unreached[mark] = (c.micro + 1, about)

    def arrives(number: int, made: Tensor, leaf: bool, gradient: Tensor | None) -> None:
        # None: it is no part of the loss. A leaf keeps the hooks of earlier calls.
        if gradient is None or not c.backing or (leaf and mark not in c.unreached):
            return
        if mark in c.unreached:
            del c.unreached[mark]
            c.event(ForwardInputs(*c.now, forward=c.micro, tensors=about))
        if c.beside:
            c.tensors[f"begun/{c.micro}/{number}"] = sketch(foreign.local(gradient))
            c.tensors[f"made/{c.micro}/{number}"] = made

    for number, output in enumerate(reached, mark * MOST_OUTPUTS):
        part = foreign.local(output.detach())
        made = torch.cat([sketch(part), torch.tensor([float(part.numel())])]) if c.beside else part.new_empty(0)
        output.register_hook(unserializable_hook(c.guarded(partial(arrives, number, made, output.is_leaf), "data")))
