"""What each loss is, on one device and the whole batch, in plain loops: the definition, and the oracle of the tests.

A batch is a list of sequences; a sequence is a list (a 1-d tensor) of the losses, or log probabilities, of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Losses = Sequence[Tensor]


def of_tokens(losses: Losses) -> Tensor:
    """The mean over all tokens."""
    return torch.cat(list(losses)).mean()


def of_sequences(losses: Losses) -> Tensor:
    """The mean over sequences with tokens of the mean over the tokens of each."""
    return torch.stack([one.mean() for one in losses if len(one)]).mean()


def of_length(losses: Losses, length: int) -> Tensor:
    """The mean over all sequences of the sum over the tokens of each / length."""
    return torch.stack([one.sum() / length for one in losses]).mean()


def of_prompts(losses: Losses, prompts: Sequence[int]) -> Tensor:
    """The mean over prompts with tokens of the mean over the tokens of all completions of each."""
    groups = [
        torch.cat([one for one, of in zip(losses, prompts, strict=True) if of == p]) for p in sorted(set(prompts))
    ]
    return torch.stack([group.mean() for group in groups if len(group)]).mean()


def clip(logp: Tensor, old: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO's loss of the tokens of one sequence."""
    ratios = [(a - b).exp() for a, b in zip(logp, old, strict=True)]
    each = [-min(r * advantage, min(max(r, r * 0 + 1 - low), r * 0 + 1 + high) * advantage) for r in ratios]
    return torch.stack(each) if each else logp


def gspo(logp: Tensor, old: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """GSPO's loss of one sequence, whose ratio is that of the geometric means."""
    return clip((logp - old).mean()[None], torch.zeros(1, dtype=logp.dtype), advantage, low, high)


def dpo(chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float) -> Tensor:
    """DPO's loss of one pair, from the log probabilities of tokens."""
    margin = (chosen.sum() - reference_chosen.sum()) - (rejected.sum() - reference_rejected.sum())
    return -(1 / (1 + (-beta * margin).exp())).log()


def ipo(chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float) -> Tensor:
    """IPO's."""
    margin = (chosen.sum() - reference_chosen.sum()) - (rejected.sum() - reference_rejected.sum())
    return (margin - 1 / (2 * beta)) ** 2


def simpo(chosen: Tensor, rejected: Tensor, beta: float, margin: float) -> Tensor:
    """SimPO's."""
    return -(1 / (1 + (-(beta * (chosen.mean() - rejected.mean()) - margin)).exp())).log()


def orpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The odds of ORPO."""
    c, r = chosen.mean().exp(), rejected.mean().exp()
    ratio = (c / (1 - c)) / (r / (1 - r))
    return -(1 / (1 + 1 / ratio)).log()


def kto(logp: Tensor, reference: Tensor, desirable: bool, baseline: float, beta: float) -> Tensor:
    """KTO's loss of one completion."""
    reward = logp.sum() - reference.sum()
    apart = reward - baseline if desirable else baseline - reward
    return 1 - 1 / (1 + (-beta * apart).exp())
