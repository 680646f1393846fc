"""Runs a model's code in fp64 throughout: where it casts to a narrower type, as norms and softmax do, it casts to fp64.

Two correct runs then differ by 1e-15, and one lost summand shows. Nothing of the model or of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class ForceFP64(TorchFunctionMode):
    """`with ForceFP64():` every cast to fp32, fp16 or bf16 is a cast to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in the place of each of its functions."""
        args = tuple(_fp64_for(value) for value in args)
        kwargs = {name: _fp64_for(value) for name, value in (kwargs or {}).items()}
        return (torch.Tensor.double if func in CASTS else func)(*args, **kwargs)


def in_fp64(run: Callable[..., T]) -> Callable[..., T]:
    """The same function, in fp64 throughout."""

    def in_fp64(*args: Any, **kwargs: Any) -> T:
        with ForceFP64():
            return run(*args, **kwargs)

    return in_fp64


@contextmanager
def undisturbed() -> Iterator[None]:
    """In here fp64 is the default dtype; the program's random numbers and its own default stay as they are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _fp64_for(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
