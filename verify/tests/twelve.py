"""Small forms of eight of the twelve programs that a second outside tester wrote, each right and wrong: test_twelve.py
says what must be said of them, alone and beside one device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .testers import Sum
from .trackers import Gather

MICROS = 3


def own() -> torch.Generator:
    """This rank's random numbers."""
    return torch.Generator().manual_seed(10 + dist.get_rank())


def step_of(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class Total(torch.autograd.Function):
    """The sum of what ranks made, whose gradient is one on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Branched(nn.Module):
    """A layer that is cut over the ranks, with an adapter at its side. `wrong`: nobody sums what comes back through the
    adapter to the input."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        up, side, down = torch.randn(8, 6), torch.randn(8, 2), torch.randn(6, 8)
        self.wrong, self.norm, self.low = wrong, nn.LayerNorm(6), nn.Parameter(torch.randn(2, 6))
        self.up, self.side = (nn.Parameter(whole.chunk(world)[rank].clone()) for whole in (up, side))
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        inside = Sum.apply(h)
        out = inside @ self.up.T + (h if self.wrong else inside) @ self.low.T @ self.side.T
        return x + Total.apply(F.silu(out) @ self.down.T)  # type: ignore[no-any-return]


def branched(wrong: bool, steps: int = 4) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6), Branched(wrong), Branched(wrong), nn.LayerNorm(6), nn.Linear(6, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(20, (4, 9), generator=data)
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        for name, p in model.named_parameters():
            if name.endswith("low"):
                dist.all_reduce(p.grad)
        step_of(optimizer)


def views(wrong: bool, steps: int = 4) -> None:
    """A contrastive loss of two views, one under the other in one call. `wrong`: other ranks' losses do not come
    back."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), own()
    for _ in range(steps):
        x = torch.randn(4, 6, generator=data)
        first, second = x + 0.1, x + 0.1 * torch.randn(4, 6, generator=data)
        one, two = model(torch.cat([first, second])).chunk(2)
        labels = torch.arange(len(one)) + len(one) * dist.get_rank()
        F.cross_entropy(one @ Gather.apply(two, not wrong).T, labels).backward()
        step_of(optimizer)


def clipped(wrong: bool, steps: int = 4) -> None:
    """`wrong`: a clip behind every backward, and not behind the last one alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), own()
    for _ in range(steps):
        for micro in range(MICROS):
            x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
            with nullcontext() if micro == MICROS - 1 else model.no_sync():
                (F.cross_entropy(model(x), y) / MICROS).backward()
            if wrong or micro == MICROS - 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        step_of(optimizer)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleDict({name: nn.Linear(8, 3) for name in ("a", "b")})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.trunk(x).tanh())  # type: ignore[no-any-return]


def flat(wrong: bool, steps: int = 4) -> None:
    """Each rank has another task, and gradients are summed in one buffer. `wrong`: without those that are None."""
    torch.manual_seed(0)
    model, data = Tasks(), own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = torch.randn(5, 6, generator=data), torch.randint(3, (5,), generator=data)
        F.cross_entropy(model(x, "ab"[(dist.get_rank() + step) % 2]), y).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and not wrong else p.grad
        held = [p.grad for p in model.parameters() if p.grad is not None]
        buffer = torch.cat([gradient.flatten() for gradient in held])
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
        for gradient, part in zip(held, buffer.split([g.numel() for g in held]), strict=True):
            gradient.copy_(part.view_as(gradient))
        step_of(optimizer)


class Inject(torch.autograd.Function):
    """Its first argument; the second one is a term of the loss, with this weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.full((), ctx.weight), None


class Balanced(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight, self.router, self.head = weight, nn.Linear(6, 4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        scores = Inject.apply(scores, 0.5 * scores.mean(0).square().sum(), self.weight)
        return self.head(x * scores.amax(-1, keepdim=True))  # type: ignore[no-any-return]


def injected(wrong: bool, steps: int = 4) -> None:
    """Megatron's way to add a balance loss. `wrong`: nobody divides it by the number of micro-batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Balanced(1.0 if wrong else 1 / MICROS))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), own()
    for _ in range(steps):
        for micro in range(MICROS):
            x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
            with nullcontext() if micro == MICROS - 1 else model.no_sync():
                (F.cross_entropy(model(x), y) / MICROS).backward()
        step_of(optimizer)


def penalized(wrong: bool, steps: int = 4) -> None:
    """Gradients are summed, of a loss that all labels divide, with a penalty of weights. `wrong`: each rank adds it."""
    torch.manual_seed(0)
    model, world, data = nn.Linear(6, 5), dist.get_world_size(), own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x, y = torch.randn(4 + dist.get_rank(), 6, generator=data), torch.randint(5, (4 + dist.get_rank(),))
        count = torch.tensor(float(len(y)))
        dist.all_reduce(count)
        penalty = 0.02 * model.weight.square().sum()
        loss = F.cross_entropy(model(x), y, reduction="sum") / count + (penalty if wrong else penalty / world)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        step_of(optimizer)


def normalized(wrong: bool, steps: int = 4) -> None:
    """A policy gradient. `wrong`: advantages are normalised by the mean and deviation of this rank's rows."""
    torch.manual_seed(0)
    model, data = DistributedDataParallel(nn.Linear(6, 5)), own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x, actions = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
        rewards = torch.randn(8, generator=data) * (1 + dist.get_rank())
        whole = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, rewards)
        of = rewards if wrong else torch.cat(whole)
        advantages = (rewards - of.mean()) / of.std()
        chosen = model(x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        (-advantages * chosen).mean().backward()
        step_of(optimizer)


def divided(wrong: bool, steps: int = 4) -> None:
    """A sum over labels; gradients are divided by the number of all of them. `wrong`: by each rank's own."""
    torch.manual_seed(0)
    model, data = DistributedDataParallel(nn.Linear(6, 5)), own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = torch.randn(9, 6, generator=data), torch.randint(5, (9,), generator=data)
        kept = torch.arange(9) < 3 + 4 * dist.get_rank() + step % 2
        chosen = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        count = kept.sum().float()
        loss = -chosen.masked_fill(~kept, 0.0).sum()
        (loss / count if wrong else loss).backward()
        if not wrong:
            dist.all_reduce(count)
            for p in model.parameters():
                p.grad.mul_(dist.get_world_size() / count.item())
        step_of(optimizer)
