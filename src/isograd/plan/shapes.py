"""Tensors that have shapes and no memory, so that one process can run the program of any rank of any model.

Inside `shapes()` a tensor of more than LARGE elements is *fake*: an ordinary tensor of the CPU, whose memory is a
part of a large range of addresses to which nothing is ever written, and which therefore takes no memory. Views, slices
and autograd work on it as on any other, at their usual speed. An operation that would compute with a fake tensor is
not run: the shapes of its results are found once, on the meta device, and kept for the next call with equal shapes.

Small tensors are real, so whatever a program reads to decide (counts, weights, fingerprints, norms) is there to be
read. A small tensor that is computed from fake ones holds ones: nobody knows its values, and a loss or a norm of 1
lets a step go on as usual.

`segments` says whose gradients a tensor holds: marks are followed through the operations that move and sum.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from isograd.errors import PlanError
from isograd.plan.allocations import LEAST, Allocations

LARGE = 1 << 14  # elements
EXACT = 1 << 24  # the same of whole numbers, masks and float64, in which programs count, choose and compare
SPACE = 1 << 42  # bytes of addresses
RESIZABLE = (
    1 << 33
)  # bytes: what a program asks for by `empty`, up to this, is memory of the system that nothing touches
WIDEST = 16  # bytes of an element
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE: addresses alone, which no limit of memory counts
Segments = tuple[tuple[str, int], ...]  # (parameter, how many elements of its gradient), in the order in memory
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype

_aten = torch.ops.aten


class _Range:
    """The addresses of fake tensors, given away one after the other: one range a process, which has room for 31."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._bytes = memoryview(mmap.mmap(-1, SPACE, flags=flags))
        self.first = torch.frombuffer(self._bytes, dtype=torch.uint8, count=1).data_ptr()
        self.end, self._next = self.first + SPACE, 0

    def take(self, form: Form) -> tuple[Tensor, memoryview]:
        """A tensor in memory that nothing touches, and what lives as long as that memory does."""
        shape, strides, dtype = form
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size = extent * dtype.itemsize
        if size > SPACE:
            raise PlanError(
                "IG270", "a tensor is too large to rehearse",
                seen=f"{tuple(shape)} of {str(dtype)[6:]}: {size:,} bytes", expected=f"at most {SPACE:,} bytes",
                fix="a smaller model or batch, or a layout that cuts it further",
            )  # fmt: skip
        if self._next + size > SPACE:
            self._next = 0
        memory = self._bytes[self._next : self._next + size]
        self._next += -(-size // 64) * 64
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides), memory


@cache
def _addresses() -> _Range:
    return _Range()


class _About(NamedTuple):
    """What is known of an operation from its schema."""

    views: bool  # its results are parts of its argument
    written: tuple[tuple[int, str], ...]  # the arguments that it changes: place, name
    returned: tuple[bool, ...]  # of each result: whether it is one of those
    follows: str  # the name, where marks are followed through it
    often: Callable[[Shapes, Any, tuple[Any, ...], dict[str, Any]], Any] | None  # a shorter way to do it


def _about(func: Any) -> _About:
    schema = func._schema
    infos = [result.alias_info for result in schema.returns]
    views = any(info is not None and not info.is_write for info in infos) or func in _VIEWS
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = func.overloadpacket.__name__
    return _About(
        *(views, written, tuple(info is not None and info.is_write for info in infos)),
        *(name if views or name in _FOLLOWED else "", _OFTEN.get(func)),
    )


_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}
_VIEWS = {_aten._unsafe_view.default, _aten.lift_fresh.default}
_ELEMENTWISE = {
    "add", "add_", "_foreach_add_", "mul", "mul_", "_foreach_mul_", "copy_", "_foreach_copy_", "_to_copy", "clone",
    "_foreach_copy",
}  # fmt: skip
_NORMS = {"_foreach_norm", "linalg_vector_norm"}
_FOLLOWED = {"cat", "_chunk_cat", "index", "constant_pad_nd", *_ELEMENTWISE, *_NORMS}


