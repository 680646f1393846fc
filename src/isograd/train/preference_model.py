"""A decoder that is trained on pairs of answers: the loss of a pair, from the log probabilities of whole answers.

Parameters and their names are the Transformer's, so checkpoints and exports are, too. Both answers of a pair are rows
of one micro-batch. Under cp a rank has parts of both answers: `sequence_sums` adds up over the group, all its ranks
compute the same losses, and each stands for 1/cp of the pairs. Under pp the last stage does all of this.

Called without `reference`, under `noting`, it keeps each answer's log probability: this is how references are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isograd import losses
from isograd.core.attributes import set_attributes
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.core.rng import Key
from isograd.models import Transformer, TransformerConfig
from isograd.nn.stream import Cache
from isograd.sequence import token_layout_for
from isograd.train.policy import PolicyLoss
from isograd.train.sections import Grpo, Preference


class PreferenceLoss:
    """The loss of pairs, from the log probabilities of the tokens of both answers."""

    def __init__(self, options: Preference, mesh: Mesh, ignore_index: int = -100) -> None:
        self.options, self.mesh, self.ignore_index = options, mesh, ignore_index
        self._noted: list[Tensor] | None = None

    @contextmanager
    def noting(self) -> Iterator[list[Tensor]]:
        """Of each micro-batch without a reference: the log probabilities [pairs, answers], where the last stage is."""
        with set_attributes(self, _noted=(noted := list[Tensor]())):
            yield noted

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
    ) -> Any:
        """(loss, weight), or its terms. logp, mask [pairs * answers, local]: of this rank's tokens, and which of them
        are labels; of a reward model scores, and which of them count. labels [pairs, answers, length]: whole. experts:
        terms that a model of experts adds."""
        pairs, answers, _ = labels.shape
        numbers = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
        sums = losses.sequence_sums(logp, mask, numbers, len(mask), self.mesh).view(pairs, answers)
        if reference is None:
            if self._noted is not None:
                self._noted.append(sums.detach())
            return sums.mean(), pairs / self.mesh.size("cp")
        counts = (labels != self.ignore_index).sum(-1)
        terms = self._terms(sums, counts, reference.to(sums.dtype), baseline, training)
        if self.answers_weight:
            chosen = mask.view(pairs, answers, -1)[:, 0]
            share = losses.of_tokens(chosen)
            terms["answers"] = (*losses.mean(-logp.view(pairs, answers, -1)[:, 0], share), self.answers_weight)
        terms.update(experts or {})
        value, weight, coefficient = terms["preference"]
        return (value, weight) if len(terms) == 1 and coefficient == 1.0 else Terms(**terms)

    def _terms(
        self, sums: Tensor, counts: Tensor, reference: Tensor, baseline: Tensor | None, training: bool
    ) -> dict[str, Any]:
        """The loss of pairs; of an evaluation also how often, and by how much, the chosen answer is preferred."""
        options, beta = self.options, self.options.strength
        there = (counts > 0).all(1)
        if options.loss in ("simpo", "orpo"):
            sums = sums / counts.clamp(min=1)
        chosen, rejected = sums.unbind(1)
        if options.loss == "dpo":
            found = losses.dpo(chosen, rejected, reference[:, 0], reference[:, 1], beta, options.smoothing)
        elif options.loss == "ipo":
            found = losses.ipo(chosen, rejected, reference[:, 0], reference[:, 1], beta)
        elif options.loss in ("simpo", "reward"):
            found = losses.simpo(chosen, rejected, beta, options.margin if options.loss == "simpo" else 0.0)
        elif options.loss == "orpo":
            found = losses.orpo(chosen, rejected)
        else:
            assert baseline is not None
            liked = torch.tensor([True, False], device=sums.device).expand(sums.shape)
            found = losses.kto(sums, reference, liked, baseline[:, None].to(sums.dtype), beta, options.weights).mean(1)
        number, ranks = there.sum(), self.mesh.size("cp")

        def mean(values: Tensor) -> Tensor:
            return torch.where(there, values, 0).sum() / number.clamp(min=1)

        terms = {"preference": (mean(found), number / ranks, beta if options.loss == "orpo" else 1.0)}
        if not training:
            margins = beta * (sums - reference).detach()
            margins = margins[:, 0] - margins[:, 1]
            terms["accuracy"] = (mean((margins > 0).to(sums.dtype)), number / ranks, 0.0)
            terms["margin"] = (mean(margins), number / ranks, 0.0)
        return terms

    @property
    def answers_weight(self) -> float:
        """Of the chosen answers' own loss."""
        given = self.options.answers
        return float(self.options.loss == "orpo") if given is None else given

    def weights(
        self, labels: Tensor, local_labels: Callable[[], Tensor], others: bool = False
    ) -> dict[str, Tensor | float]:
        """How many pairs, and labels of chosen answers, this rank has; empty: the loss has one term. `local_labels`
        gives this rank's part of the labels, [pairs * answers, local] in any shape. others: the model adds terms of its
        own."""
        if not (others or self.answers_weight or self.options.loss == "orpo"):
            return {}
        there = (labels != self.ignore_index).any(-1).all(-1)
        found: dict[str, Tensor | float] = {"preference": there.sum() / self.mesh.size("cp")}
        if self.answers_weight:
            chosen = local_labels().view(len(labels), labels.shape[1], -1)[:, 0]
            found["answers"] = (chosen != self.ignore_index).sum()
        return found


