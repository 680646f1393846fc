"""What the functions of this room are given: masks, numbers, shapes and options. Wrong ones are refused here.

A mask of other numbers than 0 and 1, tensors that would broadcast, a misspelled kind: each gives a loss that trains.
Values are looked at where batches are made; where a loss is computed, only on the CPU, so that no GPU waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isograd.errors import EngineError, nearest


def same_shapes(**tensors: Tensor) -> None:
    """Refuse tensors of which one would be broadcast."""
    shapes = {
        name: tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor) for name, tensor in tensors.items()
    }
    if len(set(shapes.values())) > 1 or not all(isinstance(shape, tuple) for shape in shapes.values()):
        raise EngineError(
            "IG575", seen=", ".join(f"{name} {shape}" for name, shape in shapes.items()), shapes=" and ".join(shapes)
        )


def mask_of(mask: Tensor) -> None:
    """Refuse what is no mask of rows: labels, weights, NaN."""
    good = isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_complex()
    if good and mask.dtype != torch.bool:
        good = bool(((mask == 0) | (mask == 1)).all())
    if not good:
        shown = f"shape {tuple(mask.shape)}, {_range(mask)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise EngineError(
            "IG576",
            "the mask is not one of tokens",
            seen=shown,
            expected="a tensor [rows, tokens] of True and False, or of 1 and 0",
            fix="labels != -100 is a mask; a weight of each token belongs into its loss",
        )


def numbers_of(what: str, numbers: Tensor, below: int | None = None, least: int = 0) -> None:
    """Refuse numbers of things that are not whole, or not in [least, below)."""
    whole = isinstance(numbers, Tensor) and not (numbers.is_floating_point() or numbers.is_complex())
    good = whole and numbers.dtype != torch.bool
    if good and numbers.numel():
        good = int(numbers.min()) >= least and (below is None or int(numbers.max()) < below)
    if not good:
        shown = f"{numbers.dtype}, {_range(numbers)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise EngineError(
            "IG576",
            f"{what} are not the numbers that they should be",
            seen=shown,
            expected=f"whole numbers from {least}" + (f" to {below - 1}" if below is not None else ""),
            fix=f"number them from 0; how many there are is the same for all ranks of a step (here {below})"
            if below is not None
            else "number them from 0",
        )


def one_of(what: str, word: str, words: Sequence[str]) -> None:
    """Refuse a word that is none of these."""
    if word not in words:
        near = nearest(str(word), words)
        raise EngineError(
            "IG577",
            f"there is no {what} {word!r}",
            seen=word,
            expected=", ".join(words),
            fix=f"did you mean {near!r}?" if near else None,
        )


def option(what: str, value: Any, good: bool, expected: str) -> None:
    """Refuse an option with which a loss would be another one, or none."""
    if not good:
        raise EngineError("IG577", f"{what} is outside of its range", seen=value, expected=expected)


def _range(tensor: Tensor) -> str:
    if not tensor.numel() or tensor.is_complex():
        return str(tensor.dtype)
    return f"from {tensor.min().item()} to {tensor.max().item()}"
