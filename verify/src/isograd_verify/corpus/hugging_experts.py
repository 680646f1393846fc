"""What goes wrong with the experts of a transformers model that are spread over data ranks.

expert-scale  experts have the gradients of all ranks' tokens, and are averaged over those that hold copies: nobody.
              ep times too large. DeepSpeed #5618, pytorch #160285
expert-twice  they are divided by all ranks, and by ep once more. DeepSpeed #4957
gather-cut    weights of tokens are gathered by a plain all_gather: the router's gradient is lost. Automodel #2995
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from isograd_verify.corpus.experts import average
from isograd_verify.corpus.hugging import TRANSFORMERS, gathered, language_model, logits_of, spread
from isograd_verify.corpus.mixture import take_seat
from isograd_verify.corpus.plain import cross_entropy, gather, my_batch, steps

NEEDS = TRANSFORMERS
WORLD, LAYOUT = 2, "dp2 ep2"
BUGS = {
    "expert-scale": ("ep", r"\.experts\."),
    "expert-twice": ("ep", r"\.experts\."),
    "gather-cut": ("dp|ep", r"\.gate\."),
}


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` names what is planted, if anything."""
    world = dist.get_world_size()
    model, seat = language_model(seed), take_seat(2)
    around = partial(gathered, gather_weights=gather) if bug == "gather-cut" else gathered
    spread(model, 0, seat, around)
    for step in steps(model):
        tokens, labels, count = my_batch(seed + step)
        (cross_entropy(logits_of(model, tokens), labels) / count * world).backward()
        average(model, seat, bug)
