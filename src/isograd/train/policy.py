"""The loss of answers that the model has drawn itself, each with what it was worth: GRPO, DAPO and Dr. GRPO.

A step is the only one that learns from its answers, so the model is still the one that drew them: PPO's ratio is 1,
nothing is clipped, and the gradient is that of -advantage * log probability. Terms of weight 0 are for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from isograd import losses
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.train.sections import Grpo

WORTH = ("reward", "spread")  # of each answer, for the log; spread: the standard deviation of its prompt's rewards


class PolicyLoss:
    """In the place of a PreferenceLoss; each row has one answer."""

    def __init__(self, options: Grpo, mesh: Mesh, ignore_index: int = -100) -> None:
        self.options, self.mesh, self.ignore_index = options, mesh, ignore_index

    def of(
        self,
        logp: Tensor,
        mask: Tensor,
        labels: Tensor,
        reference: Tensor | None,
        baseline: Tensor | None,
        *,
        training: bool,
        experts: Mapping[str, Any] | None = None,
    ) -> Terms:
        """logp, mask [rows, local], and labels [rows, 1, length]: as of a PreferenceLoss. reference [rows, local]: the
        log probabilities of the model before the first step. baseline [rows, 3]: advantage, reward, spread."""
        assert baseline is not None
        counts, tokens = self._counts(mask, labels), self._tokens(labels)
        factors = mask.double() / self.options.tokens if self.options.mean == "length" else counts
        share = losses.Share(factors, counts)
        each = losses.clip(logp - logp.detach(), baseline[:, :1].to(logp.dtype))
        terms: dict[str, Any] = {"policy": losses.mean(each, share)}
        if reference is not None:
            terms["kl"] = (*losses.mean(losses.kl(logp, reference.to(logp.dtype)), share), self.options.kl)
        rows = len(labels) / self.mesh.size("cp")
        shown = dict(zip(WORTH, baseline[:, 1:].unbind(1), strict=True)) | {"length": tokens[:, 0]}
        return Terms(**terms, **{name: (value.mean(), rows, 0.0) for name, value in shown.items()}, **(experts or {}))

    def _tokens(self, labels: Tensor) -> Tensor:
        """[rows, 1]: of each answer, all of it."""
        return (labels != self.ignore_index).sum(-1).double()

    def _counts(self, mask: Tensor, labels: Tensor) -> Tensor:
        """Of each token that is here: how much it stands for of what the mean is over."""
        there = mask.double()
        return there if self.options.mean == "tokens" else there / self._tokens(labels).clamp(min=1)

    def weights(
        self, labels: Tensor, local_labels: Callable[[], Tensor], others: bool = False
    ) -> dict[str, Tensor | float]:
        """How many answers, or tokens of answers, this rank has."""
        mask = local_labels().view(len(labels), -1) != self.ignore_index
        count, rows = self._counts(mask, labels).sum(), len(labels) / self.mesh.size("cp")
        found = dict.fromkeys(("policy", "kl") if self.options.kl else ("policy",), count)
        return {**found, **dict.fromkeys((*WORTH, "length"), rows)}
