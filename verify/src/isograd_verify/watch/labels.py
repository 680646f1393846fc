"""Notes of how many labels a loss is made, and the weight that each of them got in backward: as torch's cross-entropy
tells it, or the program itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from isograd_verify.record.events import LabelWeight, Loss
from isograd_verify.record.sketch import content_hash
from isograd_verify.watch.foreign import call_site
from isograd_verify.watch.recorder import Recorder


class Labels:
    """What is told of losses by torch's cross-entropy and by the program itself."""

    def __init__(self, capture: Recorder) -> None:
        self.capture = capture
        self.sites: dict[int, str] = {}  # where a loss was called, by the memory of its total, which backward gets

    def forward(self, args: Any, result: Any) -> str:
        """Notes a cross-entropy: how many labels counted, of how many classes, and its mean over them; its line."""
        c, reduction = self.capture, int(args[3])
        counted = float(_counted(args, 1, 4, result[1]))
        classes = args[0].shape[1] if args[0].dim() > 1 else 1
        total = float(result[0].detach().double().sum())  # of the mean: itself
        value = total if reduction == 1 or not counted else total / counted
        kind = ("none", "mean", "sum")[reduction]
        c.event(Loss(*c.now, reduction=kind, count=counted, classes=classes, value=value))
        site = self.sites[result[1].data_ptr()] = call_site(c.base)
        return site

    def backward(self, args: Any) -> None:
        """Notes the lowest and highest weight that a label's gradient got, and the hash of the labels."""
        c, reduction = self.capture, int(args[4])
        count, site = float(_counted(args, 2, 5, args[6])), self.sites.get(args[6].data_ptr(), "")
        flat = args[0].detach().double().reshape(-1)
        used = flat[flat != 0]
        scale = 1 / count if reduction == 1 and count else 1.0
        low, high = (float(used.min()) * scale, float(used.max()) * scale) if used.numel() else (0.0, 0.0)
        hashed, average = str(content_hash(args[2][args[2] != args[5]])), reduction == 1
        c.weight(LabelWeight(*c.now, count=count, low=low, high=high, labels=hashed, site=site, average=average))

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


def _counted(args: Any, target: int, ignore: int, total: Tensor) -> Tensor:
    """How many labels count: torch's own total, which it leaves at zero for unreduced losses."""
    return total if float(total) else (args[target] != args[ignore]).sum()