class Shapes(TorchDispatchMode):
    """See the head of this file. `normed`: the gradients whose norms were taken in here."""

    def __init__(self, large: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.large = large
        self.normed: list[Segments] = []
        self.allocations: Allocations | None = None  # is told of memory that is taken
        self._range = _addresses()
        self._results: dict[Any, tuple[tuple[Form | None, ...], Any]] = {}
        self._abouts: dict[int, _About] = {}

    def another(self) -> Shapes:
        """One for another program, which shares what is known of operations."""
        other = Shapes(self.large)
        other._results, other._abouts = self._results, self._abouts
        return other

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing in here is compiled, and torch's way to ensure that is slower than all that is done here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        about = self._abouts.get(id(func))
        if about is None:
            about = self._abouts[id(func)] = _about(func)
        if about.often and (done := about.often(self, func, args, kwargs)) is not NotImplemented:
            return done
        if about.views:
            result = func(*args, **kwargs)
            if whole := segments(args[0]):
                first = args[0].storage_offset()
                for out in _tensors([result]):
                    mark(out, _slice(whole, int(out.storage_offset() - first), out.numel()))
            return result
        given = _tensors((*args, *kwargs.values()) if kwargs else args)
        fake = any(map(self._is_fake, given))
        if fake and func is _aten.index.Tensor:
            args = args[0], self._places(args[1])
        if fake and func in _ANSWERS:
            return _ANSWERS[func]
        key = id(func), fake, _key(args), _key(tuple(kwargs.items())) if kwargs else ()
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = self._result(func, args, kwargs, given, fake)
        small = func in _EMPTY and sum(math.prod(form[0]) * form[2].itemsize for form in found[0] if form) < RESIZABLE
        if found is _REAL or small:
            result = self._run(func, args, kwargs)
        else:
            result = self._shaped(about, args, kwargs, *found)
            if func is _aten.isnan.default and not self._is_fake(result):
                result.zero_()  # nobody knows the values; the program that is rehearsed goes well
        if about.follows:
            self._follow(about.follows, args, kwargs, result)
        return result

    def _zero(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in [args[0]] if isinstance(args[0], Tensor) else args[0]:
            if not self._is_fake(tensor):
                tensor.zero_()
        return args[0] if isinstance(args[0], Tensor) else None

    def _empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sizes = args[1] if len(args) > 1 else args[0].shape if isinstance(args[0], Tensor) else args[0]
        small = math.prod(sizes) * WIDEST < RESIZABLE
        return self._run(func, args, kwargs) if small else NotImplemented

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 2 or kwargs:
            return NotImplemented
        for into, other in zip(*args, strict=True):
            if into.shape != other.shape or not self._is_fake(into):
                return NotImplemented
        return self._follow("_foreach_add_", args, kwargs, None)

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Masks whose values are known as the places that they choose, on which the result's shape depends."""
        found: list[Tensor | None] = []
        for index in indices:
            chooses = index is not None and index.dtype == torch.bool and not self._is_fake(index)
            found += index.nonzero().unbind(1) if index is not None and chooses else [index]
        return found

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self.allocations is not None:
            for tensor in _tensors((result,)):
                if tensor.nbytes >= LEAST:
                    self.allocations.take(tensor)
        return result

    def _stays_small(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> bool:
        """Whether the result of real tensors cannot be large: its size is at most the product of theirs."""
        if not given:
            return False
        limit = min(self._limit(tensor.dtype) for tensor in given)
        if torch.Tag.pointwise in func.tags:
            return bool(math.prod(torch.broadcast_shapes(*(t.shape for t in given))) <= limit)
        if torch.Tag.dynamic_output_shape in func.tags and (
            func is not _aten.index.Tensor or any(t.dtype == torch.bool for t in given[1:])
        ):
            return True  # a choice among what is there
        bound = 1
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                bound *= max(1, arg.numel())
            elif isinstance(arg, list | tuple):
                bound *= max(1, sum(t.numel() for t in arg if isinstance(t, Tensor)))
        return bound <= limit

    def _shaped(
        self, about: _About, args: tuple[Any, ...], kwargs: dict[str, Any], forms: tuple[Form | None, ...], spec: Any
    ) -> Any:
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in about.written]
        for real in _tensors(written):
            if not self._is_fake(real) and real.dtype != torch.bool:
                real.fill_(1)
        if about.returned and all(about.returned):
            return written[0] if len(about.returned) == 1 else tuple(written)
        made = [None if form is None else self._new(form) for form in forms]
        if any(about.returned):
            at = iter(written)
            made = [next(at) if changed else new for changed, new in zip(about.returned, made, strict=True)]
        return tree.tree_unflatten(made, spec)

    def _result(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], fake: bool
    ) -> tuple[tuple[Form | None, ...], Any]:
        """The forms of an operation's results, and how they are nested; _REAL if it is to be run."""
        device = kwargs.get("device")  # the program itself may work on the meta device
        on_meta = any(t.is_meta for t in given) or (device is not None and torch.device(device).type == "meta")
        if not fake and (on_meta or self._stays_small(func, args, kwargs, given)):
            return _REAL
        shaped = tree.tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), (args, kwargs)
        )
        named = {name: None if name == "generator" else value for name, value in shaped[1].items()}
        if any(argument.name == "device" for argument in func._schema.arguments):
            named["device"] = torch.device("meta")
        try:
            leaves, spec = tree.tree_flatten(func(*shaped[0], **named))
        except NotImplementedError as error:
            raise PlanError(
                "IG270", "tensor sizes depend on values, which a rehearsal does not compute",
                seen=f"{func} of {', '.join(str(tuple(t.shape)) for t in given)}: {str(error).splitlines()[0]}",
                expected="sizes that follow from shapes, from whole numbers, or from masks computed from those",
                fix="fewer tokens in a micro-batch, so that what is compared is small enough to have values",
            ) from error  # fmt: skip
        forms = tuple((tuple(t.shape), t.stride(), t.dtype) if isinstance(t, Tensor) else None for t in leaves)
        return (forms, spec) if fake or any(form and self._is_large(form) for form in forms) else _REAL

    def _is_fake(self, tensor: Tensor) -> bool:
        """Whether nothing may read or write a tensor's memory; it may also be a part of memory that is too large."""
        if self._range.first <= tensor.data_ptr() < self._range.end:
            return True
        limit = self._limit(tensor.dtype)
        return tensor.numel() > limit or tensor.untyped_storage().nbytes() > limit * tensor.itemsize

    def _is_large(self, form: Form) -> bool:
        return math.prod(form[0]) > self._limit(form[2])

    def _limit(self, dtype: torch.dtype) -> int:
        """The most elements of a real tensor."""
        return max(self.large, EXACT) if dtype == torch.float64 or not dtype.is_floating_point else self.large

    def _new(self, form: Form) -> Tensor:
        """A result: fake, or small and of ones."""
        if self._is_large(form):
            tensor, memory = self._range.take(form)
        else:
            tensor, memory = torch.ones(form[0], dtype=form[2]).as_strided(form[0], form[1]), None
        if self.allocations is not None:
            self.allocations.take(tensor, memory)
        return tensor

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name in _NORMS:
            listed = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.normed += [found for t in listed if (found := segments(t))]
        elif name in ("cat", "_chunk_cat"):  # the packing's, of as many chunks as each tensor has rows
            parts = [segments(t) for t in args[0]]
            if any(parts):
                known = [s or (("", t.numel()),) for s, t in zip(parts, args[0], strict=True)]
                dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
                found = _joined(known) if dim == 0 and name == "cat" else _side_by_side(known, args[0])
                mark(result, found)
                if result._base is not None and result._base.numel() == result.numel():  # `out`, a view of all of it
                    mark(result._base, found)
        elif name == "constant_pad_nd":
            if found := segments(args[0]):
                mark(result, (*found, ("", result.numel() - args[0].numel())))
        elif name == "index":
            whole = segments(args[0])
            if whole and len(args[1]) == 1 and not self._is_fake(args[1][0]):
                mark(result, _permuted(whole, args[1][0]))
        else:
            targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            sources = args[1] if len(args) > 1 else None
            sources = sources if isinstance(sources, list | tuple) else [sources] * len(targets)
            outs = _tensors([kwargs.get("out", result)]) or list(targets)
            for out, target, source in zip(outs, targets, sources, strict=False):
                found = segments(target) or segments(source)
                if found and out.numel() == sum(n for _, n in found):
                    mark(out, found)


