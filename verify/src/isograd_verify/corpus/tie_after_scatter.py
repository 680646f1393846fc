"""tie-after-scatter: a tied weight is summed over its stages after its gradient was scattered to different owners.

Megatron-LM #844. The weight lies at the end of the first stage's buffer and at the front of the last one's, so that the
reduce-scatter, in place, leaves its sum on another data rank of each. What the sum over the stages then adds on the
owner's side is what a rank that owns nothing of it had left: contributions count 1, 0, 1, 2. examples/tied_pipeline.py
prints it step by step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from isograd_verify.corpus.piped import Seat, backward, my_micro_batches, take_seat
from isograd_verify.corpus.plain import batch, steps, valid

WORLD, LAYOUT = 4, "pp2 dp2"
AXIS, TENSORS = "pp", r"^embed\."


def scatter(seat: Seat, bug: bool) -> None:
    """Means over the data ranks, in place, of a buffer of two equal halves."""
    named = dict(seat.model.named_parameters())
    tied = named.pop("embed.weight")
    if not bug:
        dist.all_reduce(tied.grad, group=seat.tie_group)
    half = tied.numel()
    assert tied.grad is not None
    rest = torch.cat([p.grad.flatten() for p in named.values() if p.grad is not None])
    rest = F.pad(rest, (0, half - len(rest)))
    parts = (rest, tied.grad.flatten()) if seat.first else (tied.grad.flatten(), rest)
    buffer = torch.cat(parts)
    mine = slice(seat.data * half, (seat.data + 1) * half)
    mean = buffer.clone()
    dist.all_reduce(mean, group=seat.data_group)
    buffer[mine] = mean[mine] / seat.datas
    front, back = buffer.split(half)
    tied.grad.copy_((back if seat.first else front).view_as(tied))
    if bug:
        dist.all_reduce(tied.grad, group=seat.tie_group)
    at = 0
    for parameter in named.values():
        assert parameter.grad is not None
        parameter.grad.copy_((front if seat.first else back)[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()


def train(bug: bool, seed: int) -> None:
    seat = take_seat(seed)
    for step in steps(seat.model):
        count = float(valid(batch(seed + step)[1]))
        for tokens, labels in my_micro_batches(seat, seed + step, 2):
            backward(seat, tokens, labels, (1.0, seat.datas / count))
        if seat.stages > 1:
            scatter(seat, bug)
            for name, parameter in seat.model.named_parameters():  # from its owner, as a sharded optimizer would step
                assert parameter.grad is not None
                owner = int(seat.first == (name == "embed.weight"))
                dist.broadcast(parameter.grad, seat.stage * seat.datas + owner, group=seat.data_group)
