"""Small linear fingerprints of tensors: what a regression on contributions needs, at a thousandth of the memory.

    sketch(a + 2 * b) == sketch(a) + 2 * sketch(b)        exactly, in fp64, up to rounding

so a gradient that is a sum of contributions with unknown coefficients has a sketch that is the same sum of their
sketches, and the coefficients are found on the sketches. A flat tensor is laid out in rows of WIDTH and the rows are
added up with pseudo-random signs, the same for all tensors; a tensor of at most WIDTH elements is one row, so its
sketch is the tensor or its negative. A slice of a larger tensor has a sketch too (`offset` is where it starts), and the
sketches of the slices add up to that of the whole.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

WIDTH = 256
_ROWS_AT_ONCE = 1 << 14  # that have signs of their own
_CACHED = 1 << 9  # rows that are converted to fp64 at a time: 1 MiB, which stays in the processor's cache


@lru_cache(maxsize=8)
def _signs(block: int) -> Tensor:
    generator = torch.Generator().manual_seed(0x150_62AD + block)
    return torch.randint(2, (_ROWS_AT_ONCE,), generator=generator).double().mul_(2).sub_(1)


def sketch(values: Tensor, offset: int = 0) -> Tensor:
    """WIDTH fp64 numbers on the CPU, linear in `values`, which start at flat position `offset` of the whole tensor."""
    flat = values.detach().reshape(-1)
    total = torch.zeros(WIDTH, dtype=torch.float64)
    at, taken = offset, 0
    while taken < flat.numel():
        row, column = divmod(at, WIDTH)
        block, start = divmod(row, _ROWS_AT_ONCE)
        if column or flat.numel() - taken < WIDTH:  # a piece of one row
            size, rows = min(WIDTH - column, flat.numel() - taken), 1
            piece = torch.zeros(1, WIDTH, dtype=torch.float64)
            piece[0, column : column + size] = flat[taken : taken + size]
        else:
            rows = min(_ROWS_AT_ONCE - start, _CACHED, (flat.numel() - taken) // WIDTH)
            size = rows * WIDTH
            piece = flat[taken : taken + size].to("cpu", torch.float64).view(rows, WIDTH)
        total += _signs(block)[start : start + rows] @ piece
        at, taken = at + size, taken + size
    return total


def row_sizes(shape: tuple[int, ...], dtype: str) -> set[int]:
    """Sizes along which the rows of a batch may lie: of ids all, of features all but the last, and two in one."""
    sizes = shape[:-1] if "float" in dtype else shape
    return {*sizes, math.prod(shape[:2]) if len(sizes) > 1 else 1} - {1}


def squares(values: Tensor) -> float:
    """The sum of the squares, in fp64."""
    return sum(float(some.double().square().sum()) for some in values.detach().reshape(-1).split(_CACHED * WIDTH))


def content_hash(values: Tensor) -> int:
    """A hash of the multiset of elements that adds up over shards (mod 2**64): where elements stand does not matter."""
    return int(element_hashes(values).sum()) & 0xFFFF_FFFF_FFFF_FFFF


def element_hashes(values: Tensor) -> Tensor:
    """[elements] int64, equal for equal values."""
    x = values.detach().reshape(-1).to("cpu")
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    bits = x.double().view(torch.int64) if x.is_floating_point() else x.to(torch.int64)
    mixed = (bits + 0x1234567) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32)


def digest(tensor: Tensor) -> str:
    """Equal for equal bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:32]  # of the strong ones the fastest: processors compute it


def in_bf16(tensor: Tensor) -> bool:
    """Whether all numbers of an fp32 tensor, some of which are not zero, are numbers of bf16, too."""
    if tensor.dtype is not torch.float32 or not tensor.numel():
        return False
    parts = tensor.detach().contiguous().view(torch.int32).reshape(-1).split(_CACHED * WIDTH)
    return not any(bool((part & 0xFFFF).any()) for part in parts) and bool(tensor.any())


def dtype_name(tensor: Tensor) -> str:
    """'float32': a dtype as recordings write it."""
    return str(tensor.dtype).removeprefix("torch.")
