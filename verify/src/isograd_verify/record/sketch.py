"""Small linear fingerprints of tensors, and sketches that stand in for a large one.

    sketch(a + 2 * b) == sketch(a) + 2 * sketch(b)        exactly, in fp64, up to rounding

A flat tensor is laid out in rows of WIDTH and the rows are added up with pseudo-random signs, the same for all tensors;
a tensor of at most WIDTH elements is its sketch, or its negative. Sketches of the slices of a tensor (`offset` is where
one starts) add up to that of the whole.

A large tensor is recorded by its sums along each dimension, with fixed random weights (`project`):

    along[d][p, i] = sum over all elements with index i in dimension d of
                     element x (product over the other dimensions e of weight(e, index in e)[p])

Weights are a function of an element's place in the whole tensor, so the sums of shards add up to those of the whole;
and where a rank holds some rows, its `along[0]` is those columns of the whole's: rows can be recognised, put into place
and compared one by one. A difference between two tensors is missed by one sum with a probability of about (limit /
difference), and by all of a matrix with that to the power of 2 x COUNT.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
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


COUNT = 2
SMALL = 1 << 12  # elements of a tensor that is recorded as a whole in any case
_AT_ONCE = 1 << 17  # elements that are converted to fp64 at a time


@dataclass(frozen=True)
class Projected:
    """A tensor of this shape, by its sums along some of its dimensions."""

    shape: tuple[int, ...]
    along: dict[int, Tensor]  # dimension -> [COUNT, its size], fp64
    flat: Tensor | None = None  # the sketch of it (sketch.py), where it was recorded as a whole

    def numel(self) -> int:
        """The number of elements for which it stands."""
        return int(math.prod(self.shape))

    @property
    def numbers(self) -> Tensor:
        """All of its sums in a row, scaled so that their norm is about the tensor's."""
        sums = [self.along[d].flatten() for d in sorted(self.along)] or [torch.zeros(0)]
        return torch.cat(sums).double().mul_((COUNT * len(sums)) ** -0.5)

    def select(self, dim: int, indices: Iterable[int]) -> Projected:
        """Some rows of one dimension. Sums along the others, which went over all of them, are lost."""
        chosen = torch.tensor(tuple(indices), dtype=torch.long)
        shape = (*self.shape[:dim], len(chosen), *self.shape[dim + 1 :])
        return Projected(shape, {dim: self.along[dim][:, chosen]} if dim in self.along else {})

    def minus(self, other: Projected) -> Projected:
        """This less another, along the dimensions that both have."""
        return Projected(
            self.shape, {d: self.along[d] - other.along[d] for d in self.along.keys() & other.along.keys()}
        )


@lru_cache(maxsize=16)
def weights(dim: int, start: int, size: int) -> Tensor:
    """[COUNT, size]: of the indices from `start` on in a dimension. Signs times 0.5 to 1.5, of mean square 1."""
    index = torch.arange(start, start + size) * COUNT + torch.arange(COUNT)[:, None]
    mixed = (index + dim * 0x3C6EF372FE94F82B + 0x1234567) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 32)) * -7723592293110705685
    mixed = mixed ^ (mixed >> 31)
    size_of = 0.5 + ((mixed >> 20) & 0xFFFFF).double() / 0x100000
    found: Tensor = torch.where(mixed & 1 == 0, size_of, -size_of) * (12 / 13) ** 0.5
    return found


def worthwhile(shape: tuple[int, ...], held: int, small: int) -> bool:
    """Whether sums stand for a tensor of this shape: fewer numbers than the elements that a rank holds."""
    return len(shape) > 1 and held > small and COUNT * sum(shape) < held


def project(values: Tensor, starts: tuple[int, ...] = ()) -> Projected:
    """`starts`: where the tensor begins in each dimension of the whole; zeros when it is left out."""
    shape = tuple(values.shape)
    starts = starts or (0,) * len(shape)
    if len(shape) < 2:
        return Projected(shape, {0: values.detach().double().cpu().reshape(1, -1).expand(COUNT, -1)})
    first, rest = _pass(values.detach().reshape(shape[0], math.prod(shape[1:])), starts[0], _others(shape, starts))
    return Projected(shape, {0: first, **_inner(rest, shape, starts)})


def project_row(values: Tensor, whole: tuple[int, ...], start: int) -> Projected:
    """Of elements in a row of the flat whole, from `start` on: sums of the whole in which all other elements are 0."""
    starts, width = (0,) * len(whole), math.prod(whole[1:])
    others = _others(whole, starts)
    first = torch.zeros(COUNT, whole[0], dtype=torch.float64)
    rest = torch.zeros(COUNT, width, dtype=torch.float64)
    flat, taken = values.detach().reshape(-1), 0
    while taken < len(flat):
        row, column = divmod(start + taken, width)
        columns = min(width - column, len(flat) - taken)
        rows = (len(flat) - taken) // width if columns == width else 1
        piece = flat[taken : taken + rows * columns].view(rows, columns)
        own, inner = _pass(piece, row, others[:, column : column + columns])
        first[:, row : row + rows] += own
        rest[:, column : column + columns] += inner
        taken += rows * columns
    return Projected(whole, {0: first, **_inner(rest, whole, starts)})


def _others(shape: tuple[int, ...], starts: tuple[int, ...]) -> Tensor:
    """[COUNT, elements of a row]: the product of the weights of all dimensions but the first."""
    found = torch.ones(COUNT, 1, dtype=torch.float64)
    for dim in range(1, len(shape)):
        found = (found[:, :, None] * weights(dim, starts[dim], shape[dim])[:, None, :]).flatten(1)
    return found


def _pass(rows: Tensor, start: int, others: Tensor) -> tuple[Tensor, Tensor]:
    """(sums of each row, sums over all rows), from one reading of the elements."""
    own = weights(0, start, len(rows))
    first, rest = torch.zeros_like(own), torch.zeros_like(others)
    step = max(1, _AT_ONCE // max(rows.shape[1], 1))
    for at in range(0, len(rows), step):
        block = rows[at : at + step].to("cpu", torch.float64)
        first[:, at : at + step] = others @ block.T
        rest += own[:, at : at + step] @ block
    return first, rest


def _inner(rest: Tensor, shape: tuple[int, ...], starts: tuple[int, ...]) -> dict[int, Tensor]:
    """Along every dimension but the first."""
    found = {}
    for dim in range(1, len(shape)):
        sums = rest.view(COUNT, *shape[1:])
        for other in range(len(shape) - 1, 0, -1):
            if other != dim:
                by = weights(other, starts[other], shape[other])
                sums = torch.einsum("p...i,pi->p...", sums.movedim(other, -1), by).unsqueeze(other)
        found[dim] = sums.reshape(COUNT, shape[dim])
    return found
