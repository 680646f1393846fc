"""Training loops as users write them, each with what goes wrong in it, for runs beside a world of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, WIDTH = 23, 9, 8


def batch(rank: int, number: int, even: bool = False) -> tuple[Tensor, Tensor]:
    """Other data on each rank; ranks have different numbers of labels, unless they are `even`."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    text = torch.randint(VOCAB, (3, LENGTH + 1), generator=generator)
    kept = LENGTH if even else 3 + 4 * rank + number % 2
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(LENGTH) >= kept, -100)


def network(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    square = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), *square, nn.Dropout(dropout),
                         nn.Linear(WIDTH, VOCAB)).double()  # fmt: skip


def hooked(model: nn.Module, wrong: str) -> DistributedDataParallel:
    """DDP whose gradients are averaged by a hook: rightly, not divided, or with two tensors exchanged."""
    net, world = DistributedDataParallel(model), dist.get_world_size()

    def average(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
        def then(future: Any) -> Tensor:
            whole: Tensor = future.value()[0]
            if wrong != "factor":
                whole.div_(world)
            if wrong == "permuted" and world > 1:
                a, b = (g for g in bucket.gradients() if g.shape == (WIDTH, WIDTH))
                a.copy_(a.clone().T), b.copy_(b.clone().T)
            return whole

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(then)

    net.register_comm_hook(None, average)
    return net


def ddp(wrong: str = "", accumulate: int = 1, steps: int = 3, even: bool = False, loss: str = "counted") -> None:
    """The usual loop: labels are counted over all ranks and micro-batches ("counted"), or only here ("mean"), and the
    other losses below."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = network()
    torch.manual_seed(rank + 1)  # each rank drops out its own elements
    net = hooked(model, wrong)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(steps):
        micro_batches = [batch(rank, step * accumulate + i, even) for i in range(accumulate)]
        count = sum((labels != -100).sum() for _, labels in micro_batches)
        dist.all_reduce(count)
        for i, (tokens, labels) in enumerate(micro_batches):
            net.require_backward_grad_sync = i == accumulate - 1
            logits = net(tokens).flatten(0, 1)
            if loss == "counted":
                value = F.cross_entropy(logits, labels.flatten(), reduction="sum") * world / count
            elif loss == "sum":  # divided after backward, below
                value = F.cross_entropy(logits, labels.flatten(), reduction="sum") * world
            elif loss == "balanced":  # with a term that is no mean over labels: each rank counts as one
                value = F.cross_entropy(logits, labels.flatten(), reduction="sum") * world / count
                value = value + (logits.softmax(-1).mean(0).square().sum() / accumulate)
            elif loss == "means":  # several terms, each divided here
                value = F.cross_entropy(logits, labels.flatten()) + logits.softmax(-1).mean(0).square().sum()
            elif loss == "mean":
                value = F.cross_entropy(logits, labels.flatten()) / accumulate
            elif loss == "square":
                value = (logits.softmax(-1) - F.one_hot(labels.flatten().clamp(0), VOCAB)).square().mean() / accumulate
            elif loss == "negated":
                value = -logits.log_softmax(-1).gather(1, labels.flatten().clamp(0)[:, None]).mean() / accumulate
            elif loss == "half":
                value = F.cross_entropy(logits, labels.flatten()) / 2
            else:  # labels that the program makes after the model was called
                value = F.cross_entropy(logits, batch(rank, step, even)[1].flatten())
            value.backward()
        for parameter in net.parameters() if loss == "sum" else ():
            parameter.grad /= count
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def without_step() -> None:
    """Gradients, and an update that nobody sees."""
    tokens, labels = batch(dist.get_rank(), 0)
    F.cross_entropy(DistributedDataParallel(network())(tokens).flatten(0, 1), labels.flatten()).backward()


class SumsTwice(torch.autograd.Function):
    """The adjoint of a sum over ranks of copies is the identity; this one sums once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Pooled(nn.Module):
    """Each rank sees a part of each sequence's positions, and the ranks' sums are summed."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.inner, self.wrong = network(dropout=0.0), wrong

    def forward(self, tokens: Tensor) -> Tensor:
        mine = self.inner(tokens.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]).sum(1)
        total: Tensor = SumsTwice.apply(mine)
        return total if self.wrong else mine + (total - mine).detach()


def cut_in_two(wrong: bool = True) -> None:
    """Positions are cut over ranks: the same data on all of them, and in a world of one."""
    model = Pooled(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, _ = batch(0, step)
        model(tokens).logsumexp(-1).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def reduced_in_hooks(which: str = "", accumulate: int = 3, again: bool = True) -> None:
    """Every gradient (or those whose names contain `which`) is summed over ranks in a hook behind its accumulation:
    with every micro-batch, earlier ones `again`, or each micro-batch's part before it is added."""
    rank = dist.get_rank()
    model = network(dropout=0.0)
    for name, parameter in model.named_parameters():
        if not again or which not in name:
            parameter.register_hook(summed)
        else:
            parameter.register_post_accumulate_grad_hook(summed_so_far)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for i in range(accumulate):
            tokens, labels = batch(rank, step * accumulate + i, even=True)
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()


def summed(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def summed_so_far(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad)
