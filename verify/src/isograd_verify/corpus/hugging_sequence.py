"""What is forgotten where all ranks hold all tokens of a transformers model with experts.

In the first layer each rank computes its own experts for all tokens, and outputs are summed: transformers' own expert
parallelism. In the second the tokens are cut before the block, and gathered after it: its all-to-all.

score-partial     the gradient of a token's weights is made where the expert is, and nobody sums it. transformers #48205
router-unreduced  the router has seen this rank's tokens only, and nobody sums its gradient. Megatron-LM #599
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.hugging import TRANSFORMERS, gathered, language_model, logits_of, numbered, spread
from isograd_verify.corpus.mixture import Seat, take_seat
from isograd_verify.corpus.plain import Join, batch, cross_entropy, gather, mine, steps, valid
from isograd_verify.corpus.sharded import copied, summed

NEEDS = TRANSFORMERS
WORLD, LAYOUT = 2, "tp2 ep2"
BUGS = {
    "score-partial": ("tp", r"embed|layers\.0\.(?!mlp\.experts)"),
    "router-unreduced": ("tp", r"layers\.1\.mlp\.gate\."),
}


class Slice(torch.autograd.Function):
    """Forward: my rows. Backward: all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Of rows that all ranks hold, this rank's."""
        return mine(x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Gather them."""
        return gather(gradient, 0)


def everywhere(
    forward: Callable[..., Tensor], seat: Seat, x: Tensor, chosen: Tensor, weights: Tensor, partial_scores: bool
) -> Tensor:
    """My experts for all tokens; what they add is summed over ranks."""
    whole = weights if partial_scores else copied(weights)
    return summed(forward(copied(x), numbered(chosen, seat), whole))


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` names what is planted, if anything."""
    model, seat = language_model(seed, layers=2), take_seat(2)
    spread(model, 0, seat, partial(everywhere, partial_scores=bug == "score-partial"))
    spread(model, 1, seat, gathered)
    block = model.model.layers[1].mlp
    whole = block.forward
    block.forward = lambda x: Join.apply(whole(Slice.apply(x)), 0)  # type: ignore[no-untyped-call]
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(logits_of(model, tokens), labels) / valid(labels)).backward()
        if bug != "router-unreduced":
            dist.all_reduce(block.gate.weight.grad)
