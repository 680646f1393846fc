"""Losses of reinforcement learning, one for each token; share.py says what their mean is over.

PPO, GRPO   clip(logp - old, advantages)                         DAPO   clip(logp - old, advantages, high=0.28)
GSPO        clip(sequence_log_ratio(logp, old, ...), advantages, 3e-4, 4e-4), mean over sequences
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from isograd.core.mesh import Mesh
from isograd.losses import given
from isograd.losses.pointwise import pointwise
from isograd.losses.sequences import sequence_means


def clip(
    log_ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """PPO's loss of each token: -min(ratio * A, clamp(ratio, 1 - low, 1 + high) * A), where ratio = exp(log_ratio).

    advantages: of each token [b, s], of each row [b, 1], or one number. dual: with a negative advantage, at most
    -dual * A. The logarithm is clamped, not the ratio: a ratio that overflows has the loss and gradient of the bound.
    """
    if advantages.numel() != 1:
        of_rows = advantages.dim() == log_ratio.dim() and advantages.shape[-1] == 1
        given.same_shapes(log_ratio=log_ratio, advantages=advantages.expand(log_ratio.shape) if of_rows else advantages)
    given.option("low", low, 0 <= low <= 1, "a number from 0 to 1")
    given.option("high", high, high >= 0, "a number of at least 0")
    given.option("dual", dual, dual is None or dual > 1, "a number above 1")
    advantages = advantages.detach()
    up = (advantages >= 0).expand(log_ratio.shape)
    least = math.log1p(-low) if low < 1 else -math.inf
    most = math.inf if dual is None else math.log(dual)
    bottom, top = (
        torch.where(up, torch.tensor(a, dtype=log_ratio.dtype, device=log_ratio.device), b)
        for a, b in ((-math.inf, least), (math.log1p(high), most))
    )
    return pointwise(lambda x: -advantages * x.clamp(bottom, top).exp(), log_ratio)


def sequence_log_ratio(
    logp: Tensor, old: Tensor, mask: Tensor, sequences: Tensor, number: int, mesh: Mesh | None = None
) -> Tensor:
    """GSPO's log ratio at each token: the mean of logp - old over its sequence, whose gradient goes to the token.

    The mean over a sequence's tokens of a function of it has the gradient of that function of the sequence's mean.
    """
    with torch.no_grad():
        means = sequence_means(logp - old, mask, sequences, number, mesh)
        means = torch.where(sequences >= 0, means[sequences.clamp(min=0)], means.new_zeros(()))
    return logp - logp.detach() + means.to(logp.dtype)


def kl(logp: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Schulman's estimates of KL(policy || reference) at tokens that the policy drew: k1 (unbiased), k2, and k3
    (unbiased and never negative)."""
    given.one_of("kind of kl", kind, ("k1", "k2", "k3"))
    given.same_shapes(logp=logp, reference=reference)
    reference = reference.detach()
    if kind == "k1":
        return pointwise(lambda x: x - reference, logp)
    if kind == "k2":
        return pointwise(lambda x: (x - reference).square() / 2, logp)
    return pointwise(lambda x: (reference - x).expm1() - (reference - x), logp)


def entropy(logits: Tensor) -> Tensor:
    """Of the distribution at each token. logits [..., vocab]; -inf is a word that cannot come. A bonus has a negative
    coefficient in `ig.Terms`."""
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)


def value(values: Tensor, returns: Tensor, old: Tensor | None = None, limit: float = 0.2) -> Tensor:
    """Half the squared error; with the old values, PPO's larger one of it and of values kept within `limit` of them."""
    given.same_shapes(values=values, returns=returns, **({} if old is None else {"old": old}))
    given.option("limit", limit, limit > 0, "a number above 0")
    returns, near = returns.detach(), None if old is None else old.detach()

    def half(x: Tensor) -> Tensor:
        error = (x - returns).square()
        if near is not None:
            error = torch.maximum(error, (near + (x - near).clamp(-limit, limit) - returns).square())
        return error / 2

    return pointwise(half, values)


def group_advantages(rewards: Tensor, prompts: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO's: a reward [n] minus the mean of its prompt's rewards, over their standard deviation (scale; not of one).

    rewards, prompts: of all completions of the step, gathered before they are dealt to ranks: a group is not cut.
    """
    given.same_shapes(rewards=rewards, prompts=prompts)
    given.option("the shape of rewards", tuple(rewards.shape), rewards.dim() == 1, "one number for each completion")
    given.numbers_of("prompts", prompts)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    rewards = rewards.double()  # of 1,000 rewards of 1 in bfloat16 the sum is 256
    number = int(prompts.max()) + 1 if len(prompts) else 0
    sums = rewards.new_zeros(2, number).index_add(1, prompts, torch.stack((torch.ones_like(rewards), rewards)))
    apart = rewards - (sums[1] / sums[0].clamp(min=1))[prompts]
    if not scale:
        return apart.to(dtype)
    squares = rewards.new_zeros(number).index_add(0, prompts, apart.square())
    return (apart / ((squares / (sums[0] - 1).clamp(min=1)).sqrt()[prompts] + eps)).to(dtype)
