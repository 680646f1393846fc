"""What goes wrong with the gradients of routed experts, whose data ranks are fewer than those of everything else.

Gradients are averaged, as DDP and FSDP do: sums over ranks, divided by the number of ranks. The experts of a rank have
seen the tokens of their whole ep group already, and are summed over their edp group only; the divisor is the same.

expert-scale        experts are averaged over the ranks over which they are summed: ep times too large. DeepSpeed #5618
                    and #6545, MegaBlocks #20, pytorch #160285, Megatron-FSDP #5956
expert-twice        they are divided by all ranks, and by ep once more. DeepSpeed #4957
ep-copies-drift     copies of an expert are never summed. fairseq #4220
norm-omits-experts  each rank's norm has its own experts' squares, and not those of its ep group. NeMo-RL #3788
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from isograd_verify.corpus.mixture import Model, Seat, routed, take_seat
from isograd_verify.corpus.plain import cross_entropy, my_batch, seeded, steps

WORLD, LAYOUT = 4, "dp4 ep2"
BUGS = {
    "expert-scale": ("ep", r"\.experts\."),
    "expert-twice": ("ep", r"\.experts\."),
    "ep-copies-drift": ("edp", r"\.experts\."),
    "norm-omits-experts": ("ep", ""),  # all gradients are right; the norm is not
}
MOST = 0.05  # every step is clipped


def average(model: nn.Module, seat: Seat, bug: str) -> None:
    """Sum each gradient over the ranks that hold copies of it, and divide by the number of ranks."""
    world = dist.get_world_size()
    divisor = {"expert-scale": world // seat.ep, "expert-twice": world * seat.ep}.get(bug, world)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # of the router, where nothing reaches it
            continue
        if not routed(name):
            dist.all_reduce(parameter.grad)
        elif seat.copies is not None and bug != "ep-copies-drift":
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


def train(bug: str, seed: int) -> None:
    """Two steps; `bug` names what is planted, if anything."""
    world = dist.get_world_size()
    seat = take_seat(2)
    model = seeded(Model, seed, seat)
    for step in steps(model):
        tokens, labels, count = my_batch(seed + step)
        (cross_entropy(model(tokens), labels) / count * world).backward()
        average(model, seat, bug)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), MOST, total_norm(model, seat, bug))
