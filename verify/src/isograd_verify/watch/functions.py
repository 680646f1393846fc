"""Sees autograd Functions that communicate: what each was given, made, got back and sent back, for a two-sided test.

The backward of a linear function is its adjoint: over all ranks of its group, what it made times what came back is what
it was given times what it sent back. Whether a call was linear (a gather, a sum, an exchange) is judged from contents
afterwards (judge/checks/adjoints.py); here both products are taken while the tensors are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from isograd_verify.record.events import Function, LossTerm
from isograd_verify.record.sketch import content_hash, dtype_name, sketch
from isograd_verify.watch import foreign
from isograd_verify.watch.recorder import Recorder

MOST_CALLS = 64  # in a step
ROWS = 16  # of labels, that are looked at
LIMIT = 1 << 26  # bytes of one call's tensors


class Functions:
    """Told of every outermost call of an autograd Function."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.step = self.count = 0

    def called(self, kind: type, args: tuple[Any, ...], result: Any, before: int) -> None:
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
        both = (_product(made, came_back), _product(given, back))
        size = sum(_size(a) * _size(b) for a, b in ((made, came_back), (given, back)))
        for part, tensors in (("in", given), ("out", made), ("came", came_back), ("sent", back)):
            self.c.tensors[f"function/{self.number}/{part}"] = _sketch(tensors)
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


def _product(left: list[Tensor], right: list[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))


def _contents(tensors: list[Tensor]) -> str:
    return str(sum(map(content_hash, tensors)) % 2**64)


def _size(tensors: list[Tensor]) -> float:
    return float(sum(float(t.double().square().sum()) for t in tensors) ** 0.5)


def _sketch(tensors: list[Tensor]) -> Tensor:
    total, at = torch.zeros(256, dtype=torch.float64), 0
    for t in tensors:
        total += sketch(t, at)
        at += t.numel()
    return total
