"""score-partial: a token's weights have a gradient on the rank of each expert, and nobody sums these.

transformers #48205, torchtitan #2387. All ranks hold all tokens; each computes its own experts for them, multiplies by
the tokens' weights and adds what the others made. What the loss says of the weight of another rank's expert is known
there only. The router's copies go apart, and what passes through it to the layers before is a part of the truth.
"""

from __future__ import annotations

from torch import Tensor

from isograd_verify.corpus.mixture import EXPERTS, Mixture, Model, Seat, take_seat
from isograd_verify.corpus.plain import batch, cross_entropy, seeded, steps, valid
from isograd_verify.corpus.sharded import copied, summed

WORLD, LAYOUT = 2, "tp2 ep2"
AXIS, TENSORS = "tp", r"^embed|^norm|router"


class Everywhere(Mixture):
    """Experts whose tokens are on all ranks: nothing is gathered, outputs are summed."""

    partial = False

    def routed(self, x: Tensor, weights: Tensor) -> Tensor:
        """What this rank's experts add, summed over ranks."""
        here = EXPERTS // self.seat.ep
        whole = weights if self.partial else copied(weights)
        mine = whole[:, self.seat.index * here :][:, :here]
        return summed(self.experts(copied(x), mine))


class TensorParallel(Model):
    """The model whose experts live on all ranks, with equal tokens on each."""

    mixture = Everywhere


def train(bug: bool, seed: int) -> None:
    """Two steps; `bug` plants a gather of the weights whose backward is only a slice."""
    seat: Seat = take_seat(2)
    model = seeded(TensorParallel, seed, seat)
    model.moe.partial = bug
    for step in steps(model):
        tokens, labels = batch(seed + step)
        (cross_entropy(model(tokens), labels) / valid(labels)).backward()
