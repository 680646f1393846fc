"""Sees autograd Functions: those that communicate (judge/checks/adjoints.py), and losses that are Functions of the
program's own (a fused head and cross-entropy, a loss in chunks). Two kinds of losses are counted:

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
from torch.utils.hooks import unserializable_hook

from isograd_verify import tolerances
from isograd_verify.record.events import Function, LabelWeight, Loss, LossTerm, Uncounted
from isograd_verify.record.sketch import content_hash, dtype_name, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder

MOST_CALLS = 64  # in a step
LIMIT = 1 << 26  # bytes of one call's tensors


class _Call:
    """One call, until its backward is over."""

    def __init__(
        self, c: Recorder, kind: type, given: list[tuple[int, Tensor]], made: list[Tensor], node: Any, before: int,
        number: int, labels: list[Tensor],
    ) -> None:  # fmt: skip
        self.c, self.name, self.number, self.began = c, kind.__qualname__, number, c.now
        self.site, self.groups = foreign.call_site(c.base), list(c.groups[before:])
        self.given = [(i, foreign.local(t.detach()), foreign.local(t.detach())._version) for i, t in given]
        self.made = [foreign.local(t.detach()) for t in made]
        self.entered, self.labels = 0, labels
        node.register_prehook(unserializable_hook(c.guarded(self._enters, "functions")))
        node.register_hook(unserializable_hook(c.guarded(self._leaves, "functions")))

    def _enters(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.entered = len(self.c.groups)

    def _leaves(self, sent: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> None:
        groups = [*self.groups, *self.c.groups[self.entered :]]
        group = max(groups, key=len, default=())
        if len(group) < 2 or any(t._version != version for _, t, version in self.given):
            return
        back = [_or_zeros(sent[i], t) for i, t, _ in self.given]
        came_back = [_or_zeros(g, t) for t, g in zip(self.made, came, strict=False)]
        given = [t for _, t, _ in self.given]
        made = self.made[: len(came_back)]
        if any(a.shape != b.shape for a, b in zip([*given, *made], [*back, *came_back], strict=True)):
            return
        parts = {"in": given, "out": made, "came": came_back, "sent": back}
        rows = {part: torch.cat([t.reshape(-1).double() for t in tensors]) for part, tensors in parts.items()}
        both = float(rows["out"] @ rows["came"]), float(rows["in"] @ rows["sent"])
        size = sum(float(rows[a].norm() * rows[b].norm()) for a, b in (("out", "came"), ("in", "sent")))
        self.c.tensors |= {f"function/{self.number}/{part}": sketch(row) for part, row in rows.items()}
        if len(given) == len(made) == len(self.labels) == 1 and made[0].numel() == self.labels[0].numel():
            self._rows(given[0], back[0], made[0], came_back[0], group.index(foreign.world()[0]))
        contents = _contents(given), _contents(made)
        self.c.event(
            Function(
                *self.c.now, site=self.site, name=self.name, number=self.number, group=group,
                dtype=dtype_name(given[0]), made=both[0], given=both[1], size=size, contents=contents,
            )
        )  # fmt: skip

    def _rows(self, logits: Tensor, back: Tensor, made: Tensor, came: Tensor, place: int) -> None:
        """A few rows of what may be a cross-entropy of logits that are cut over ranks, this rank's the `place`th part:
        the logarithm of their sum, the label's logit where it is here, the loss, and the sums of gradients."""
        width, labels = logits.shape[-1], self.labels[0].reshape(-1)[:ROWS]
        if logits.numel() != width * self.labels[0].numel():
            return
        x, sent = (t.reshape(-1, width)[:ROWS].double() for t in (logits, back))
        at = labels - width * place
        picked = x.gather(1, at.clamp(0, width - 1)[:, None])[:, 0] * (at == at.clamp(0, width - 1))
        rows = [x.logsumexp(1), picked, *(t.reshape(-1)[:ROWS].double() for t in (made, came)), sent.sum(1)]
        self.c.tensors[f"function/{self.number}/rows"] = torch.stack(rows)


