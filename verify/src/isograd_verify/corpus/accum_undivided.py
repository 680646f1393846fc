"""accum-undivided: each micro-batch's loss is a mean, and nobody divides by the number of micro-batches.

DeepSpeed #7773, transformers #35207: a model that takes the token count itself, or seems to, switches the trainer's
division off. Adam hides the factor; the clip and the logged norm do not.
"""

from __future__ import annotations

import torch.distributed as dist

from isograd_verify.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, my_rows, seeded, steps

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "micro-batches", ".*"
MICRO_BATCHES = 4


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    for step in steps(model):
        window = my_rows(batch(seed + step)[0], rank, world)  # packed: all tokens have labels, so means may be averaged
        for rows in window.chunk(MICRO_BATCHES):
            loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:], "mean") / world
            (loss if bug else loss / MICRO_BATCHES).backward()
        all_reduce_gradients(model)
