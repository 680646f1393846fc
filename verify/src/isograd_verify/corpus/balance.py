"""What goes wrong with the balance of experts: its loss, the bias of the choice, and the choice itself.

The loss of a step is the sum over labels / labels of the step, plus COEFFICIENT times the mean over sequences of each
sequence's balance. Layers are checkpointed: their forward is computed once more in backward. The bias of the choice
moves once a step, by what all ranks have counted in all micro-batches.

aux-times-world  the balance loss is a mean over this rank's sequences, and ranks are summed. transformers #48690
aux-times-micro  it is divided by ranks, and not by micro-batches. Automodel #3359
aux-over-dp      it is divided by all sequences, and once more by the number of ranks. Megatron-LM #3672
bias-per-micro   the bias moves after every micro-batch. torchtitan #1304
bias-twice       tokens are counted inside the checkpointed forward. torchtitan #1593, Automodel #3247
recompute-flip   the choice is made inside the checkpointed forward, and equal scores fall otherwise the second time.
                 Automodel #2635, torchtitan #3146
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isograd_verify.corpus.mixture import CHOSEN, EXPERTS, Mixture, Model, Seat, routed, take_seat
from isograd_verify.corpus.plain import BATCH, LENGTH, batch, cross_entropy, micro_batches, seeded, valid

WORLD, LAYOUT = 2, "dp2 ep2"
UPSTREAM = r"^embed|^norm|router"  # experts and all behind them do not hear of the balance loss
BUGS = {
    "aux-times-world": ("dp|ep", UPSTREAM),
    "aux-times-micro": ("micro-batches", UPSTREAM),
    "aux-over-dp": ("dp|ep", UPSTREAM),
    "bias-per-micro": ("micro-batches", ""),
    "bias-twice": ("", ""),
    "recompute-flip": ("", ""),
}
COEFFICIENT, RATE = 0.5, 0.01
MICRO_BATCHES = 4


class Balanced(Mixture):
    """A mixture that is checkpointed, keeps the balance loss of each sequence, and counts the tokens of its experts."""

    bug = ""
    chosen: Tensor

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.register_buffer("chosen", torch.zeros(EXPERTS))
        self.balance = torch.zeros(0)  # of each sequence of the micro-batch

    def forward(self, x: Tensor) -> Tensor:
        """The mixture's output; what it has chosen is kept for the balance loss."""
        with torch.no_grad():
            choice = self.choose(self.scores(x))
        self.runs = 0
        output, self.balance = checkpoint(self.layer, x, choice, use_reentrant=False)
        if self.bug != "bias-twice":
            self.count(choice)
        return output  # type: ignore[no-any-return]

    def layer(self, x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture, which a recomputed forward calls once more."""
        self.runs += 1
        scores = self.scores(x)
        if self.bug == "recompute-flip":
            choice = self.choose(scores, first=self.runs == 1)
        if self.bug == "bias-twice":
            self.count(choice)
        picked = torch.zeros_like(scores).scatter(1, choice, 1.0)
        often, sums = (t.unflatten(0, (-1, LENGTH)).sum(1) for t in (picked, scores))  # [sequences, experts]
        return self.compute(x, scores, choice), (often * sums).sum(1) * EXPERTS / (CHOSEN * LENGTH**2)

    def count(self, choice: Tensor) -> None:
        """Add the tokens of each expert to the counts of this step."""
        self.chosen += choice.flatten().bincount(minlength=EXPERTS)

    def move(self, slots: int) -> None:
        """Of `slots` choices, each expert is to have as many as any other."""
        dist.all_reduce(self.chosen)
        self.choice_bias += RATE * (slots / EXPERTS - self.chosen)
        self.chosen.zero_()


class BalancedModel(Model):
    """The model, with a balance loss beside that of the labels."""

    mixture = Balanced


def share(balance: Tensor, bug: str) -> Tensor:
    """What this micro-batch's sequences add to the mean over all of the step."""
    ranks = dist.get_world_size()
    if bug == "aux-times-world":
        return balance.mean() / MICRO_BATCHES
    if bug == "aux-times-micro":
        return balance.mean() / ranks
    return balance.sum() / BATCH / (ranks if bug == "aux-over-dp" else 1)


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` names what is planted, if anything."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(BalancedModel, seed, take_seat(2))
    model.moe.bug = bug
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        count = valid(batch(seed + step)[1])
        for tokens, labels in micro_batches(rank, world, seed + step, MICRO_BATCHES):
            loss = cross_entropy(model(tokens), labels) / count
            (loss + COEFFICIENT * share(model.moe.balance, bug)).backward()
            if bug == "bias-per-micro":
                model.moe.move(tokens.numel() * world * CHOSEN)
        for name, parameter in model.named_parameters():
            if not routed(name):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if bug != "bias-per-micro":
            model.moe.move(BATCH * LENGTH * CHOSEN)
