"""What a call depends on: the tensors in variables around it, and the state of the random generators.

`found` walks them in one order, arguments first, so that a tensor that several names stand for has the same name in
both runs.
"""

from __future__ import annotations

import inspect
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isograd_verify.watch import foreign

DEEPEST, LONGEST = 4, 64  # containers within containers, and members of one, that are looked at
OBJECTS, NO_DATA = 2, (nn.Module, type, types.ModuleType, types.FunctionType)  # attributes of objects, and of which not
MOST_FRAMES = 64
UNSEEN = 3  # references to what a frame has told of its variables, where the program holds none


def found(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor | torch.Generator]:
    """By name, each tensor once: arguments, then variables of the function that called, then of those around it."""
    tensors: dict[str, Tensor | torch.Generator] = {}
    seen: set[int] = set()
    for place, values in (("argument", {**{str(i): a for i, a in enumerate(args)}, **kwargs}), *variables()):
        simple = {k: v for k, v in values.items() if isinstance(v, Tensor)}
        for name, value in [*simple.items(), *((k, v) for k, v in values.items() if k not in simple)]:
            for path, tensor in walk(value, f"{place}/{name}", 0):
                if id(tensor) not in seen and not isinstance(tensor, nn.Module):
                    seen.add(id(tensor))
                    tensors.setdefault(path, tensor)
    return tensors


def variables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each function on the stack that is not torch's or ours, innermost first: its name, and its variables."""
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith((foreign.TORCH, foreign.OURS)):
            held = frame.f_locals
            yield frame.f_code.co_name, dict(held)
            # Up to Python 3.12 a frame keeps what it has told of its variables, and so their tensors, until it ends.
            if type(held) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(held) <= UNSEEN:
                for name in (*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars):
                    held.pop(name, None)
        frame = frame.f_back  # type: ignore[assignment]


def walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors, generators and modules."""
    if isinstance(value, torch.Generator | nn.Module):
        yield path, value
    elif isinstance(value, Tensor):
        plain = value.layout is torch.strided and not value.is_nested and not isinstance(value, foreign.DTensor)
        # Single numbers in variables are counts, not data; one that the model is given divides its loss.
        given = path.startswith("argument/")
        own = not value.requires_grad or (given and value.is_leaf and not isinstance(value, nn.Parameter))
        if plain and (value.dim() or given) and value.numel() and own:
            yield path, value
    elif depth < DEEPEST and isinstance(value, Mapping):
        for name, inner in list(value.items())[:LONGEST]:
            if isinstance(name, str | int):  # a parameter as a key may have no memory just now (FSDP2)
                yield from walk(inner, f"{path}.{name}", depth + 1)
    elif depth < DEEPEST and isinstance(value, (list, tuple)):
        for i, inner in enumerate(value[:LONGEST]):
            yield from walk(inner, f"{path}.{i}", depth + 1)
    elif depth < OBJECTS and not isinstance(value, NO_DATA) and not type(value).__module__.startswith("torch"):
        yield from walk(getattr(value, "__dict__", {}), path, depth)  # a batch, or a trainer that holds it


def generators() -> dict[str, Tensor]:
    """The state of the random generators: torch's, for masks of dropout, Python's and numpy's, for data."""
    states = {"generator/cpu": torch.get_rng_state(), "generator/python": torch.tensor(random.getstate()[1])}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["generator/cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        _, words, place, *_ = numpy.random.get_state()
        states["generator/numpy"] = torch.tensor([*map(int, words), place])
    return states


def set_generators(states: dict[str, Tensor]) -> None:
    """The random generators go on from states that `generators` told."""
    torch.set_rng_state(states["generator/cpu"])
    random.setstate((3, tuple(states["generator/python"].tolist()), None))
    if "generator/cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["generator/cuda"])
    if "generator/numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        *words, place = states["generator/numpy"].tolist()
        numpy.random.set_state(("MT19937", words, place))
