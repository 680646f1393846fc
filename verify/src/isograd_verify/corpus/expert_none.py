"""expert-none: an expert without tokens is left out of forward, and has no gradient instead of one of zeros.

Automodel #2995. One device that computes every expert decays its weights and moves them by their momentum; here the
optimizer passes by. Where copies of an expert have tokens on one rank and none on another, they drift, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isograd_verify.corpus.mixture import EXPERTS, INNER, Mixture, Model, Seat, routed, take_seat
from isograd_verify.corpus.plain import HIDDEN, cross_entropy, my_batch, seeded, steps

WORLD, LAYOUT = 2, "dp2 ep2"
AXIS, TENSORS = "", rf"\.experts\.{EXPERTS - 1}\."


class Expert(nn.Module):
    """One expert, as modules of their own have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One expert's output for all tokens."""
        y: Tensor = self.down(self.up(x).relu())
        return y


class Separate(nn.ModuleDict):
    """A module for each expert, under its number among all."""

    skip = False

    def __init__(self) -> None:
        super().__init__({str(number): Expert() for number in range(EXPERTS)})

    def keep(self, seat: Seat) -> None:
        """Keep the experts of this rank."""
        here = EXPERTS // seat.ep
        for number in range(EXPERTS):
            if number // here != seat.index:
                del self[str(number)]

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum over the experts of this rank."""
        total = torch.zeros_like(x)
        for expert, weight in zip(self.values(), weights.unbind(1), strict=True):
            if not self.skip or bool(weight.any()):
                total = total + weight[:, None] * expert(x)
        return total


class SeparateMixture(Mixture):
    """The mixture with one module for each expert."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.experts = Separate()  # type: ignore[assignment]


class SeparateModel(Model):
    """The model with that mixture."""

    mixture = SeparateMixture


def train(bug: bool, seed: int) -> None:
    """Two steps; `bug` leaves the gradient of an expert that nobody has chosen at None."""
    model = seeded(SeparateModel, seed, take_seat(2))
    model.moe.choice_bias[-1] = -1e9  # nobody chooses the last expert
    model.moe.experts.skip = bug
    for step in steps(model, weight_decay=0.1):
        tokens, labels, count = my_batch(seed + step)
        (cross_entropy(model(tokens), labels) / count).backward()
        for name, parameter in model.named_parameters():
            if not routed(name):
                dist.all_reduce(parameter.grad)
