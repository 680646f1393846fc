"""overflow-alone: a rank whose scaled gradients overflowed skips its optimizer step, and does not tell the others.

DeepSpeed #7568. To keep its Inf out of the sum the rank adds zeros, so all that the others receive looks fine: they
step, it does not, and from then on the replicas differ.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from isograd_verify.corpus.plain import Mlp, all_reduce_gradients, batch, cross_entropy, my_rows, seeded, valid

WORLD, LAYOUT = 2, "dp2"
AXIS, TENSORS = "rank", ""  # a step is missing on one rank; the gradients before it are right
SCALE = 1024.0


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Mlp, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):  # the second overflows, so that two steps are taken
        whole = batch(seed + step)
        tokens, labels = (my_rows(part, rank, world) for part in whole)
        loss = cross_entropy(model(tokens), labels) / valid(whole[1]) * SCALE
        holds_the_last_row = rank == world - 1
        if step == 1 and holds_the_last_row:
            loss = loss * math.inf  # planted: fp16 would get here by itself
        loss.backward()
        overflow = torch.tensor(not all(p.grad.isfinite().all() for p in model.parameters()), dtype=torch.int32)
        if overflow:
            optimizer.zero_grad(set_to_none=False)
        if not bug:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        all_reduce_gradients(model)
        if not overflow:
            for parameter in model.parameters():
                parameter.grad.div_(SCALE)
            optimizer.step()
        optimizer.zero_grad()
