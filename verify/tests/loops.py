"""Training loops as users write them, each with what goes wrong in it, for runs beside a world of one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
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


def _value(loss: str, logits: Tensor, labels: Tensor, count: Tensor, accumulate: int) -> Tensor:
    """`count`: of all labels of the step. DDP averages over ranks."""

    def mean() -> Tensor:
        return F.cross_entropy(logits, labels)

    def total() -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum")

    def balance() -> Tensor:
        return logits.softmax(-1).mean(0).square().sum()

    def by_hand() -> Tensor:
        return -(logits.log_softmax(-1).gather(1, labels.clamp(0)[:, None])[:, 0] * (labels != -100)).sum()

    named = {
        "by hand": lambda: by_hand() * dist.get_world_size() / count,
        "means by hand": lambda: by_hand() / (labels != -100).sum() / accumulate,
        "counted": lambda: total() * dist.get_world_size() / count,
        "sum": lambda: total() * dist.get_world_size(),  # divided after backward
        # With a term that is no mean over labels: each rank counts as one.
        "balanced": lambda: total() * dist.get_world_size() / count + balance() / accumulate,
        "means": lambda: mean() + balance(),  # several terms, each divided here
        "mean": lambda: mean() / accumulate,
        "undivided": mean,  # by the number of micro-batches
        "undivided two": lambda: mean() + 0.01 * F.cross_entropy(-logits, labels),
        "square": lambda: (logits.softmax(-1) - F.one_hot(labels.clamp(0), VOCAB)).square().mean() / accumulate,
        # Over all numbers of the step, of which each rank and micro-batch has as many.
        "shared": lambda: (
            dist.get_world_size() * (logits.square().sum() / (logits.numel() * accumulate * dist.get_world_size()))
        ),
        "negated": lambda: -logits.log_softmax(-1).gather(1, labels.clamp(0)[:, None]).mean() / accumulate,
        "half": lambda: mean() / 2,
    }
    return named[loss]()


def ddp(wrong: str = "", accumulate: int = 1, steps: int = 3, even: bool = False, loss: str = "counted") -> None:
    """The usual loop: labels are counted over all ranks and micro-batches ("counted"), or only here ("mean"), and the
    other losses above."""
    rank = dist.get_rank()
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
            if loss == "late":  # labels that the program makes after the model was called
                value = F.cross_entropy(logits, batch(rank, step, even)[1].flatten())
            else:
                value = _value(loss, logits, labels.flatten(), count, accumulate)
            value.backward()
        for parameter in net.parameters() if loss == "sum" else ():
            parameter.grad /= count
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def fsdp1(flat: bool, even: bool) -> None:
    """FSDP1, whose ranks hold elements of flat parameters in a row: tensors are cut in the middle of their rows. Two
    micro-batches, the first of which is not reduced; the norm is FSDP's own, which takes no fp64."""
    rank = dist.get_rank()
    model = network(dropout=0.0).float()
    net = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=not flat, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(3):
        for i in range(2):
            tokens, labels = batch(rank, 2 * step + i, even)
            with net.no_sync() if i == 0 else nullcontext():
                (F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten()) / 2).backward()
        net.clip_grad_norm_(0.1)
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
