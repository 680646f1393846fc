"""Programs with a small Qwen3-MoE of transformers, whose classes are as they are, and a few lines around its experts
that spread them over ranks.

The library's experts pass over a number that is one too high: so are the experts of other ranks left out here.
transformers is imported when a program runs: `isograd-verify bugs --list` needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isograd_verify.corpus import plain
from isograd_verify.corpus.experts import COEFFICIENT, EXPERTS_ALONE, MICRO_BATCHES, average, share, sum_others
from isograd_verify.corpus.mixture import CHOSEN, EXPERTS, INNER, Seat, routed, take_seat

transformers_program = partial(plain.program, NEEDS="transformers")
UPSTREAM = r"embed|layernorm|self_attn|mlp\.gate\."  # experts and all behind them do not hear of the balance loss


def language_model(seed: int, layers: int = 1, **options: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "head_dim": 4, **options}
    config = Qwen3MoeConfig(
        vocab_size=plain.VOCAB, hidden_size=plain.HIDDEN, moe_intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=plain.LENGTH, initializer_range=0.5,
        router_aux_loss_coef=COEFFICIENT, use_cache=False, **sizes,
    )  # fmt: skip
    config._experts_implementation = config._attn_implementation = "eager"
    return Qwen3MoeForCausalLM(config).double()


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
    gather_weights: Callable[[Tensor, int, Any], Tensor] = plain.gathered,
) -> Tensor:
    """All ranks' tokens come to my experts, and what these make of them goes back."""
    everyones, theirs = plain.gathered(x, 0, seat.group), gather_weights(weights, 0, seat.group)
    mine = numbered(plain.gather(chosen, 0, seat.group), seat)
    here = forward(everyones, mine, theirs) + 0 * (everyones + theirs.sum())  # without tokens, too, backward comes by
    return plain.scattered(here, 0, seat.group)


@transformers_program(
    "dp2 ep2",
    BUGS={
        "expert-scale": ("ep", EXPERTS_ALONE),
        "expert-twice": ("ep", EXPERTS_ALONE),
        "gather-cut": ("dp|ep", r"\.gate\."),
    },
)
def hugging_experts(bug: str, seed: int) -> None:
    """Experts are spread over data ranks.

    expert-scale  experts have the gradients of all ranks' tokens, and are averaged over those that hold copies: none
    expert-twice  they are divided by all ranks, and by ep once more
    gather-cut    weights of tokens are gathered by a plain all_gather: the router's gradient is lost"""
    world = dist.get_world_size()
    model, seat = language_model(seed), take_seat(2)
    around = partial(gathered, gather_weights=plain.gather) if bug == "gather-cut" else gathered
    spread(model, 0, seat, around)
    for tokens, labels, count in plain.my_batches(model, seed):
        (plain.cross_entropy(model(input_ids=tokens).logits, labels) / count * world).backward()
        average(model, seat, bug)


my_rows = plain.move(plain.mine, plain.gather)  # of rows that all ranks hold


def everywhere(
    forward: Callable[..., Tensor], seat: Seat, x: Tensor, chosen: Tensor, weights: Tensor, partial_scores: bool
) -> Tensor:
    """My experts for all tokens; what they add is summed over ranks."""
    whole = weights if partial_scores else plain.copied(weights)
    return plain.summed(forward(plain.copied(x), numbered(chosen, seat), whole))


@transformers_program(
    "tp2 ep2",
    BUGS={
        "score-partial": ("tp", r"embed|layers\.0\.(?!mlp\.experts)"),
        "router-unreduced": ("tp", r"layers\.1\.mlp\.gate\."),
    },
)
def hugging_sequence(bug: str, seed: int) -> None:
    """All ranks hold all tokens. In the first layer each rank computes its own experts for all of them, and outputs are
    summed: transformers' own expert parallelism. In the second the tokens are cut before the block, and gathered after
    it: its all-to-all.

    score-partial     the gradient of a token's weights is made where the expert is, never summed
    router-unreduced  the router has seen this rank's tokens only, and nobody sums its gradient"""
    model, seat = language_model(seed, layers=2), take_seat(2)
    spread(model, 0, seat, partial(everywhere, partial_scores=bug == "score-partial"))
    spread(model, 1, seat, gathered)
    block = model.model.layers[1].mlp
    whole = block.forward
    block.forward = lambda x: plain.joined(whole(my_rows(x, 0)), 0)
    for step in plain.steps(model):
        tokens, labels = plain.batch(seed + step)
        (plain.cross_entropy(model(input_ids=tokens).logits, labels) / plain.valid(labels)).backward()
        if bug != "router-unreduced":
            dist.all_reduce(block.gate.weight.grad)


@transformers_program("dp2 ep2", BUGS={"expert-none": ("", EXPERTS_ALONE)})
def hugging_idle(bug: str, seed: int) -> None:
    """The experts of a rank have no tokens: its part of their weights has no gradient instead of one of zeros.

    The library keeps the experts of a layer as one tensor: only a rank whose experts are all idle shows it."""
    model = language_model(seed, num_experts_per_tok=1, norm_topk_prob=False)
    block = model.model.layers[0].mlp
    router = block.gate.weight.requires_grad_(False)
    # With one expert per token nobody chooses the last: of w and -w one is above w / 2 and -w / 2.
    first, half = router[:1].clone(), torch.linspace(0.5, 0.1, EXPERTS // 2 - 1).view(-1, 1)
    router.copy_(torch.cat([first, -first, *(part * first for part in (half, -half))]))
    spread(model, 0, take_seat(2), gathered)
    for tokens, labels, count in plain.my_batches(model, seed, weight_decay=0.1):
        (plain.cross_entropy(model(input_ids=tokens).logits, labels) / count).backward()
        for name, parameter in model.named_parameters():
            if routed(name) and parameter.grad is None and not bug:
                parameter.grad = torch.zeros_like(parameter)
        sum_others(model)


@transformers_program(
    "dp2",
    BUGS={
        "aux-times-world": ("dp", UPSTREAM),
        "aux-times-micro": ("micro-batches", UPSTREAM),
        "aux-over-dp": ("dp", UPSTREAM),
    },
)
def hugging_balance(bug: str, seed: int) -> None:
    """The library's own balance loss, on its own router's logits: of each sequence. (Of all rows of a micro-batch
    together it would change with how rows are put together; docs/experts.md.) The bugs are those of `balance`."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model: Any = language_model(seed)
    for step in plain.steps(model):
        for tokens, labels, count in plain.my_micro_batches(seed + step, MICRO_BATCHES):
            found = model(input_ids=tokens, output_router_logits=True)
            loss = plain.cross_entropy(found.logits, labels) / count
            rows = found.router_logits[0].split(plain.LENGTH)
            balance = torch.stack([load_balancing_loss_func((one,), EXPERTS, CHOSEN) for one in rows])  # type: ignore[misc]
            (loss + COEFFICIENT * share(balance, bug)).backward()
        plain.all_reduce_gradients(model)
