"""Small forms of programs that a third outside tester wrote, each right and wrong: test_dozen.py says what must be said
of them, alone and beside one device."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .twelve import own, step_of


class Front(nn.Module):
    """The first stage of a pipeline: what it makes, and the embeddings of which it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(20, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embed(ids)
        return e + self.net(e).relu(), e


class Back(nn.Module):
    """The last stage, which is given both."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 20)

    def forward(self, h: Tensor, e: Tensor) -> Tensor:
        return self.head(h + self.gate(h).sigmoid() * e)  # type: ignore[no-any-return]


def skipped(wrong: bool, steps: int = 4) -> None:
    """A pipeline whose first stage sends two tensors, one made of the other. `wrong`: one gradient comes back."""
    torch.manual_seed(0)
    rank, data = dist.get_rank(), torch.Generator().manual_seed(1)
    model = [Front(), Back()][rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        text, kept = torch.randint(20, (2, 4, 9), generator=data), []
        for ids in text[..., :-1]:
            if rank == 0:
                kept.append(model(ids))
                for one in kept[-1]:
                    dist.send(one.detach(), 1)
            else:
                kept.append((torch.empty(4, 8, 6), torch.empty(4, 8, 6)))
                for one in kept[-1]:
                    dist.recv(one, 0)
        for (h, e), labels in zip(kept, text[..., 1:], strict=True):
            if rank == 0:
                back = [torch.empty_like(h) for _ in range(1 if wrong else 2)]
                for one in back:
                    dist.recv(one, 1)
                torch.autograd.backward((h, e)[: len(back)], back)
            else:
                h.requires_grad_()
                e.requires_grad_(not wrong)
                (F.cross_entropy(model(h, e).flatten(0, 1), labels.flatten()) / 2).backward()
                for one in (h,) if wrong else (h, e):
                    dist.send(one.grad, 0)
        step_of(optimizer)


def owners_clip(wrong: bool, steps: int = 5) -> None:
    """ZeRO 1 by hand: gradients are reduced to the rank that owns a parameter and clips them. `wrong`: by the norm of
    its own part."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))
    every = list(model.parameters())
    owned = [p for i, p in enumerate(every) if i % world == rank]
    optimizer = torch.optim.SGD(owned, lr=0.1)
    for step in range(steps):
        data = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=data), 4 * torch.randn(8, 3, generator=data)
        F.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
        for i, p in enumerate(every):
            p.grad.div_(world)
            dist.reduce(p.grad, dst=i % world)
        square = torch.stack([p.grad.square().sum() for p in owned]).sum()
        if not wrong:
            dist.all_reduce(square)
        for p in owned:
            p.grad.mul_((0.5 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        for i, p in enumerate(every):
            dist.broadcast(p.data, src=i % world)
            p.grad = None


def penalised(wrong: bool, steps: int = 4) -> None:
    """A policy gradient with a distance to another policy, both per token of all ranks. `wrong`: the distance is
    divided by this rank's tokens."""
    torch.manual_seed(0)
    model, data, world = DistributedDataParallel(nn.Linear(6, 5)), own(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = torch.randn(9, 6, generator=data), torch.randint(5, (9,), generator=data)
        mask = (torch.arange(9) < 3 + 4 * dist.get_rank() + step % 2).float()
        other, gains = torch.randn(9, generator=data), torch.randn(9, generator=data)
        every = mask.sum()
        dist.all_reduce(every)
        chosen = model(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        distance = (other - chosen).exp() - (other - chosen) - 1
        policy = -((chosen - chosen.detach()).exp() * gains * mask).sum() * (world / every)
        (policy + 0.3 * (distance * mask).sum() * (1 / mask.sum() if wrong else world / every)).backward()
        step_of(optimizer)


def consistent(wrong: bool, steps: int = 4) -> None:
    """Labels, and a distance between two sights of rows, each with a backward of its own. `wrong`: the second one is
    outside of the wrapper."""
    torch.manual_seed(0)
    model, data = DistributedDataParallel(nn.Linear(6, 5)), own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
        noisy = x + torch.randn(8, 6, generator=data)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            target = model(x).softmax(-1)
        outputs = (model.module if wrong else model)(noisy).log_softmax(-1)
        (2.0 * F.kl_div(outputs, target, reduction="batchmean")).backward()
        step_of(optimizer)


def scaled_once(wrong: bool, steps: int = 4) -> None:
    """Three micro-batches and a gradient scaler. `wrong`: it scales the loss of the last one only."""
    torch.manual_seed(0)
    model, data = DistributedDataParallel(nn.Linear(6, 5)), own()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(steps):
        for micro in range(3):
            x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
            with nullcontext() if micro == 2 else model.no_sync():
                if wrong and micro < 2:
                    (F.cross_entropy(model(x), y) / 3).backward()
                else:
                    scaler.scale(F.cross_entropy(model(x), y) / 3).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def clips_late(wrong: bool, steps: int = 4) -> None:
    """Plain DDP with a clip by hand that leaves steps alone. `wrong`: on one rank it leaves all of them alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5)))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), own()
    for step in range(steps):
        x, y = (0.3 + step) * torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(1.0 if wrong and dist.get_rank() else torch.clamp(0.6 / norm, max=1.0))
        optimizer.step()
