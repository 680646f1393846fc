"""What goes wrong with the balance loss of a transformers model: its own function, on its own router's logits.

The loss of a step is the sum over labels / labels of the step, plus the config's coefficient times the mean over
sequences of the library's loss of each sequence. (Of all rows of a micro-batch together, as the library's models call
it, it would change with how rows are put together; docs/experts.md.)

aux-times-world  it is a mean over this rank's sequences, and ranks are summed. transformers #48690
aux-times-micro  it is divided by ranks, and not by micro-batches. Automodel #3359
aux-over-dp      it is divided by all sequences, and once more by the number of ranks. Megatron-LM #3672
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.balance import MICRO_BATCHES, share
from isograd_verify.corpus.hugging import COEFFICIENT, TRANSFORMERS, language_model
from isograd_verify.corpus.mixture import CHOSEN, EXPERTS
from isograd_verify.corpus.plain import LENGTH, all_reduce_gradients, batch, cross_entropy, micro_batches, steps, valid

NEEDS = TRANSFORMERS
WORLD, LAYOUT = 2, "dp2"
UPSTREAM = r"embed|layernorm|self_attn|mlp\.gate\."  # experts and all behind them do not hear of the balance loss
BUGS = {
    "aux-times-world": ("dp", UPSTREAM),
    "aux-times-micro": ("micro-batches", UPSTREAM),
    "aux-over-dp": ("dp", UPSTREAM),
}


def balance(logits: tuple[Tensor, ...]) -> Tensor:
    """The library's balance loss of each sequence."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    (rows,) = logits
    found: list[Any] = [load_balancing_loss_func((one,), EXPERTS, CHOSEN) for one in rows.split(LENGTH)]
    return torch.stack(found)


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` names what is planted, if anything."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model: Any = language_model(seed)
    for step in steps(model):
        count = valid(batch(seed + step)[1])
        for tokens, labels in micro_batches(rank, world, seed + step, MICRO_BATCHES):
            found = model(input_ids=tokens, output_router_logits=True)
            loss = cross_entropy(found.logits, labels) / count
            (loss + COEFFICIENT * share(balance(found.router_logits), bug)).backward()
        all_reduce_gradients(model)
