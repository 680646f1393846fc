"""What goes wrong in a pipeline as it does without one.

accum-undivided  each micro-batch's loss is a mean, and nobody divides by the number of micro-batches: the last stage
                 starts every backward that many times too large, and all stages inherit it
clip-per-rank    each stage clips by the norm of its own parameters, so that stages are scaled by different factors
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from isograd_verify.corpus.piped import Seat, backward, my_micro_batches, sum_gradients, take_seat
from isograd_verify.corpus.plain import batch, steps, valid

WORLD, LAYOUT = 4, "pp2 dp2"
BUGS = {"accum-undivided": ("micro-batches", ".*"), "clip-per-rank": ("pp", ".*")}
MICRO_BATCHES = 3
CLIP = 0.1  # below every norm here


def train(bug: str, seed: int) -> None:
    seat = take_seat(seed, tied=False)
    for step in steps(seat.model):
        scale = (MICRO_BATCHES if bug == "accum-undivided" else 1) / float(valid(batch(seed + step)[1]))
        for tokens, labels in my_micro_batches(seat, seed + step, MICRO_BATCHES):
            backward(seat, tokens, labels, (1.0, scale))
        sum_gradients(seat)
        clip(seat, per_stage=bug == "clip-per-rank")


def clip(seat: Seat, per_stage: bool) -> None:
    gradients = [p.grad for p in seat.model.parameters() if p.grad is not None]
    squares = torch.stack([g.square().sum() for g in gradients]).sum()
    if seat.stages > 1 and not per_stage:
        dist.all_reduce(squares, group=seat.tie_group)
    torch.nn.utils.clip_grads_with_norm_(list(seat.model.parameters()), CLIP, squares.sqrt())
