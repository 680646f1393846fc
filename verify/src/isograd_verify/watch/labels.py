"""Notes of how many labels, or other numbers, a loss is made, and the weight that each of them got in backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from isograd_verify.record.events import LabelWeight, Loss, MeanWeight
from isograd_verify.record.sketch import content_hash
from isograd_verify.watch.means import Number
from isograd_verify.watch.recorder import Recorder
from isograd_verify.watch.sites import call_site


class Labels:
    """What is told of losses: by torch's cross-entropy, by means and sums, and by the program itself."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture

    def token_loss(self, reduction: int, counted: float, classes: int, value: float) -> None:
        """Notes a cross-entropy: how many labels counted, of how many classes, and its mean over them."""
        c = self.capture
        kind = ("none", "mean", "sum")[reduction]
        c.event(Loss(*c.now, reduction=kind, count=counted, classes=classes, value=value))

    def token_weight(self, reduction: int, count: float, gradient: Tensor, labels: Tensor, site: str) -> None:
        """Notes the lowest and highest weight that a label's gradient got, and the hash of the labels."""
        c = self.capture
        flat = gradient.detach().double().reshape(-1)
        used = flat[flat != 0]
        low, high = (float(used.min()), float(used.max())) if used.numel() else (0.0, 0.0)
        scale = 1 / count if reduction == 1 and count else 1.0
        hashed = str(content_hash(labels))
        weight = LabelWeight(
            *c.now, count=count, low=low * scale, high=high * scale, labels=hashed, site=site, average=reduction == 1
        )
        self._note(weight)

    def weighed(self, loss: Tensor, n: Tensor | float, reduction: str) -> None:
        """The program says that a loss is over n labels (weighing.py): noted as if torch's own had computed it."""
        c = self.capture
        count, site = float(n), call_site(c.base)
        if not loss.requires_grad or not torch.is_grad_enabled():
            return
        value = float(loss.detach().double().sum())
        mean = value if reduction == "mean" or not count else value / count
        c.event(Loss(*c.now, reduction=reduction, count=count, value=mean))

        def arrives(gradient: Tensor | None) -> None:
            if gradient is not None and count:
                weights = gradient.detach().double() / (count if reduction == "mean" else 1.0)
                low, high = float(weights.min()), float(weights.max())
                average = reduction == "mean"
                c.event(LabelWeight(*c.now, count=count, low=low, high=high, site=site, average=average))

        loss.register_hook(unserializable_hook(c.guarded(arrives, "labels")))

    def mean(self, number: Number, gradient: Tensor) -> None:
        """Notes of how many numbers a mean or a sum was taken, and the weight that the gradient of each got."""
        c = self.capture
        penalty = torch.is_grad_enabled() and not c.backing  # torch.autograd.grad with a graph: the loss takes it
        if number.count and not penalty:
            weight = float(gradient) / (number.count if number.mean else 1.0)
            about = MeanWeight(
                *c.now, term=number.term, site=number.site, count=number.count, weight=weight,
                nonzero=number.nonzero, divided=number.divided, average=number.average,
                elements=number.elements,
            )  # fmt: skip
            self._note(about)

    def _note(self, weight: LabelWeight | MeanWeight) -> None:
        """What a Function's forward finds out counts by what comes back to the Function (fused.py)."""
        self.capture.inner_weights.append(weight) if self.capture.in_function else self.capture.event(weight)
