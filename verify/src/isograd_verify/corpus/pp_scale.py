"""pp-scale: every pipeline stage divides by the number of micro-batches, instead of the last one alone.

DeepSpeed #8152: what a stage sends back is divided already, and the stage before it divides again. Gradients are too
small by that number once for every stage behind theirs.
"""

from __future__ import annotations

from isograd_verify.corpus.piped import backward, my_micro_batches, sum_gradients, take_seat
from isograd_verify.corpus.plain import batch, steps, valid

WORLD, LAYOUT = 4, "pp2 dp2"
AXIS, TENSORS = "micro-batches", r"^(embed|first)\."
MICRO_BATCHES = 3


def train(bug: bool, seed: int) -> None:
    seat = take_seat(seed, tied=False)
    for step in steps(seat.model):
        count = float(valid(batch(seed + step)[1]))
        for tokens, labels in my_micro_batches(seat, seed + step, MICRO_BATCHES):
            backward(seat, tokens, labels, (1 / MICRO_BATCHES if bug else 1.0, 1 / count))
        sum_gradients(seat)
