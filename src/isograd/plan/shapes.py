"""Tensors that have shapes and no memory, so that one process can run the program of any rank of any model.

Inside `shapes()` every tensor of more than LARGE elements is one of torch's fake tensors: operations find its shape,
dtype and place, and nothing is computed. Small tensors are real, so whatever a program reads to decide (counts,
weights, fingerprints, norms) is there to be read. A small tensor that is computed from fake ones holds ones: nobody
knows its values, and a loss or a norm of 1 lets a step go on as usual.

`Follow` also follows gradients: which parameters' elements a tensor holds, through the operations that move and sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 20  # elements
Segments = tuple[tuple[str, int], ...]  # (parameter, how many elements of its gradient), in the order in memory

_aten = torch.ops.aten
_NO_VALUES = {
    _aten.zero_.default, _aten._foreach_zero_.default, _aten.fill_.Scalar, _aten._foreach_mul_.Scalar,
    _aten._foreach_add_.List,
}  # fmt: skip


_PLAIN = {
    _aten.empty_like.default, _aten.copy_.default, _aten.detach.default, _aten._local_scalar_dense.default,
}  # fmt: skip


@contextmanager
def shapes(large: int = LARGE) -> Iterator[Shapes]:
    """In here, tensors of more than `large` elements have no memory."""
    mode = Shapes(large)
    with mode:
        yield mode


class Shapes(TorchDispatchMode):
    """See the head of this file. `normed`: the gradients whose norms were taken in here."""

    def __init__(self, large: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.large = large
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.normed: list[Segments] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN and all(type(t) is Tensor and not segments(t) for t in args if isinstance(t, Tensor)):
            return func(*args, **kwargs)  # a world of many ranks does these once for each
        given = [t for t in tree.arg_tree_leaves(*args, **kwargs) if isinstance(t, Tensor)]
        fakes = any(isinstance(t, FakeTensor) for t in given)
        if fakes and func in _NO_VALUES:
            self._follow(func, args, kwargs, args[0])
            return args[0] if func._schema.returns else None
        if not fakes and self._stays_small(func, args, kwargs, given):
            result = func(*args, **kwargs)
        else:
            result = self._shaped(func, args, kwargs, fakes)
        self._follow(func, args, kwargs, result)
        return result

    def _stays_small(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> bool:
        """Whether the result of real tensors cannot be large: its size is at most the product of theirs."""
        if not given:
            return False
        if torch.Tag.pointwise in func.tags:
            return bool(math.prod(torch.broadcast_shapes(*(t.shape for t in given))) <= self.large)
        bound = 1
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                bound *= max(1, arg.numel())
            elif isinstance(arg, list | tuple) and any(isinstance(t, Tensor) for t in arg):
                bound *= max(1, sum(t.numel() for t in arg if isinstance(t, Tensor)))
        return bound <= self.large and func is not _aten.expand.default

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: bool) -> Any:
        written = _written(func, args, kwargs)
        shaped = tree.tree_map_only(Tensor, self._shape_of, (args, kwargs)) if fakes else (args, kwargs)
        with self.fake:
            result = func(*shaped[0], **shaped[1])
        if not fakes and all(t.numel() <= self.large for t in _tensors(result)):
            return func(*args, **kwargs)  # all are real and stay small
        changed = {id(t): t for t in written}
        if fakes:
            for real in written:
                if not isinstance(real, FakeTensor) and real.dtype != torch.bool:
                    real.fill_(1)
        names = [r.alias_info for r in func._schema.returns]
        views = any(info is not None and not info.is_write for info in names)
        if written and len(_tensors(result)) == len(written) and not views:
            return _in_place_of(result, written)
        if views:
            return result
        return tree.tree_map_only(FakeTensor, lambda t: t if id(t) in changed else self._known(t), result)

    def _shape_of(self, real: Tensor) -> Tensor:
        """A stand-in for a real tensor beside fake ones: much cheaper than the one that torch makes."""
        if isinstance(real, FakeTensor) or not real.dim():
            return real
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return FakeTensor(self.fake, meta, real.device)

    def _known(self, fake: FakeTensor) -> Tensor:
        """A small result has values, so that programs can read them."""
        if fake.numel() > self.large or fake.device.type == "meta":
            return fake
        with torch._C._DisableTorchDispatch():
            return torch.ones(fake.shape, dtype=fake.dtype)

    # -- whose gradient

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func.overloadpacket.__name__
        if name in ("_foreach_norm", "linalg_vector_norm"):
            listed = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.normed += [found for t in listed if (found := segments(t))]
        if name == "cat":
            parts = [segments(t) for t in args[0]]
            if any(parts):
                pairs = zip(parts, args[0], strict=True)
                mark(result, _joined(s or (("", t.numel()),) for s, t in pairs))
        elif name == "index" and segments(args[0]) and len(args[1]) == 1 and not isinstance(args[1][0], FakeTensor):
            mark(result, _permuted(segments(args[0]), args[1][0]))
        elif name in _ELEMENTWISE:
            targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            sources = args[1] if len(args) > 1 else None
            sources = sources if isinstance(sources, list | tuple) else [sources] * len(targets)
            outs = _tensors(kwargs.get("out", result)) or list(targets)
            for out, target, source in zip(outs, targets, sources, strict=False):
                found = segments(target) or segments(source)
                if found and out.numel() == sum(n for _, n in found):
                    mark(out, found)
        elif any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            whole = segments(args[0])
            if whole:
                for out in _tensors(result):
                    mark(out, _slice(whole, out.storage_offset() - args[0].storage_offset(), out.numel()))


_ELEMENTWISE = {
    "add", "add_", "_foreach_add_", "mul", "mul_", "_foreach_mul_", "copy_", "_foreach_copy_", "_to_copy", "clone",
    "where", "_foreach_copy",
}  # fmt: skip


def segments(tensor: Any) -> Segments:
    """The parameters whose gradients a tensor holds; none if it holds no gradient."""
    return getattr(tensor, "_isograd_gradient", ()) if isinstance(tensor, Tensor) else ()


def mark(tensor: Tensor, found: Segments) -> None:
    """Say whose gradient a tensor holds."""
    tensor._isograd_gradient = found  # type: ignore[attr-defined]


def _joined(parts: Iterable[Segments]) -> Segments:
    return tuple(segment for part in parts for segment in part)


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
    return tuple((whole[int(i)][0], int(n)) for i, n in zip(runs, lengths, strict=True))


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree.tree_leaves(value) if isinstance(t, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    found: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _in_place_of(result: Any, written: list[Tensor]) -> Any:
    leaves, spec = tree.tree_flatten(result)
    return tree.tree_unflatten(written[: len(leaves)], spec)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors, views of one memory counted once each by their own size."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)
