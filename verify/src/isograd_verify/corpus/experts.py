"""Bugs of routed experts: of their gradients and their balance, and where they meet sequence parallelism."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isograd_verify.corpus import plain
from isograd_verify.corpus.mixture import CHOSEN, EXPERTS, INNER, Mixture, Model, Seat, routed, take_seat

MOST = 0.05  # every step is clipped
UPSTREAM = r"^embed|^norm|router"  # experts and all behind them do not hear of the balance loss
COEFFICIENT, RATE = 0.5, 0.01
MICRO_BATCHES = 4


def sum_others(model: nn.Module, forgotten: str = "") -> None:
    """Sum over all ranks the gradients of what is not cut over ep, where there is one."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not routed(name) and name != forgotten:
            dist.all_reduce(parameter.grad)


def average(model: nn.Module, seat: Seat, bug: str) -> None:
    """Sum each gradient over the ranks that hold copies of it, and divide by the number of ranks."""
    world = dist.get_world_size()
    divisor = {"expert-scale": world // seat.ep, "expert-twice": world * seat.ep}.get(bug, world)
    sum_others(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            if routed(name) and seat.copies is not None and bug != "ep-copies-drift":
                dist.all_reduce(parameter.grad, group=seat.copies)
            parameter.grad /= divisor if routed(name) else world


def total_norm(model: Model, seat: Seat, bug: str) -> torch.Tensor:
    """The norm of all gradients, each rank's experts counted once."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    experts = torch.stack([g.square().sum() for name, g in gradients.items() if routed(name)]).sum()
    if bug != "norm-omits-experts":
        dist.all_reduce(experts, group=seat.group)
    others = torch.stack([g.square().sum() for name, g in gradients.items() if not routed(name)]).sum()
    return (experts + others).sqrt()


EXPERTS_ALONE = r"\.experts\."


@plain.program(
    "dp4 ep2",
    world=4,
    BUGS={
        "expert-scale": ("ep", EXPERTS_ALONE),
        "expert-twice": ("ep", EXPERTS_ALONE),
        "ep-copies-drift": ("edp", EXPERTS_ALONE),
        "norm-omits-experts": ("ep", ""),  # all gradients are right; the norm is not
    },
)
def experts(bug: str, seed: int) -> None:
    """Gradients are averaged, as DDP and FSDP do: sums over ranks, divided by their number. The experts of a rank have
    seen the tokens of their whole ep group already, and are summed over their edp group only; the divisor is the same.

    expert-scale        experts are averaged over the ranks over which they are summed: ep times too large
    expert-twice        they are divided by all ranks, and by ep once more
    ep-copies-drift     copies of an expert are never summed
    norm-omits-experts  each rank's norm has its own experts' squares, not those of its ep group"""
    world, seat = dist.get_world_size(), take_seat(2)
    model = plain.seeded(Model, seed, seat)
    for tokens, labels, count in plain.my_batches(model, seed):
        (plain.cross_entropy(model(tokens), labels) / count * world).backward()
        average(model, seat, bug)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MOST, total_norm(model, seat, bug))


FORGOTTEN = {"router-unreduced": "moe.router.weight", "shared-gate": "moe.shared_gate.weight"}


@plain.program(
    "tp2 sp ep2",
    BUGS={
        "router-unreduced": ("tp", r"\.router\."),
        "shared-gate": ("tp", r"\.shared_gate\."),
        "gather-cut": ("tp", r"\.router\."),
    },
)
def experts_sequence(bug: str, seed: int) -> None:
    """Each tp rank routes its own part of every sequence.

    router-unreduced  the router has seen this rank's tokens only, and is never summed over tp
    shared-gate       the same of the gate of the shared expert
    gather-cut        tokens are gathered with a backward, their weights by a plain all_gather"""
    model = plain.seeded(Model, seed, take_seat(2))
    if bug == "gather-cut":
        model.moe.gather_weights = plain.gather
    for _ in plain.over_sequences(model, seed):
        sum_others(model, FORGOTTEN.get(bug, ""))


class Everywhere(Mixture):
    """Experts whose tokens are on all ranks: nothing is gathered, outputs are summed."""

    partial = False

    def routed(self, x: Tensor, weights: Tensor) -> Tensor:
        here = EXPERTS // self.seat.ep
        whole = weights if self.partial else plain.copied(weights)
        mine = whole[:, self.seat.index * here :][:, :here]
        return plain.summed(self.experts(plain.copied(x), mine))


@plain.program("tp2 ep2", "tp", UPSTREAM)
def score_partial(bug: bool, seed: int) -> None:
    """A token's weights have a gradient on the rank of each expert, and nobody sums these: all ranks hold all tokens,
    each computes its own experts for them."""
    model = plain.seeded(Model, seed, take_seat(2), Everywhere)
    model.moe.partial = bug
    for _ in plain.backwards(model, seed):
        pass


def expert() -> nn.Module:
    up, down = nn.Linear(plain.HIDDEN, INNER, bias=False), nn.Linear(INNER, plain.HIDDEN, bias=False)
    return nn.Sequential(up, nn.ReLU(), down)


class Separate(nn.ModuleDict):
    """A module for each expert, under its number among all."""

    skip = False

    def __init__(self) -> None:
        super().__init__({str(number): expert() for number in range(EXPERTS)})

    def keep(self, seat: Seat) -> None:
        here = EXPERTS // seat.ep
        for number in range(EXPERTS):
            if number // here != seat.index:
                del self[str(number)]

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert, weight in zip(self.values(), weights.unbind(1), strict=True):
            if not self.skip or bool(weight.any()):
                total = total + weight[:, None] * expert(x)
        return total


@plain.program("dp2 ep2", "", rf"\.experts\.{EXPERTS - 1}\.")
def expert_none(bug: bool, seed: int) -> None:
    """An expert without tokens is left out of forward, and has no gradient instead of one of zeros: one device that
    computes every expert decays its weights, and here the optimizer passes by."""
    model = plain.seeded(Model, seed, take_seat(2), partial(Mixture, experts=Separate))
    model.moe.choice_bias[-1] = -1e9  # nobody chooses the last expert
    model.moe.experts.skip = bug
    for tokens, labels, count in plain.my_batches(model, seed, weight_decay=0.1):
        (plain.cross_entropy(model(tokens), labels) / count).backward()
        sum_others(model)


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
        return output

    def layer(self, x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture, which a recomputed forward calls once more."""
        self.runs += 1
        scores = self.scores(x)
        if self.bug == "recompute-flip":
            choice = self.choose(scores, first=self.runs == 1)
        if self.bug == "bias-twice":
            self.count(choice)
        picked = torch.zeros_like(scores).scatter(1, choice, 1.0)
        often, sums = (t.unflatten(0, (-1, plain.LENGTH)).sum(1) for t in (picked, scores))  # [sequences, experts]
        return self.compute(x, scores, choice), (often * sums).sum(1) * EXPERTS / (CHOSEN * plain.LENGTH**2)

    def count(self, choice: Tensor) -> None:
        self.chosen += choice.flatten().bincount(minlength=EXPERTS)

    def move(self, slots: int) -> None:
        """Of `slots` choices, each expert is to have as many as any other."""
        dist.all_reduce(self.chosen)
        self.choice_bias += RATE * (slots / EXPERTS - self.chosen)
        self.chosen.zero_()


def share(balance: Tensor, bug: str) -> Tensor:
    """What this micro-batch's sequences add to the mean over all of the step."""
    ranks = dist.get_world_size()
    if bug == "aux-times-world":
        return balance.mean() / MICRO_BATCHES
    if bug == "aux-times-micro":
        return balance.mean() / ranks
    return balance.sum() / plain.BATCH / (ranks if bug == "aux-over-dp" else 1)


@plain.program(
    "dp2 ep2",
    BUGS={
        "aux-times-world": ("dp|ep", UPSTREAM),
        "aux-times-micro": ("micro-batches", UPSTREAM),
        "aux-over-dp": ("dp|ep", UPSTREAM),
        "bias-per-micro": ("micro-batches", ""),
        "bias-twice": ("", ""),
        "recompute-flip": ("", ""),
    },
)
def balance(bug: str, seed: int) -> None:
    """The loss of a step is the sum over labels / labels of the step, plus COEFFICIENT times the mean over sequences of
    each sequence's balance. Layers are checkpointed: their forward is computed once more in backward. The bias of the
    choice moves once a step, by what all ranks have counted in all micro-batches.

    aux-times-world  the balance loss is a mean over this rank's sequences, and ranks are summed
    aux-times-micro  it is divided by ranks, and not by micro-batches
    aux-over-dp      it is divided by all sequences, and once more by the number of ranks
    bias-per-micro   the bias moves after every micro-batch
    bias-twice       tokens are counted inside the checkpointed forward
    recompute-flip   the choice is made inside the checkpointed forward: equal scores fall otherwise the second time"""
    model = plain.seeded(Model, seed, take_seat(2), Balanced)
    model.moe.bug = bug
    for step in plain.steps(model):
        if step and bug != "bias-per-micro":
            model.moe.move(plain.BATCH * plain.LENGTH * CHOSEN)
        for tokens, labels, count in plain.my_micro_batches(seed + step, MICRO_BATCHES):
            loss = plain.cross_entropy(model(tokens), labels) / count
            (loss + COEFFICIENT * share(model.moe.balance, bug)).backward()
            if bug == "bias-per-micro":
                model.moe.move(tokens.numel() * dist.get_world_size() * CHOSEN)
        sum_others(model)
