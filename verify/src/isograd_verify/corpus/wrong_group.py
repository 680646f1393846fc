"""wrong-group: gradients of tensor-parallel shards are summed over the world instead of over the data ranks.

Megatron-LM #7452 found five cases. Every rank adds the gradient of somebody else's rows to its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isograd_verify.corpus.plain import HIDDEN, VOCAB, batch, cross_entropy, my_rows, seeded, steps, valid

WORLD, LAYOUT = 4, "dp2 tp2"
AXIS, TENSORS = "tp", r"^(up|down)\."


class Over(torch.autograd.Function):
    """Sum over a group in forward or in backward, and nothing the other way round."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forward: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group, ctx.backward_sums = group, not forward
        return _sum(x, group) if forward else x

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        return _sum(gradient, ctx.group) if ctx.backward_sums else gradient, None, None


def over(x: Tensor, group, forward: bool) -> Tensor:  # type: ignore[no-untyped-def]
    result: Tensor = Over.apply(x, group, forward)  # type: ignore[no-untyped-call]
    return result


def _sum(x: Tensor, group) -> Tensor:  # type: ignore[no-untyped-def]
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, 12, bias=False)
        self.down = nn.Linear(12, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def shard(self, index: int, of: int, group) -> None:  # type: ignore[no-untyped-def]
        self.group = group
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(of, 0)[index].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(of, 1)[index].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        inner = self.down(F.gelu(self.up(over(x, self.group, forward=False))))
        logits: Tensor = self.head(x + over(inner, self.group, forward=True))
        return logits


def train(bug: bool, seed: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = 2 if world == 4 else 1
    model_groups = [dist.new_group(list(range(i, i + tp))) for i in range(0, world, tp)]
    data_groups = [dist.new_group(list(range(i, world, tp))) for i in range(tp)]
    model = seeded(Model, seed)
    model.shard(rank % tp, tp, model_groups[rank // tp])
    for step in steps(model):
        tokens, labels = batch(seed + step)
        count = valid(labels)
        mine = (my_rows(part, rank // tp, world // tp) for part in (tokens, labels))
        logits, targets = (model(part) if i == 0 else part for i, part in enumerate(mine))
        (cross_entropy(logits, targets) / count).backward()
        for name, parameter in model.named_parameters():
            wrong = bug and name.startswith(("up", "down"))
            dist.all_reduce(parameter.grad, group=None if wrong else data_groups[rank % tp])
