"""What is forgotten where experts meet sequence parallelism: each tp rank routes its own part of every sequence.

router-unreduced  the router has seen this rank's tokens only, and nobody sums its gradient over tp. Megatron-LM #599
shared-gate       the same of the gate of the shared expert. Pai-Megatron-Patch #397
gather-cut        tokens are gathered with a backward, their weights by a plain all_gather: what the loss says of the
                  weights is lost, and the router's gradient is zero. Automodel #2995
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from isograd_verify.corpus.mixture import EXPERTS, Mixture, Model, Seat, routed, take_seat
from isograd_verify.corpus.plain import backwards, batch, cross_entropy, gather, program, seeded, steps, valid
from isograd_verify.corpus.sharded import copied, summed

WORLD, LAYOUT = 2, "tp2 sp ep2"
BUGS = {
    "router-unreduced": ("tp", r"\.router\."),
    "shared-gate": ("tp", r"\.shared_gate\."),
    "gather-cut": ("tp", r"\.router\."),
}
FORGOTTEN = {"router-unreduced": "moe.router.weight", "shared-gate": "moe.shared_gate.weight"}


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` names what is planted, if anything."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Model, seed, take_seat(2))
    if bug == "gather-cut":
        model.moe.gather_weights = gather
    for step in steps(model):
        count = valid(batch(seed + step)[1])
        tokens, labels = (part.tensor_split(world, 1)[rank] for part in batch(seed + step))
        (cross_entropy(model(tokens), labels) / count).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:  # of the router, where nothing reaches it
                continue
            if not routed(name) and name != FORGOTTEN.get(bug):
                dist.all_reduce(parameter.grad)


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


@program("tp2 ep2", "tp", r"^embed|^norm|router")
def score_partial(bug: bool, seed: int) -> None:
    """A token's weights have a gradient on the rank of each expert, and nobody sums these. transformers #48205,
    torchtitan #2387. All ranks hold all tokens, each computes its own experts for them. What the loss says of the
    weight of another rank's expert is known there only, and what passes through the router is a part of the truth."""
    seat: Seat = take_seat(2)
    model = seeded(TensorParallel, seed, seat)
    model.moe.partial = bug
    for _ in backwards(model, seed):
        pass
