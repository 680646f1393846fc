"""Small forms of programs that a third outside tester wrote, each right and wrong: test_thirteen.py says what must be
said of them, alone and beside one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .testers import Sum, chained
from .twelve import Tasks, Total, own, step_of

WORDS, SMOOTHING = 24, 0.1


def piped_means(wrong: bool, steps: int = 3) -> None:
    """A pipeline whose micro-batches have uneven numbers of labels. `wrong`: each takes the mean of its own."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Embedding(20, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 20)]
    kept = {str(i): layer for i, layer in enumerate(layers) if i * world // 4 == rank}
    model = nn.Sequential()
    for name, layer in kept.items():
        model.add_module(f"layer{name}", layer)
    data, labels = torch.Generator().manual_seed(1), torch.zeros(0)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / ((targets if wrong else labels) >= 0).sum()

    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of, scale_grads=wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        text = torch.randint(20, (4, 9), generator=data)
        labels = text[:, 1:].masked_fill(torch.arange(8) < torch.randint(1, 6, (4, 1), generator=data), -100)
        given = (text[:, :-1],) if rank == 0 else ()
        schedule.step(*given, target=labels) if rank == world - 1 else schedule.step(*given)
        step_of(optimizer)


def scaled_together(wrong: bool, steps: int = 3) -> None:
    """Two optimizers, one gradient scaler and one clip; the program ends behind its last step. `wrong`: the second
    optimizer's gradients still have the scaler's factor in them."""
    torch.manual_seed(0)
    body, head = DistributedDataParallel(nn.Linear(6, 8)), DistributedDataParallel(nn.Linear(8, 5))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (body, head)]
    scaler, data = torch.amp.GradScaler("cpu", init_scale=2.0**12), own()
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
        scaler.scale(F.cross_entropy(head(body(x).tanh()), y)).backward()
        for optimizer in optimizers[: 1 if wrong else 2]:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def clipped_shards(wrong: bool, steps: int = 4) -> None:
    """FSDP2, and a clip by hand of the local shards. `wrong`: by their own norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), own()
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
        F.cross_entropy(model(x), y).backward()
        shards = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
        total = torch.stack([shard.square().sum() for shard in shards]).sum()
        if not wrong:
            dist.all_reduce(total)
        torch._foreach_mul_(shards, torch.clamp(0.1 / total.sqrt(), max=1.0))
        step_of(optimizer)


class Adapted(nn.Module):
    """A row-parallel layer and its adapter. `wrong`: the half that all ranks hold works before the sum over ranks."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        up, down, low = torch.randn(8, 6), torch.randn(6, 8), torch.randn(2, 8)
        self.up = nn.Parameter(up.chunk(world)[rank].clone(), requires_grad=False)
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone(), requires_grad=False)
        self.lora_a = nn.Parameter(low.chunk(world, 1)[rank].clone())
        self.wrong, self.lora_b = wrong, nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(Sum.apply(x) @ self.up.T)
        base, low = h @ self.down.T, h @ self.lora_a.T
        if self.wrong:
            return x + Total.apply(base + low @ self.lora_b.T)  # type: ignore[no-any-return]
        return x + Total.apply(base) + Total.apply(low) @ self.lora_b.T  # type: ignore[no-any-return]


def adapted(wrong: bool, steps: int = 4) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6).requires_grad_(False), Adapted(wrong), nn.Linear(6, 20))
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(20, (4, 9), generator=data)
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        step_of(optimizer)


