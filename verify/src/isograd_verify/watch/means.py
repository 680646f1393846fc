"""Sees means in forward: one number that is the mean of many, and in backward the weight that each of the many gets.

A sum whose mask is known needs no divisor: what comes back to it is the weight of each element. The mask is read off
the graph in front of the sum, but not where a hook of the program has put it elsewhere (checkpointing, offloading).
A term of the loss is told apart from others by the place it comes from and by all calls that led there.
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from isograd_verify import tolerances
from isograd_verify.record.events import MeanWeight
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder

LOSSES = (
    "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
SEEN = ("mean", "sum", "neg", "_to_copy", "div", "mul", *LOSSES)  # the other losses of torch are made of these
MOST_SUMS = 16


@dataclass(eq=False)
class Number:
    """A mean, or a sum, of `count` numbers."""

    term: str
    site: str
    count: float
    mean: bool = True
    nonzero: float = 0.0  # of a sum without a mask: how many of its numbers are not zero, in case those alone count
    masked: bool = False  # a mask says how many numbers a sum adds up
    divided: bool = False  # a sum that a whole number divides, which is a mean
    average: bool = False  # one operator took the mean
    own: tuple[float, ...] = ()  # divisors that make a mean of a sum: its numbers, or its rows (kl_div's batchmean)
    elements: float = 0.0  # of a sum that something else divides: how many numbers it adds up


class Means:
    """The sums and means of a step's forward, until backward tells their weights."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.fresh: list[tuple[Tensor, Number]] = []  # not yet in the graph: that follows the operator
        self.sums: list[tuple[weakref.ref[Tensor], Number | None]] = []

    def look(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """After one of the operators SEEN."""
        given = args[0] if args else None
        one = type(result) is Tensor and result.dim() == 0 and result.is_floating_point()
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled() or not one:
            return
        if not isinstance(given, Tensor) or not (given.requires_grad or self.is_sum(given)) or foreign.infers_shapes():
            return
        if name in ("sum", "neg", "_to_copy"):
            of = self._of(given)
            if name == "sum" and given.dim():
                many, masked = added(given)
                nonzero = 0.0 if masked else float(given.count_nonzero())
                own = (many, nonzero, *(given.shape[:n].numel() for n in (1, 2) if given.dim() > n))
                site = foreign.call_site(self.capture.base)
                of = Number(f"sum {_path()}", site, many, mean=False, nonzero=nonzero, masked=masked, own=own)
                self.fresh.append((result, of))
            if name == "sum" or self.is_sum(given):  # minus a mean is no second mean
                self.sums = [*self.sums[1 - MOST_SUMS :], (weakref.ref(result), of)]
            return
        of = self._of(given)
        count = None if of is not None and of.masked else self._count(name, given, args, kwargs)
        if count is not None:
            kl_div = torch.nn.functional.kl_div.__code__  # where torch divides: `batchmean` is no operator's
            by_torch = name not in ("div", "mul") or any(frame.f_code is kl_div for frame in foreign.frames())
            number = Number(f"{name} {_path()}", foreign.call_site(self.capture.base), count, average=by_torch)
            if of is not None:
                of.divided = True
                number.elements = 0.0 if count in of.own else of.nonzero or of.count
            self.fresh.append((result, number))

    def _count(self, name: str, given: Tensor, args: Any, kwargs: Any) -> float | None:
        """Of how many a number is the mean; None when it is no mean."""
        if name == "mean":
            return float(given.numel())
        if name in ("div", "mul"):
            by = args[1] if self.is_sum(given) else None
            if isinstance(by, Tensor):
                by = None if by.requires_grad or by.numel() != 1 else float(by)
            if name == "mul" and by:
                by = 1 / by
            whole = by is not None and by >= 1 and abs(by - round(by)) <= tolerances.WHOLE * by
            return float(by) if by is not None and whole else None
        place = {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}.get(name, 2)
        mean = kwargs.get("reduction", args[place] if len(args) > place else 1) == 1
        return float(max(given.numel(), args[1].numel())) if mean else None

    def is_sum(self, tensor: Tensor) -> bool:
        """Whether a tensor is a sum, or minus one, that nothing has divided yet."""
        return tensor.dim() == 0 and any(known() is tensor for known, _ in self.sums)

    def _of(self, tensor: Tensor) -> Number | None:
        """The sum that a tensor is, or minus that, or in another precision."""
        return next((number for known, number in reversed(self.sums) if known() is tensor), None)

    def hook_fresh(self) -> None:
        """One operator later: what is in the graph by now tells its gradient when backward comes to it."""
        fresh, self.fresh = self.fresh, []
        for tensor, number in fresh:
            if tensor.requires_grad:
                tensor.register_hook(unserializable_hook(self.capture.guarded(partial(self._tell, number), "means")))

    def _tell(self, number: Number, gradient: Tensor | None) -> None:
        c = self.capture
        penalty = torch.is_grad_enabled() and not c.backing  # torch.autograd.grad with a graph: the loss takes it
        if gradient is None or not number.count or penalty:  # None: the number is in the graph, and no part of the loss
            return
        weight = float(gradient) / (number.count if number.mean else 1.0)
        about = {name: getattr(number, name) for name in ("nonzero", "divided", "average", "elements")}
        c.weight(MeanWeight(*c.now, term=number.term, site=number.site, count=number.count, weight=weight, **about))


def _path() -> str:
    """The same for calls that came the same way through the program."""
    calls = [(f.f_code.co_filename, f"{f.f_lineno}:{f.f_lasti}") for f in foreign.frames()]
    lines = [f"{os.path.basename(file)}:{place}" for file, place in calls if not file.startswith(foreign.TORCH)]
    return hashlib.blake2b(" ".join(lines).encode(), digest_size=6).hexdigest()


DEEPEST = 12  # operators between a mask and the sum
_PASSES = (
    "Neg", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "Transpose", "T",
    "Permute", "Sum", "Mul", "Div",
)  # fmt: skip


def added(summed: Tensor) -> tuple[int, bool]:
    """(how many numbers, whether a mask says so) of a tensor whose elements are all summed."""
    node: Any = summed.grad_fn
    size = summed.numel()
    for _ in range(DEEPEST):
        kind = type(node).__name__.partition("Backward")[0] if node is not None else ""
        mask = _mask_of(node, kind)
        if mask is not None and mask.numel() and size % mask.numel() == 0:
            return int(mask.sum()) * (size // mask.numel()), True
        divisor = _saved_tensor(node, "other") if kind == "Div" else None
        if kind not in _PASSES or (divisor is not None and divisor.numel() != 1):
            break
        if kind == "Sum":
            size = math.prod(node._saved_self_sym_sizes)
        edges = [edge for edge, _ in node.next_functions if edge is not None]
        if len(edges) != 1:
            break
        node = edges[0]
    return size, False


def _mask_of(node: Any, kind: str) -> Tensor | None:
    """Which numbers this operator lets through, as zeros and ones; None when it is no mask."""
    if kind == "Mul":
        for kept in (_saved_tensor(node, "other"), _saved_tensor(node, "self")):
            if kept is not None and kept.dim() and not kept.requires_grad and bool(((kept == 0) | (kept == 1)).all()):
                return kept
    if kind == "MaskedFill":
        kept = _saved_tensor(node, "mask")
        return None if kept is None else ~kept
    if kind == "Where":
        kept = _saved_tensor(node, "condition")
        learns = [edge is not None for edge, _ in node.next_functions]
        return None if kept is None or sum(learns) != 1 else kept if learns[0] else ~kept
    return None


def _saved_tensor(node: Any, name: str) -> Tensor | None:
    """A tensor that autograd has kept for a backward, where no hook stands in between."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    data = getattr(saved, "data", None) if getattr(saved, "unpack_hook", None) is None else None
    return data if isinstance(data, Tensor) and data.layout is torch.strided else None