def loss_of(options: Preference | Grpo, mesh: Mesh) -> PreferenceLoss | PolicyLoss:
    """Of pairs of answers, or of answers that the model has drawn."""
    return PolicyLoss(options, mesh) if isinstance(options, Grpo) else PreferenceLoss(options, mesh)


class PreferenceTransformer(Transformer):
    """The Transformer with a loss of pairs; of tokens [rows, length] it is the Transformer."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, options: Preference | Grpo, **more: Any) -> None:
        super().__init__(config, mesh, **more)
        self.pair_loss = loss_of(options, mesh)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        reference: Tensor | None = None,
        baseline: Tensor | None = None,
        samples: Tensor | None = None,
        stage: int | None = None,
        passed: Tensor | None = None,
        key: Key | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """reference [pairs, answers]: log probabilities of the answers, or [rows, 1, length] of their tokens; baseline
        [pairs]: KTO's, the same for all.

        A pair without labels in one of its answers is not counted: it fills up the last batch of an evaluation.
        """
        if tokens.dim() == 2 or labels is None or (stage is None and len(self.parts) > 1):
            given: dict[str, Any] = {"documents": documents, "key": key, "samples": samples, "cache": cache}
            return super().forward(tokens, labels, stage=stage, passed=passed, **given)
        _, answers, _ = tokens.shape
        if samples is not None:  # ids of pairs; dropout draws for each answer
            samples = (samples[:, None] * answers + torch.arange(answers, device=samples.device)).reshape(-1)
        rows, rows_labels = tokens.flatten(0, 1), labels.flatten(0, 1)
        x, stream, experts = self._through(
            stage or 0, passed, rows, rows_labels, key=key, samples=samples, documents=None
        )  # fmt: skip
        if stage is not None and stage < len(self.parts) - 1:
            return (x, Terms(**experts)) if experts else x
        assert stream.places is not None
        if self.score is not None:
            ends = _ends(rows_labels != self.ignore_index)
            logp = self.score.logits(x).view(len(rows), -1)
            mask = stream.places.shard(ends, self.mesh.index("cp"), False)
        else:
            assert self.head is not None
            mine = self._local_labels(rows_labels, stream.places)
            logp = self.head.log_probabilities(x, mine, self.loss_chunk).view(len(rows), -1)
            mask = (mine != self.ignore_index).view(len(rows), -1)
        terms = experts if self._has_terms else {}
        if reference is not None and reference.dim() == 3:
            reference = stream.places.shard(reference.flatten(0, 1), self.mesh.index("cp"))
        return self.pair_loss.of(logp, mask, labels, reference, baseline, training=self.training, experts=terms)

    def term_weights(
        self, tokens: Tensor, labels: Tensor | None = None, **more: object
    ) -> dict[str, Tensor | float] | None:
        """How many pairs, labels of chosen answers and routed tokens this rank has; None: the loss has one term."""
        if tokens.dim() == 2 or labels is None:
            return super().term_weights(tokens, labels, **more)
        rows, rows_labels = tokens.flatten(0, 1), labels.flatten(0, 1)
        experts = super().term_weights(rows, rows_labels) or {}
        found = {name: weight for name, weight in experts.items() if name != "lm"}

        def local_labels() -> Tensor:
            return self._local_labels(rows_labels, token_layout_for(rows.shape[1], len(rows), self.mesh))

        return {**found, **self.pair_loss.weights(labels, local_labels, others=bool(found))} or None


def _ends(counted: Tensor) -> Tensor:
    """Where the last label of each row is itself a token: one place behind the last True of [rows, length]."""
    return counted.roll(1, 1) & ~counted & (counted.flip(1).cumsum(1).flip(1) == 0)
