"""Small forms of programs that an outside tester of the verifier wrote, each right and wrong: test_testers.py says what
must be said of them, alone and beside one device."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .loops import hooked


def whitened(wrong: bool, steps: int = 4) -> None:
    """A policy gradient whose rewards are whitened. `wrong`: by mean and deviation of this rank's rows."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 30)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, rank, world = torch.Generator().manual_seed(1), dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        ids, rewards = torch.randint(30, (8, 4), generator=data), torch.rand(8, generator=data) * torch.arange(8)
        mine, reward = ids.chunk(world)[rank], rewards.chunk(world)[rank]
        sums = torch.stack([reward.sum(), reward.square().sum(), torch.tensor(float(len(reward)))])
        if not wrong:
            dist.all_reduce(sums)
        mean = sums[0] / sums[2]
        advantage = (reward - mean) / (sums[1] / sums[2] - mean**2).sqrt()
        chosen = model(mine[:, :-1]).log_softmax(-1).gather(-1, mine[:, 1:, None]).squeeze(-1)
        (-advantage[:, None] * chosen).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Positions(nn.Module):
    """A part of a sequence on each rank. `wrong`: it counts its positions from 0."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.embed, self.place, self.head = wrong, nn.Embedding(20, 6), nn.Embedding(8, 6), nn.Linear(6, 20)

    def forward(self, ids: Tensor) -> Tensor:
        first = 0 if self.wrong else dist.get_rank() * ids.shape[1]
        out: Tensor = self.head(F.gelu(self.embed(ids) + self.place(torch.arange(ids.shape[1]) + first)))
        return out


def positions(wrong: bool, steps: int = 4) -> None:
    torch.manual_seed(0)
    model = Positions(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, rank, world = torch.Generator().manual_seed(1), dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        text = torch.randint(20, (4, 9), generator=data)
        ids, labels = (t.chunk(world, 1)[rank].contiguous() for t in (text[:, :-1], text[:, 1:]))
        (F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / 32).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


class Sum(torch.autograd.Function):
    """Nothing, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class CutCrossEntropy(torch.autograd.Function):
    """Of logits that are cut over ranks. `wrong`: a label on another rank is taken for this rank's first class."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, wrong: bool) -> Tensor:
        local = labels - start
        outside = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(outside, 0)
        picked, total = logits.gather(1, local[:, None])[:, 0].masked_fill(outside, 0), logits.exp().sum(1)
        dist.all_reduce(picked)
        dist.all_reduce(total)
        ctx.save_for_backward(logits.exp() / total[:, None], local, torch.ones_like(outside) if wrong else ~outside)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        soft, local, inside = ctx.saved_tensors
        soft = soft.clone()
        soft[torch.arange(len(soft)), local] -= inside.to(soft.dtype)
        return soft * gradient[:, None], None, None, None


class Vocabulary(nn.Module):
    """A head that is cut over the ranks, and a loss inside the model."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.wrong, self.start, self.embed = wrong, rank * 24 // world, nn.Embedding(24, 6)
        self.head = nn.Parameter(torch.randn(24, 6).chunk(world)[rank].clone())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = Sum.apply(self.embed(ids)) @ self.head.T
        loss: Tensor = CutCrossEntropy.apply(logits, labels, self.start, self.wrong)
        return loss.mean()


