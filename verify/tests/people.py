"""Training loops in the forms in which people write them around torch.distributed, right ones and wrong ones. None of
the corpus and of the survey has these forms. test_people.py says what the verifier must say of each.

They run on every rank of a world under Capture (field.watched), or beside one device (test_beside.py's fixture).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from .field import rows

VOCAB, LENGTH, WIDTH = 29, 7, 8


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.extra: nn.Module | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = x if self.extra is None else x + self.extra(x)
        y = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.head(x + y).flatten(0, 1)


def net(recompute: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(recompute)


def text(number: int, count: int = 3) -> tuple[Tensor, Tensor]:
    """This rank's rows of a micro-batch, and their labels."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    ids = torch.randint(VOCAB, (count, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:].flatten()


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


# -- data parallel, by DDP ---------------------------------------------------------------------------------------


def everything_at_once() -> None:
    """Frozen embeddings, a block that is computed once more in backward, groups with and without decay, fused AdamW,
    clipping by value, a scheduler, and two averages of the weights: torch's, and one by hand."""
    model = net(recompute=True)
    model.embed.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(4):
        tokens, labels = text(step)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(wrapped(tokens), labels).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        with torch.no_grad():
            for kept, parameter in zip(by_hand.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)


def uneven_windows(divide_by_real: bool = True) -> None:
    """Five micro-batches an epoch in windows of two: the last window has one. Wrong: it is divided by two as well."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        micros = [text(10 * epoch + i) for i in range(3)]
        for start in range(0, 3, 2):
            window = micros[start : start + 2]
            for i, (tokens, labels) in enumerate(window):
                with model.no_sync() if i < len(window) - 1 else nullcontext():
                    loss = F.cross_entropy(model(tokens), labels)
                    (loss / (len(window) if divide_by_real else 2)).backward()
            optimizer.step()
            optimizer.zero_grad()


def scaled(fused: bool = False) -> None:
    """Autocast and a gradient scaler, with the usual unscale, clip and step."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        tokens, labels = text(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(tokens).float(), labels)
        scaler.scale(loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Counting(Net):
    """Returns the loss, divided by a count that it is given, and the logits, as models of transformers do."""

    def forward(self, tokens: Tensor, labels: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
        logits = super().forward(tokens)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count, logits


def counted(of: str = "all") -> None:
    """The Trainer's way: the labels of all ranks are counted before the model is called. `of`: "number", a count that
    is no tensor; "own", wrong, this rank's labels."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        tokens, labels = text(step, 2 + dist.get_rank())
        count = torch.tensor(labels.numel())
        scale = 1
        if of != "own":
            dist.all_reduce(count)
            scale = dist.get_world_size()
        loss, _ = model(tokens, labels.view_as(tokens), int(count) if of == "number" else count)
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0]


def times_world(model: nn.Module) -> None:
    """A mean over ranks is made a sum."""
    for parameter in model.parameters():
        parameter.grad.mul_(dist.get_world_size())


def adversaries(wrong: str = "") -> None:
    """A generator and a critic with a gradient penalty, each with an optimizer and a DDP of its own. `wrong`: "critic"
    or "generator", whose gradients are summed."""
    torch.manual_seed(0)
    maker, judge = (DistributedDataParallel(m.double()) for m in (Generator(), Critic()))
    of_maker, of_judge = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for m in (maker, judge))
    for step in range(4):
        real, noise = rows(5, 6, seed=step), rows(5, 4, seed=step + 50)
        fake = maker(noise).detach()
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        scores = judge(torch.cat([real, fake, between]))
        (slope,) = torch.autograd.grad(scores[10:].sum(), between, create_graph=True)
        of_judge.zero_grad()
        (scores[5:10].mean() - scores[:5].mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        if wrong == "critic":
            times_world(judge)
        of_judge.step()
        of_maker.zero_grad()
        (-judge(maker(noise)).mean()).backward()
        if wrong == "generator":
            times_world(maker)
        of_maker.step()


def forgers(wrong: str = "", together: bool = False) -> None:
    """A generator whose outputs are made once, judged without their graph and then with it. `together`: both losses of
    the discriminator in one backward. `wrong`: as above, or "outside", a discriminator without a wrapper."""
    torch.manual_seed(0)
    inner = Critic().double()
    maker = DistributedDataParallel(Generator().double())
    judge = inner if wrong == "outside" else DistributedDataParallel(inner, broadcast_buffers=False)
    of_maker, of_judge = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (maker, judge))
    for step in range(8):
        real, fake = rows(5, 6, seed=step), maker(rows(5, 4, seed=step + 50))
        yes, no = fake.new_ones(5), fake.new_zeros(5)
        of_judge.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(real), yes)
        if not together:
            loss.backward()
        other = F.binary_cross_entropy_with_logits(judge(fake.detach()), no)
        (loss + other if together else other).backward()
        if wrong == "critic":
            times_world(judge)
        of_judge.step()
        of_maker.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), yes).backward()
        if wrong == "generator":
            times_world(maker)
        of_maker.step()


def clipped(order: str, by: str = "norm", scale: float = 1024.0) -> None:
    """A gradient scaler and a clip. `order`: "first", unscale_ and then the clip; wrong: "late", the other way round,
    and "never", unscale_ in the scaler's step. "times", right: the bound is multiplied by the scale; "small", right: no
    gradient comes to the bound; "two", right: another optimizer's gradients are unscaled behind the clip."""
    model, other = DistributedDataParallel(net()), DistributedDataParallel(nn.Linear(3, 1))
    optimizer, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(3):
        tokens, labels = text(step)
        scaler.scale(F.cross_entropy(model(tokens), labels)).backward()
        if order == "two":
            scaler.scale(other(torch.ones(2, 3) + dist.get_rank()).square().mean()).backward()
        if order in ("first", "two"):
            scaler.unscale_(optimizer)
        bound = 0.01 * (scaler.get_scale() if order == "times" else 1e9 if order == "small" else 1.0)
        if by == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        else:
            nn.utils.clip_grad_value_(model.parameters(), bound)
        if order == "late":
            scaler.unscale_(optimizer)
        if order == "two":
            scaler.unscale_(second)
            scaler.step(second)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        second.zero_grad()


def teacher() -> None:
    """A student that follows the average of itself (BYOL, DINO), with two views of its rows."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    follower = copy.deepcopy(student).requires_grad_(False)
    wrapped = DistributedDataParallel(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(3):
        one, two = rows(5, 6, seed=step), rows(5, 6, seed=step + 50)
        with torch.no_grad():
            wanted = F.normalize(follower(two), dim=-1)
        loss = (2 - 2 * (F.normalize(wrapped(one), dim=-1) * wanted).sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(follower.parameters(), student.parameters(), strict=True):
                kept.mul_(0.99).add_(parameter, alpha=0.01)


def late_layer() -> None:
    """Wrong: a layer is added when DDP has taken down already which parameters there are."""
    model = DistributedDataParallel(net())
    torch.manual_seed(1)
    model.module.extra = nn.Linear(WIDTH, WIDTH)
    descend(model)


def unfrozen_later(wrong: bool = True) -> None:
    """The block learns from the second step on. Wrong: it is frozen when DDP is made."""
    model = net()
    wrapped = None if wrong else DistributedDataParallel(model, find_unused_parameters=True)
    model.block.requires_grad_(False)
    wrapped = wrapped or DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            model.block.requires_grad_(True)
        tokens, labels = text(step)
        F.cross_entropy(wrapped(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def descend(model: nn.Module, wrong: str = "") -> None:
    """Wrong: "reduced" reduces the loss in place, for the log, before its backward; "inside" leaves no_sync between
    forward, where DDP looks, and backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = text(step)
        with model.no_sync() if wrong == "inside" else nullcontext():
            loss = F.cross_entropy(model(tokens), labels)
        if wrong == "reduced":
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_reduced_in_place() -> None:
    descend(DistributedDataParallel(net()), "reduced")


def forward_inside_no_sync() -> None:
    descend(DistributedDataParallel(net()), "inside")


# -- data parallel, by hand --------------------------------------------------------------------------------------


def overlapped() -> None:
    """Each gradient is summed as soon as it is there, by a hook behind its accumulation; the step waits for all."""
    model = net()
    waiting: list[Any] = []

    def send(parameter: Tensor) -> None:
        parameter.grad.div_(dist.get_world_size())
        waiting.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
        parameter.register_post_accumulate_grad_hook(send)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        for work in waiting:
            work.wait()
        waiting.clear()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Divided(torch.optim.Optimizer):
    """Sums gradients inside its step: rows of a matrix go to their owner, who updates them; small tensors are summed
    everywhere. `forgotten`: wrong, the small ones are not summed."""

    def __init__(self, params: Any, lr: float, forgotten: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.forgotten = forgotten

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() > 1 and len(p) % world == 0:
                    mine = torch.empty_like(p.grad[: len(p) // world])
                    dist.reduce_scatter_tensor(mine, p.grad.contiguous())
                    part = p[rank * len(mine) : (rank + 1) * len(mine)]
                    part.add_(mine.div_(world), alpha=-group["lr"])
                    dist.all_gather_into_tensor(p, part.clone())
                else:
                    if not self.forgotten:
                        dist.all_reduce(p.grad)
                    p.add_(p.grad, alpha=-group["lr"] / world)


def reduced_inside_step(forgotten: bool = False) -> None:
    model = net()
    optimizer = Divided(model.parameters(), 0.1, forgotten)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def flat_shards() -> None:
    """ZeRO 1 by hand: one flat gradient is scattered, each rank steps its part of the weights, which are gathered."""
    model = net()
    parameters, rank, world = list(model.parameters()), dist.get_rank(), dist.get_world_size()
    size = sum(p.numel() for p in parameters)
    each = -(-size // world)

    def flat(tensors: list[Tensor]) -> Tensor:
        return F.pad(torch.cat([t.flatten() for t in tensors]), (0, each * world - size))

    mine = nn.Parameter(flat([p.detach() for p in parameters]).chunk(world)[rank].clone())
    optimizer = torch.optim.AdamW([mine], lr=1e-3)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter_tensor(mine.grad, flat([p.grad for p in parameters]))
        mine.grad.div_(world)
        optimizer.step()
        whole = torch.empty(each * world)
        dist.all_gather_into_tensor(whole, mine.detach())
        with torch.no_grad():
            for parameter, part in zip(parameters, whole[:size].split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))
                parameter.grad = None


def served(forgotten: str = "") -> None:
    """Rank 0 adds up all gradients and steps; the others take its weights. `forgotten`: a parameter that they do not
    take."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, 0)
        if dist.get_rank() == 0:
            for parameter in model.parameters():
                parameter.grad.div_(dist.get_world_size())
            optimizer.step()
        for name, parameter in model.named_parameters():
            if name != forgotten:
                dist.broadcast(parameter.data, 0)
        optimizer.zero_grad()


class Stage(nn.Module):
    """Layers that are numbered from 0 on every rank; their norms begin at ones."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8) if rank == 0 else None
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, VOCAB) if rank == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x if self.head is None else self.head(x)


def stages_by_hand(norm: bool = False) -> None:
    """GPipe by send and recv. norm: stages add up the squares of their gradients."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = Stage(rank)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(3):
        kept = []
        for micro in range(2):
            tokens, labels = text(2 * step + micro)
            x = tokens if rank == 0 else torch.empty(*tokens.shape, 8)
            if rank == 1:
                dist.recv(x, 0)
                x.requires_grad_()
            y = stage(x)
            if rank == 0:
                dist.send(y.detach(), 1)
            kept.append((x, F.cross_entropy(y.flatten(0, -2), labels.flatten()) / 2 if rank else y))
        for x, y in kept:
            if rank == 0:
                gradient = torch.empty_like(y)
                dist.recv(gradient, 1)
                y.backward(gradient)
                continue
            y.backward()
            dist.send(x.grad, 0)
        if norm:
            dist.all_reduce(sum(p.grad.square().sum() for p in stage.parameters()))
        optimizer.step()
        optimizer.zero_grad()
