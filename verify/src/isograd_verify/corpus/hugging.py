"""What the programs with transformers' mixtures of experts share: a small Qwen3-MoE, whose classes are as they are, and
a few lines around its experts that spread them over ranks.

The library's experts take, with the tokens, the numbers and the weights of each token's experts, and pass over a number
that is one too high: that is how its own expert parallelism leaves out the experts of other ranks, and so it is here.
transformers is imported when a program runs: `isograd-verify bugs --list` needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isograd_verify.corpus.mixture import CHOSEN, EXPERTS, INNER, Seat
from isograd_verify.corpus.plain import HIDDEN, LENGTH, VOCAB, Gather, ScatterSum, gather

TRANSFORMERS = "transformers"  # what these programs need
COEFFICIENT = 0.5


def language_model(seed: int, layers: int = 1, **options: Any) -> Any:
    """transformers' Qwen3MoeForCausalLM, the same weights on every rank."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "head_dim": 4, **options}
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.5,
        router_aux_loss_coef=COEFFICIENT, use_cache=False, **sizes,
    )  # fmt: skip
    config._experts_implementation = config._attn_implementation = "eager"
    return Qwen3MoeForCausalLM(config).double()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Logits of all positions."""
    found: Tensor = model(input_ids=tokens).logits
    return found


def spread(model: Any, layer: int, seat: Seat, around: Callable[..., Tensor]) -> None:
    """Keep this rank's experts of a layer, and call `around` in place of their forward, with that first."""
    experts = model.model.layers[layer].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        mine = getattr(experts, name).detach().chunk(seat.ep)[seat.index].clone()
        setattr(experts, name, nn.Parameter(mine))
    experts.num_experts = EXPERTS // seat.ep
    experts.forward = partial(around, experts.forward, seat)


def numbered(chosen: Tensor, seat: Seat) -> Tensor:
    """The numbers of experts as this rank counts its own; one too high for those of other ranks."""
    here = EXPERTS // seat.ep
    mine = chosen - seat.index * here
    return mine.where((mine >= 0) & (mine < here), here)


def gathered(
    forward: Callable[..., Tensor],
    seat: Seat,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gather_weights: Callable[[Tensor, int, Any], Tensor] = Gather.apply,
) -> Tensor:
    """All ranks' tokens come to my experts, and what these make of them goes back."""
    everyones, theirs = Gather.apply(x, 0, seat.group), gather_weights(weights, 0, seat.group)  # type: ignore[no-untyped-call]
    mine = numbered(gather(chosen, 0, seat.group), seat)
    here = forward(everyones, mine, theirs) + 0 * (everyones + theirs.sum())  # without tokens, too, backward comes by
    return ScatterSum.apply(here, 0, seat.group)  # type: ignore[no-any-return, no-untyped-call]