def vocabulary(wrong: bool, steps: int = 4) -> None:
    torch.manual_seed(0)
    model = Vocabulary(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(24, (41,), generator=data)
        model(text[:-1], text[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


class Stage(nn.Module):
    """One of two stages: the first begins with the embedding, the last ends with it as its head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        embed, bodies = nn.Embedding(20, 6), [nn.Linear(6, 6) for _ in range(2)]
        rank, world = dist.get_rank(), dist.get_world_size()
        self.first, self.last, self.embed = rank == 0, rank == world - 1, embed
        self.bodies = nn.ModuleDict({str(i): one for i, one in enumerate(bodies) if i * world // 2 == rank})

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.first else x
        for body in self.bodies.values():
            x = x + F.gelu(body(x))
        return F.linear(x, self.embed.weight) if self.last else x


def chained(stage: Any, text: Tensor, micros: int = 1) -> None:
    """Forward and backward of one of some micro-batches, by send and recv."""
    x = text[:, :-1]
    if not stage.first:
        x = torch.empty(*x.shape, 6)
        dist.recv(x, 0)
        x.requires_grad_()
    y = stage(x)
    if stage.last:
        (F.cross_entropy(y.flatten(0, 1), text[:, 1:].flatten()) / micros).backward()
    else:
        dist.send(y.detach(), 1)
        back = torch.empty_like(y)
        dist.recv(back, 1)
        y.backward(back)
    if not stage.first:
        assert x.grad is not None
        dist.send(x.grad, 0)


def tied(wrong: bool, steps: int = 4) -> None:
    """A pipeline whose embedding is its head. `wrong`: the stages do not sum its gradient."""
    stage, world = Stage(), dist.get_world_size()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(20, (4, 9), generator=data)
        chained(stage, text)
        if world > 1 and not wrong:
            dist.all_reduce(stage.embed.weight.grad)
        optimizer.step()
        optimizer.zero_grad()


def own_buffers(wrong: bool, steps: int = 4) -> None:
    """Gradients are added up in buffers of the program's own, over four micro-batches. `wrong`: in bf16."""
    torch.manual_seed(0)
    model, world = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        main = [torch.zeros_like(p, dtype=torch.bfloat16 if wrong else torch.float32) for p in model.parameters()]
        for _ in range(4):
            text = torch.randint(20, (4, 9), generator=data).chunk(world)[dist.get_rank()]
            (F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()) / 4).backward()
            for p, own in zip(model.parameters(), main, strict=True):
                assert p.grad is not None
                own.add_(p.grad.to(own.dtype))
                p.grad = None
        for p, own in zip(model.parameters(), main, strict=True):
            whole = own.float()
            dist.all_reduce(whole)
            p.grad = whole / world
        optimizer.step()
        optimizer.zero_grad()


def by_rows(wrong: bool, steps: int = 4) -> None:
    """Rows of gradients are clipped in place, behind a sum over the ranks by hand. `wrong`: one is not summed."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, module in (("embed", nn.Embedding(20, 8)), ("norm", nn.LayerNorm(8)), ("head", nn.Linear(8, 20))):
        model.add_module(name, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        text = torch.randint(20, (4, 9), generator=own)
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            if not (wrong and name == "norm.weight"):
                dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            if p.dim() > 1:
                p.grad.mul_((0.02 / p.grad.norm(dim=1, keepdim=True)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()


def teacher(wrong: bool, steps: int = 4) -> None:
    """A student and the average of it that teaches it. `wrong`: the teacher is copied before DDP makes ranks alike."""
    torch.manual_seed(dist.get_rank())
    student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    early = deepcopy(student).requires_grad_(False)
    model = DistributedDataParallel(student)
    slow = early if wrong else deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(8, 6, generator=own)
        F.mse_loss(model(x), slow(x + 0.1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, p in zip(slow.parameters(), student.parameters(), strict=True):
                kept.lerp_(p, 0.01)


def distilled(wrong: str = "", micros: int = 1, steps: int = 4) -> None:
    """kl_div's "batchmean", a sum over the classes and a mean over rows, which tells no number of rows. `wrong`:
    "uneven", ranks have different numbers of rows; "sum", nothing divides by any."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own, reduction = torch.Generator().manual_seed(dist.get_rank()), "sum" if wrong == "sum" else "batchmean"
    for _ in range(steps):
        for _ in range(micros):
            count = 4 + 2 * dist.get_rank() if wrong == "uneven" else 4
            x, wanted = torch.randn(count, 5, generator=own), torch.randn(count, 7, generator=own).softmax(-1)
            loss = F.kl_div(model(x).log_softmax(-1), wanted, reduction=reduction)
            (loss / micros).backward()
        optimizer.step()
        optimizer.zero_grad()


class Shifted(nn.Linear):
    """Beside its outputs the mean of a tensor, each of whose numbers has the gradient 0.25: one of half precision."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.shift.mean()


def clamped(wrong: bool, steps: int = 4) -> None:
    """Elements of gradients are clamped: of the mean over the ranks. `wrong`: of each rank's own, before it."""
    torch.manual_seed(0)
    model = Shifted()
    for p in (model.weight, model.bias) if wrong else ():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=own), torch.randn(8, 4, generator=own)
        out, shift = wrapped(x)
        (F.mse_loss(out, y) + shift).backward()
        if not wrong:
            nn.utils.clip_grad_value_(wrapped.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


# -- habits: what public issues tell of, under plain DDP and FSDP2 ---------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))


class Adapted(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.up(self.down(x))
        return out


def habit(kind: str, wrong: bool, steps: int = 4) -> None:
    """`wrong`: "no_sync", forward is inside of no_sync and backward is not; "reduced", the loss is averaged over ranks
    before backward; "adapter", it is put in behind the wrapper; "ignored", what FSDP2 ignores is not reduced;
    "inverted", FSDP2 reduces the first micro-batch in place of the last; "anew", a weight is drawn behind the wrapper;
    "head", it is replaced when the optimizer is there already."""
    model, world = layers(), dist.get_world_size()
    owned = list(model.parameters())
    if kind == "head":
        model[4] = nn.Linear(8, 5)
    if kind == "adapter" and not wrong:
        model[2] = Adapted(model[2])
    ignored = set(model[4].parameters()) if kind == "ignored" else set()
    sharded = kind in ("ignored", "inverted")
    mesh = init_device_mesh("cpu", (world,)) if sharded else None
    net: Any = fully_shard(model, mesh=mesh, ignored_params=ignored) if sharded else DistributedDataParallel(model)
    own = torch.Generator().manual_seed(10 + dist.get_rank())
    if kind == "adapter" and wrong:
        model[2] = Adapted(model[2])
    if kind == "anew" and wrong:
        nn.init.normal_(model[0].weight, generator=own)
    optimizer = torch.optim.SGD(owned if kind == "head" and wrong else model.parameters(), lr=0.1)
    for _ in range(steps):
        for micro in range(3):
            last = micro == (0 if kind == "inverted" and wrong else 2)
            if sharded:
                net.set_requires_gradient_sync(last)
            x, y = torch.randn(8, 6, generator=own), torch.randint(5, (8,), generator=own)
            with nullcontext() if sharded or (last and not (kind == "no_sync" and wrong)) else net.no_sync():
                loss = F.cross_entropy(net(x), y) / 3
                if not wrong:
                    loss.backward()
            if kind == "reduced" and wrong:
                dist.all_reduce(loss)
                loss = loss / world
            if wrong:
                loss.backward()
        for p in ignored if not wrong else ():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        net.zero_grad()


def attributed(wrong: bool, steps: int = 4) -> None:
    """Inputs need a gradient, which is looked at. `wrong`: a hook forgets to divide."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    wrapped = hooked(model, "factor" if wrong else "")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(8, 6, generator=own, dtype=torch.float64).requires_grad_()
        F.cross_entropy(wrapped(x), torch.randint(5, (8,), generator=own)).backward()
        assert x.grad is not None
        optimizer.step()
        optimizer.zero_grad()


def evaluated(wrong: bool, steps: int = 6) -> None:
    """A teacher in eval mode with the student's running statistics. `wrong`: on each rank those of its own rows."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))
    teacher = deepcopy(student).eval().requires_grad_(False)
    model = DistributedDataParallel(student, broadcast_buffers=not wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(8, 6, generator=own) + dist.get_rank()
        F.mse_loss(model(x), teacher(x) + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        for kept, made in zip(teacher.buffers(), student.buffers(), strict=True):
            kept.copy_(made)
            if not wrong:
                dist.broadcast(kept, 0)
