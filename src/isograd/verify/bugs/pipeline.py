"""What goes wrong in a pipeline as it does without one.

accum-undivided  each micro-batch's loss is a mean, and nobody divides by the number of micro-batches: the last stage
                 starts every backward that many times too large, and all stages inherit it
"""

from __future__ import annotations

import torch

from isograd.verify.bugs.piped import backward, my_micro_batches, sum_gradients, take_seat
from isograd.verify.bugs.plain import batch, valid

WORLD, LAYOUT = 4, "pp2 dp2"
BUGS = {"accum-undivided": ("micro-batches", ".*")}
MICRO_BATCHES = 3


def train(bug: str, seed: int) -> None:
    seat = take_seat(seed)
    optimizer = torch.optim.SGD(seat.model.parameters(), lr=0.1)
    for step in range(2):
        scale = (MICRO_BATCHES if bug else 1) / float(valid(batch(seed + step)[1]))
        for tokens, labels in my_micro_batches(seat, seed + step, MICRO_BATCHES):
            backward(seat, tokens, labels, (1.0, scale))
        sum_gradients(seat)
        optimizer.step()
        optimizer.zero_grad()