_OFTEN = {
    _aten.zero_.default: Shapes._zero, _aten._foreach_zero_.default: Shapes._zero,
    _aten.empty.memory_format: Shapes._empty, _aten.empty_like.default: Shapes._empty,
    _aten.new_empty.default: Shapes._empty, _aten._foreach_add_.List: Shapes._add,
}  # fmt: skip
_REAL: tuple[tuple[Form | None, ...], Any] = (), None

# Answers about the values of fake tensors: nothing was edited.
_ANSWERS = {_aten.equal.default: True}


def segments(tensor: Any) -> Segments:
    """The parameters whose gradients a tensor holds; none if it holds no gradient."""
    return tensor.__dict__.get("_isograd_gradient", ()) if isinstance(tensor, Tensor) else ()


def mark(tensor: Tensor, found: Segments) -> None:
    """Say whose gradient a tensor holds."""
    tensor._isograd_gradient = found  # type: ignore[attr-defined]


def _joined(parts: Iterable[Segments]) -> Segments:
    return tuple(segment for part in parts for segment in part)


def _side_by_side(known: Sequence[Segments], parts: Sequence[Tensor]) -> Segments:
    """The segments of tensors [rows, ...] whose rows are put one behind the other."""
    lengths = [t.numel() // len(t) for t in parts]
    rows = range(len(parts[0]))
    return _joined(_slice(s, row * n, n) for row in rows for s, n in zip(known, lengths, strict=True))


def _slice(whole: Segments, start: int, length: int) -> Segments:
    """The segments of a part of a contiguous tensor."""
    if start < 0:
        return ()
    found, at = [], 0
    for name, size in whole:
        here = min(at + size, start + length) - max(at, start)
        if here > 0:
            found.append((name, here))
        at += size
    return tuple(found)


def _permuted(whole: Segments, index: Tensor) -> Segments:
    """The segments of elements that are taken in another order."""
    sizes = torch.tensor([size for _, size in whole])
    which = torch.repeat_interleave(torch.arange(len(whole)), sizes)[index]
    runs, lengths = torch.unique_consecutive(which, return_counts=True)
    return tuple((whole[i][0], n) for i, n in zip(runs.tolist(), lengths.tolist(), strict=True))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _tensors(value)
        elif isinstance(value, Tensor):
            found.append(value)
    return found


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """What decides the forms of an operation's results."""
    found: list[Any] = []
    for value in values:
        if type(value) is Tensor or isinstance(value, Tensor):
            found.append((value.shape, value.stride(), value.dtype, value.is_meta))
        elif isinstance(value, list | tuple):
            found.append(_key(value))
        elif isinstance(value, torch.Generator):
            found.append(None)
        else:
            found.append((type(value), value))
    return tuple(found)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors, views of one memory counted once each by their own size."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)