def _or_zeros(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else foreign.local(gradient.detach())


def _contents(tensors: list[Tensor]) -> str:
    return str(sum(map(content_hash, tensors)) % 2**64)


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
    """Watches the outermost calls of autograd Functions."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.step = self.count = 0

    def wrapper(self) -> tuple[Any, Any]:
        """(what Function.apply is, what takes its place)."""
        original = torch.autograd.Function.__dict__["apply"]

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
        c.guarded(self._called, "functions")(call.args[0], args, result, before)
        return result

    def _called(self, kind: type, args: tuple[Any, ...], result: Any, before: int) -> None:
        """A Function was applied; `before`: the collectives up to its forward."""
        c = self.capture
        if self.step != c.step:
            self.step, self.count = c.step, 0
        tensors = [t for t in args if isinstance(t, Tensor)]  # a node's gradients are theirs, in this order
        given = [(i, t) for i, t in enumerate(tensors) if t.requires_grad]
        made = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, Tensor)]
        nodes = {t.grad_fn for t in made if t.grad_fn is not None and t.is_floating_point()}
        tensors = [foreign.local(t.detach()) for t in (*(t for _, t in given), *made)]
        if len(nodes) != 1 or not given or self.count >= MOST_CALLS or foreign.imagined(tensors):
            return
        self._injected(next(iter(nodes)), [(i, t) for i, t in given if type(t) is Tensor], made[0])
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > LIMIT or any(type(t) is not Tensor for t in tensors) or len({t.dtype for _, t in given}) > 1:
            return
        self.count += 1
        whole = [t.detach() for t in args if isinstance(t, Tensor) and t.dtype == torch.int64 and t.numel() > 1]
        _Call(c, kind, given, made, nodes.pop(), before, self.count, whole)

    def _injected(self, node: Any, given: list[tuple[int, Tensor]], made: Tensor) -> None:
        """What was made is one of the tensors given: a number beside it gets a gradient of the Function's own."""
        numbers = [(i, float(t)) for i, t in given if t.dim() == 0 and not t.is_leaf]
        if not numbers or all(t.dim() == 0 or t.data_ptr() != made.data_ptr() for _, t in given):
            return
        c, site = self.capture, foreign.call_site(self.capture.base)

        def leaves(sent: tuple[Tensor | None, ...], came: tuple[Tensor | None, ...]) -> None:
            for i, value in numbers:
                if (weight := sent[i]) is not None:
                    c.event(LossTerm(*c.now, site=site, value=value, weights=(float(weight),), injected=True))

        node.register_hook(unserializable_hook(c.guarded(leaves, "functions")))

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
    found, biases = [], [t for t in tensors if t.dim() == 1 and t.is_floating_point() and t.requires_grad]
    for labels in (t for t in tensors if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool):
        flat = labels.detach().reshape(-1)
        for place, rows in enumerate(tensors):
            if not rows.requires_grad or rows.dim() < 2 or rows.numel() != flat.numel() * rows.shape[-1]:
                continue
            heads = [t for t in tensors if t is not rows and t.dim() == 2 and t.shape[1] == rows.shape[-1]]
            for weight in (*(h for h in heads if h.is_floating_point()), None):
                classes = rows.shape[-1] if weight is None else len(weight)
                usable = ((flat >= 0) & (flat < classes)).nonzero()[:, 0]
                if not len(usable):
                    continue
                picked = usable[:: max(1, len(usable) // ROWS)][:ROWS]
                kept = rows.detach().reshape(-1, rows.shape[-1])[picked].double().clone()
                several = [t for t in biases if len(t) == classes] if weight is not None else []
                found.append(LossArgs(place, flat.clone(), picked, kept, weight, next(iter(several), None)))
    return found
