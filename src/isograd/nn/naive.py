"""The definition of a layer of experts on one device: every expert on every token, masked. Plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from isograd.nn.routing import ExpertOptions

Activation = Callable[[Tensor], Tensor]


def moe(
    x: Tensor, weights: Mapping[str, Tensor], options: ExpertOptions, activation: Activation, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [b, s, hidden] -> output [b, s, hidden]; logits, and which experts were chosen as 0 and 1, [b, s, experts].

    `weights`: by the names of the layer's parameters. `bias`: of the choice.
    """
    logits = x @ weights["router.weight"].t()
    scores = logits.softmax(-1) if options.scores == "softmax" else logits.sigmoid()
    chosen = torch.zeros_like(scores)
    for sequence, token in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        ranked = scores[sequence, token].detach() + (0 if bias is None else bias)
        chosen[sequence, token, best(ranked.tolist(), options)] = 1
    share = scores * chosen
    if options.renormalise:
        share = share / share.sum(-1, keepdim=True)
    room = options.slots_of(x.shape[1])
    if room is not None:
        share = share * (chosen.cumsum(1) <= room)
    y = torch.zeros_like(x)
    for expert in range(options.number):
        up, gate, down = (weights[f"experts.{name}"][expert] for name in ("up", "gate", "down"))
        y = y + options.scale * share[..., expert, None] * feed(x, up, gate, down, activation)
    if options.shared:
        up, gate, down = (weights[f"shared.{name}.weight"] for name in ("up", "gate", "down"))
        common = feed(x, up, gate, down, activation)
        if options.shared_gate:
            common = common * (x @ weights["shared_gate.weight"].t()).sigmoid()
        y = y + common
    return y, logits, chosen


def feed(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """One gated feed-forward layer."""
    return (activation(x @ gate.t()) * (x @ up.t())) @ down.t()


def best(ranked: list[float], options: ExpertOptions) -> list[int]:
    """The numbers of the k experts with the largest values; of equal values, the lower number first."""
    size = options.number // options.groups
    groups = [range(g * size, (g + 1) * size) for g in range(options.groups)]
    worth = [sum(sorted((ranked[e] for e in group), reverse=True)[:2]) for group in groups]
    allowed = sorted(range(options.groups), key=lambda g: (-worth[g], g))[: options.chosen_groups]
    candidates = [e for g in allowed for e in groups[g]]
    return sorted(candidates, key=lambda e: (-ranked[e], e))[: options.per_token]


def balance(logits: Tensor, chosen: Tensor, options: ExpertOptions) -> Tensor:
    """L_B of the scope B whose tokens are given, [..., experts]: E / (k T^2) * sum_i N_i S_i."""
    scores = logits.softmax(-1) if options.scores == "softmax" else logits.sigmoid()
    shares = (scores / scores.sum(-1, keepdim=True)).reshape(-1, options.number)
    often = chosen.reshape(-1, options.number).sum(0)
    return options.number / (options.per_token * len(shares) ** 2) * (often * shares.sum(0)).sum()


def z(logits: Tensor) -> Tensor:
    """The mean squared log-sum-exp of the tokens' logits."""
    return logits.logsumexp(-1).square().mean()