class Smoothed(torch.autograd.Function):
    """Cross-entropy with label smoothing, of logits that are cut over ranks. `wrong`: smoothed over this rank's words,
    in forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, wrong: bool) -> Tensor:
        size = logits.shape[1]
        local, words = labels - dist.get_rank() * size, size if wrong else WORDS
        outside = (local < 0) | (local >= size)
        local = local.masked_fill(outside, 0)
        picked, total = logits.gather(1, local[:, None])[:, 0].masked_fill(outside, 0), logits.exp().sum(1)
        every, share = logits.sum(1), SMOOTHING * words / (words - 1)
        for one in (picked, total, *([] if wrong else [every])):
            dist.all_reduce(one)
        ctx.save_for_backward(logits.exp() / total[:, None], local, ~outside)
        ctx.share, ctx.words = share, words
        return total.log() - (1 - share) * picked - share * every / words

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        soft, local, inside = ctx.saved_tensors
        soft = soft - ctx.share / ctx.words
        soft[torch.arange(len(soft)), local] -= (1 - ctx.share) * inside.to(soft.dtype)
        return soft * gradient[:, None], None, None


class Vocabulary(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.embed, whole = wrong, nn.Embedding(WORDS, 6), torch.randn(WORDS, 6)
        self.head = nn.Parameter(whole.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = Smoothed.apply(Sum.apply(self.embed(ids)) @ self.head.T, labels, self.wrong)
        return loss.mean()


def smoothed(wrong: bool, steps: int = 4) -> None:
    torch.manual_seed(0)
    model = Vocabulary(wrong)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(WORDS, (41,), generator=data)
        model(text[:-1], text[1:]).backward()
        step_of(optimizer)


class Stage(nn.Module):
    """One of two stages, with the embedding on both. Each numbers its layers from 0; their norms begin at ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rank, world = dist.get_rank(), dist.get_world_size()
        layers = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(2)]
        self.embed, self.first, self.last = nn.Embedding(20, 6), rank == 0, rank == world - 1
        self.layers = nn.ModuleList(layers[rank * 2 // world : (rank + 1) * 2 // world])
        self.norm = nn.LayerNorm(6) if self.last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.first else x
        for layer in self.layers:
            x = x + layer(x)
        return x if self.norm is None else F.linear(self.norm(x), self.embed.weight)


def tied(wrong: bool, steps: int = 4) -> None:
    """A pipeline whose embedding is its head. `wrong`: its gradient is summed behind each micro-batch."""
    stage = Stage()
    optimizer, data = torch.optim.SGD(stage.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    for _ in range(steps):
        for micro, text in enumerate(torch.randint(20, (4, 9), generator=data).chunk(2)):
            chained(stage, text, 2)
            if wrong or micro == 1:
                dist.all_reduce(stage.embed.weight.grad)
        step_of(optimizer)


def turns(wrong: bool, steps: int = 4) -> None:
    """Two tasks with one buffer for all gradients; a rank computes those whose turn it is. `wrong`: the buffer leaves
    out those that are None."""
    torch.manual_seed(0)
    model, data, world = Tasks(), torch.Generator().manual_seed(1), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows = [(torch.randn(5, 6, generator=data), torch.randint(3, (5,), generator=data)) for _ in range(2)]
        for task, (x, y) in enumerate(rows):
            if task % world == (dist.get_rank() + step) % world:
                F.cross_entropy(model(x, "ab"[task]), y).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and not wrong else p.grad
        held = [p.grad for p in model.parameters() if p.grad is not None]
        buffer = torch.cat([gradient.flatten() for gradient in held])
        dist.all_reduce(buffer)
        buffer /= 2
        for gradient, part in zip(held, buffer.split([g.numel() for g in held]), strict=True):
            gradient.copy_(part.view_as(gradient))
        step_of(optimizer)


def budgeted(wrong: bool, steps: int = 3) -> None:
    """Ranks have as many micro-batches as their rows need, and sum their gradients once. `wrong`: each rank divides by
    the number of its own labels."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)), own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        micros = [torch.randint(20, (2, 4 + n), generator=data) for n in range(1 + 2 * dist.get_rank() + step % 2)]
        count = torch.tensor(float(sum(text[:, 1:].numel() for text in micros)))
        if not wrong:
            dist.all_reduce(count)
        for text in micros:
            logits, labels = model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
            (F.cross_entropy(logits, labels, reduction="sum") / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        step_of(optimizer)
