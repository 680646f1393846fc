"""Losses of preferences, one for each pair (or, of KTO, each completion), from log probabilities of whole answers.

DPO, IPO and KTO take the sum over an answer's tokens, SimPO and ORPO the mean. Both answers of a pair are in one
micro-batch. ORPO is a term beside the language model's loss of the chosen answer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.losses import given


def dpo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor,
    beta: float = 0.1, smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """-log sigmoid(beta * margin over the reference); smoothing: the share of labels taken to be wrong."""
    given.option("smoothing", smoothing, 0 <= smoothing < 0.5, "a number from 0 to below 0.5")
    margin = _scale(beta) * _over_reference(chosen, rejected, reference_chosen, reference_rejected)
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def ipo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float = 0.1
) -> Tensor:
    """(margin over the reference - 1 / (2 beta)) squared. TRL takes means over tokens here, the paper sums."""
    margin = _over_reference(chosen, rejected, reference_chosen, reference_rejected)
    return (margin - 1 / (2 * _scale(beta))).square()


def simpo(chosen: Tensor, rejected: Tensor, beta: float = 2.0, margin: float = 1.0) -> Tensor:
    """-log sigmoid(beta * difference - margin), of means over tokens; there is no reference."""
    given.same_shapes(chosen=chosen, rejected=rejected)
    return -F.logsigmoid(_scale(beta) * (chosen - rejected) - margin)


def orpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(log of the ratio of odds), of means over tokens, which are below 0. One that was rounded to 0 counts
    as the largest number below it that 1 minus its probability can tell from 0."""
    given.same_shapes(chosen=chosen, rejected=rejected)
    chosen, rejected = (logp.clamp(max=-torch.finfo(logp.dtype).eps) for logp in (chosen, rejected))
    odds = (chosen - rejected) - (_log_of_rest(chosen) - _log_of_rest(rejected))
    return -F.logsigmoid(odds)


def kto(
    logp: Tensor, reference: Tensor, desirable: Tensor, baseline: Tensor | float,
    beta: float = 0.1, weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:  # fmt: skip
    """1 - sigmoid(beta * (reward - baseline)) of desirable answers, the mirror image of the others.

    baseline: an estimate of the KL to the reference over the whole step, the same on all ranks (one number, or one of
    each row of [rows, answers]); it has no gradient.
    weights: of (desirable, undesirable) answers.
    """
    given.same_shapes(logp=logp, reference=reference, desirable=desirable)
    given.option(
        "desirable", desirable.dtype, desirable.dtype == torch.bool, "True and False: desirable > 0 of numbers"
    )
    if isinstance(baseline, Tensor):
        shape, own = tuple(baseline.shape), tuple(logp.shape)
        fits = len(shape) == len(own) and all(a in (1, b) for a, b in zip(shape, own, strict=True))
        given.option("the shape of baseline", shape, fits or baseline.numel() == 1, f"one number, or as logp {own}")
        baseline = baseline.detach() if fits else baseline.detach().reshape(())
    apart = _scale(beta) * (logp - reference.detach() - baseline)
    return torch.where(desirable, weights[0] * torch.sigmoid(-apart), weights[1] * torch.sigmoid(apart))


def _over_reference(chosen: Tensor, rejected: Tensor, of_chosen: Tensor, of_rejected: Tensor) -> Tensor:
    given.same_shapes(chosen=chosen, rejected=rejected, reference_chosen=of_chosen, reference_rejected=of_rejected)
    return (chosen - rejected) - (of_chosen - of_rejected).detach()


def _scale(beta: float) -> float:
    given.option("beta", beta, beta > 0, "a number above 0")
    return beta


def _log_of_rest(logp: Tensor) -> Tensor:
    """log(1 - exp(logp)), exact near both ends (Maechler's log1mexp)."""
    near = logp > -0.6931471805599453
    safe = torch.where(near, logp, torch.full_like(logp, -0.1))
    far = torch.where(near, torch.full_like(logp, -1.0), logp)
    return torch.where(near, (-safe.expm1()).log(), (-far.exp()).log1p())
