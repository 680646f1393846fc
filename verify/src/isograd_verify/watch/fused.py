"""Sees losses that are autograd Functions of the program's own: a fused head and cross-entropy, a loss in chunks.

torch tells nothing of what such a Function computes. Two kinds are counted all the same:

    proven    it is given labels, and what its backward returns for a few rows is a cross-entropy's gradient: softmax
              minus one-hot, times the head's weight where that is inside. The factor is what each label weighs.
    inner     its forward calls torch's cross-entropy and takes gradients; its backward multiplies them. What came back
              to the inner call, times the gradient of the result, is what each label weighs.

Any other one that makes one number of many is told as uncounted, with its line, when a backward comes to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import unserializable_hook

from isograd_verify import tolerances
from isograd_verify.record.events import LabelWeight, Loss, Uncounted
from isograd_verify.record.sketch import content_hash, dtype_name
from isograd_verify.watch import foreign
from isograd_verify.watch.functions import Functions
from isograd_verify.watch.recorder import Recorder

ROWS = 16  # that are looked at


@dataclass
class LossArgs:
    """What may be a cross-entropy's arguments, with a few of its rows as they are before the call."""

    place: int  # of the rows among the arguments that are tensors
    labels: Tensor  # of all rows
    picked: Tensor  # the numbers of the rows that are looked at
    rows: Tensor
    weight: Tensor | None  # [classes, features] of a head inside
    bias: Tensor | None

    def direction(self) -> Tensor:
        """The gradient of the rows that were picked, for a label that weighs one."""
        weight = self.weight.detach().double() if self.weight is not None else None
        logits = self.rows if weight is None else self.rows @ weight.T
        if self.bias is not None:
            logits = logits + self.bias.detach().double()
        found = logits.softmax(-1)
        found[torch.arange(len(found)), self.labels[self.picked]] -= 1
        return found if weight is None else found @ weight


class Fused:
    """Watches calls of autograd Functions."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.functions = Functions(capture)

    def wrapper(self) -> tuple[Any, Any]:
        """(what Function.apply is, what takes its place)."""
        original = Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original.__func__, cls)
            idle = self.capture.in_function or not self.capture.active or not torch.is_grad_enabled()
            if idle or torch._C._current_graph_task_id() != -1:
                return call(*args, **kwargs)
            return self._watched(call, args, kwargs)

        apply.__wrapped__ = original  # type: ignore[attr-defined]
        return original, classmethod(apply)

    def _watched(self, call: functools.partial[Any], args: Any, kwargs: Any) -> Any:
        c = self.capture
        found: list[LossArgs] = []
        c.guarded(lambda: found.extend(_readings(args)), "labels")()
        c.in_function, c.inner_weights, before = c.in_function + 1, [], c.numbers
        try:
            result = call(*args, **kwargs)
        finally:
            c.in_function -= 1
        c.guarded(self._made, "labels")(args, result, found)
        c.guarded(self.functions.called, "functions")(call.args[0], args, result, before)
        return result

    def _made(self, args: Any, result: Any, found: list[LossArgs]) -> None:
        loss = result[0] if isinstance(result, tuple) and result else result
        many = any(isinstance(t, Tensor) and t.requires_grad and t.dim() for t in args)
        if type(loss) is not Tensor or loss.dim() or not loss.requires_grad or loss.grad_fn is None or not many:
            return
        c, inner, value = self.capture, self.capture.inner_weights, float(loss.detach())
        site = c.reduced = foreign.call_site(c.base)

        def judged(rows: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
            if not gradients or gradients[0] is None:
                return
            factor = float(gradients[0])
            for one in inner:
                c.event(replace(one.times(factor), step=c.now[0], micro=c.now[1]))
            labelled = any(isinstance(one, LabelWeight) for one in inner)
            if not labelled and not any(self._proven(one, rows, factor, value, site) for one in found):
                c.event(Uncounted(*c.now, site=site, weight=factor))

        loss.grad_fn.register_hook(unserializable_hook(c.guarded(judged, "labels")))

    def _proven(self, given: LossArgs, rows: Any, factor: float, value: float, site: str) -> bool:
        whole = rows[given.place] if given.place < len(rows) else None
        if whole is None:
            return False
        whole = whole.detach().reshape(-1, whole.shape[-1])
        counts = (whole != 0).any(-1)
        used = counts[given.picked]
        if not bool(used.any()):
            return False
        wanted, seen = given.direction()[used], whole[given.picked][used].double()
        weights = (wanted * seen).sum(-1) / wanted.square().sum(-1)
        left = (seen - weights[:, None] * wanted).norm() / seen.norm()
        if not float(left) <= tolerances.FIT.get(dtype_name(whole), tolerances.FIT_OTHER):
            return False
        c, count = self.capture, float(counts.sum())
        low, high = float(weights.min()), float(weights.max())
        mean = abs(high * count - factor) <= tolerances.FIT_HALF * abs(factor)
        classes = len(given.weight) if given.weight is not None else whole.shape[-1]
        reduction, each = ("mean", value) if mean else ("sum", value / count)
        c.event(Loss(*c.now, reduction=reduction, count=count, classes=classes, value=each))
        hashed = str(content_hash(given.labels[counts]))
        c.event(LabelWeight(*c.now, count=count, low=low, high=high, labels=hashed, site=site, average=mean))
        return True


def _readings(args: Any) -> list[LossArgs]:
    """Each way to read a Function's arguments as those of a cross-entropy."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    if any(type(t) is not Tensor and isinstance(t, foreign.DTensor) for t in tensors) or foreign.imagined(tensors):
        return []
    found = []
    for labels in (t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool):
        flat = labels.detach().reshape(-1)
        for place, rows in enumerate(tensors):
            if not rows.requires_grad or rows.dim() < 2 or rows.numel() != flat.numel() * rows.shape[-1]:
                continue
            heads = [t for t in tensors if t is not rows and t.dim() == 2 and t.shape[1] == rows.shape[-1]]
            for weight in (*(h for h in heads if h.is_floating_point()), None):
                one = _picked(place, rows, flat, weight, tensors)
                found += [one] if one is not None else []
    return found


def _picked(place: int, rows: Tensor, labels: Tensor, weight: Tensor | None, tensors: list[Tensor]) -> LossArgs | None:
    classes = rows.shape[-1] if weight is None else len(weight)
    usable = ((labels >= 0) & (labels < classes)).nonzero()[:, 0]
    if not len(usable):
        return None
    picked = usable[:: max(1, len(usable) // ROWS)][:ROWS]
    biases = [t for t in tensors if t.dim() == 1 and t.is_floating_point() and t.requires_grad and len(t) == classes]
    kept = rows.detach().reshape(-1, rows.shape[-1])[picked].double().clone()
    return LossArgs(place, labels.clone(), picked, kept, weight, biases[0] if weight is not None and biases else None)
