"""Programs whose bugs begin with step 2 or in one term of the loss, and gradients that are zero but for rounding: each
right and wrong. test_later.py says what the verifier must say of them beside one device."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class DinoLoss(nn.Module):
    """The student's cross-entropy with a teacher's outputs, which are centred by a running mean of them. `wrong`: the
    mean is of this rank's rows."""

    center: Tensor

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.register_buffer("center", torch.zeros(1, 7))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        target = F.softmax((teacher - self.center) / 0.04, -1)
        return -(target * F.log_softmax(student / 0.1, -1)).sum(-1).mean()

    @torch.no_grad()
    def update(self, teacher: Tensor) -> None:
        total, count = teacher.sum(0, keepdim=True), len(teacher)
        if not self.wrong:
            dist.all_reduce(total)
            count *= dist.get_world_size()
        self.center = 0.9 * self.center + 0.1 * total / count


class Wrapped(nn.Module):
    """A student whose output is normalised by a running size of outputs: a buffer inside the wrapped model, which DDP
    makes that of rank 0 everywhere. `wrong`: the size is of this rank's rows."""

    size: Tensor

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.body = wrong, nn.Linear(5, 7)
        self.register_buffer("size", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        out = y / self.size.clone()
        with torch.no_grad():
            square = y.square().mean(0)
            if not self.wrong:
                dist.all_reduce(square)
                square /= dist.get_world_size()
            self.size.mul_(0.9).add_(0.1 * square)
        return out


def own_rows(count: int, size: int, own: torch.Generator) -> Tensor:
    return torch.randn(count, size, generator=own) + dist.get_rank()


def dino(wrong: bool, inside: bool = False, steps: int = 16) -> None:
    """Self-distillation: a teacher that follows the student. `inside`: the center moves before backward."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7))
    teacher = copy.deepcopy(student).requires_grad_(False)
    wrapped, loss_of = DistributedDataParallel(student), DinoLoss(wrong)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = own_rows(4, 5, own)
        noisy = x + 0.1 * torch.randn(4, 5, generator=own)
        wanted = teacher(noisy)
        loss = loss_of(wrapped(x), wanted)
        if inside:
            loss_of.update(wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not inside:
            loss_of.update(wanted)
        with torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)


def centred(wrong: bool, steps: int = 5) -> None:
    """Outputs are taken from a running mean of them, which stands in a variable. `wrong`: of this rank's rows."""
    torch.manual_seed(0)
    model, center = DistributedDataParallel(nn.Linear(5, 7)), torch.zeros(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        out = model(own_rows(4, 5, own))
        (out - center).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = out.detach().mean(0)
        if not wrong:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        center = 0.9 * center + 0.1 * mean


class Recurrent(nn.Module):
    """Each step goes on from the state that the last one left, which belongs to the rows of the batch; a buffer is
    written anew in each."""

    state: Tensor
    mean: Tensor

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 6, batch_first=not first), nn.Linear(6, 3)
        self.register_buffer("state", torch.zeros(1, 4, 6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x, self.state.clone())
        self.state.copy_(state.detach())
        self.mean.copy_(y.detach().flatten(0, 1).mean(0))
        out: Tensor = self.head(y + self.mean)
        return out


def recurrent(first: bool, steps: int = 5) -> None:
    """Right. `first`: the sequence is the first dimension."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Recurrent(first), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(*((7, 4, 5) if first else (4, 7, 5)), generator=own)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def normalised(wrong: bool, steps: int = 16) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Wrapped(wrong))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x, y = own_rows(4, 5, own), torch.randn(4, 7, generator=own)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def weighed(scheduled: bool, steps: int = 16) -> None:
    """Right: the loss's coefficient changes with the steps, by a schedule or by a running size of the loss."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own, size = torch.Generator().manual_seed(dist.get_rank()), torch.ones(1)
    for step in range(steps):
        x, y = own_rows(4, 5, own), torch.randint(7, (4,), generator=own)
        loss = F.cross_entropy(model(x), y)
        (loss * (step + 1) / 8 if scheduled else loss / size[0]).backward()
        now = loss.detach().clone()
        dist.all_reduce(now)
        size.mul_(0.5).add_(0.5 * now / dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()


def sized(labels: bool, wrong: bool, steps: int = 16) -> None:
    """A sum over labels, or of squares, divided by a running number of them in a plain variable. `wrong`: it is made
    from this rank's rows, times the number of ranks."""
    torch.manual_seed(0)
    model, world = DistributedDataParallel(nn.Linear(5, 7)), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, size = torch.Generator().manual_seed(0), 8.0
    for _ in range(steps):
        x, y = torch.randn(7, 5, generator=data), torch.randint(7, (7,), generator=data)
        mine = torch.randperm(7, generator=data).tensor_split(world)[dist.get_rank()]
        x, y, count = x[mine], y[mine], torch.tensor(float(len(mine)))
        total = F.cross_entropy(model(x), y, reduction="sum") if labels else (model(x) - y[:, None]).square().sum()
        (total * world / size).backward()
        optimizer.step()
        optimizer.zero_grad()
        if wrong:
            count *= world
        else:
            dist.all_reduce(count)
        size = 0.5 * size + 0.5 * float(count)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(20, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 20)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens).flatten(0, 1)
        scores = self.router(x).softmax(-1)
        top, chosen = scores.topk(2, -1)
        y = x
        for i, expert in enumerate(self.experts):
            y = y + (top * (chosen == i)).sum(-1, keepdim=True) * expert(x)
        load = F.one_hot(chosen, 4).float().sum(1).mean(0)
        return self.head(y), 4 * (load * scores.mean(0)).sum()


def balanced(wrong: bool, steps: int = 16) -> None:
    """Wrong: the balance loss, a mean on each rank, counts as often as there are ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Experts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        text = torch.randint(20, (5, 7), generator=own)
        logits, balance = model(text[:, :-1])
        times = dist.get_world_size() if wrong else 1
        (F.cross_entropy(logits, text[:, 1:].flatten()) + 0.05 * times * balance).backward()
        optimizer.step()
        optimizer.zero_grad()


def convolutions(wrong: str = "", steps: int = 16) -> None:
    """Biases of convolutions before batch norms, whose true gradient is zero, and one without a batch norm. Wrong:
    "scaled", that one's gradient is multiplied; "apart", the first bias gets another gradient on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    wrapped: Any = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x, y = torch.randn(8, 3, 12, 12, generator=own), torch.randint(5, (8,), generator=own)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        if wrong == "scaled":
            model[6].bias.grad.mul_(2)
        if wrong == "apart":
            model[0].bias.grad.add_(0.01 * dist.get_rank())
        optimizer.step()


class Shift(torch.autograd.Function):
    """Sends to the next rank, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return shifted(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return shifted(gradient, -1)


def shifted(x: Tensor, by: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    got, ours = torch.empty_like(x), x.contiguous()
    pairs = ((dist.isend, ours, rank + by), (dist.irecv, got, rank - by))
    for work in dist.batch_isend_irecv([dist.P2POp(op, t, peer % world) for op, t, peer in pairs]):
        work.wait()
    return got


class Towers(nn.Module):
    """Images and texts, each normalised, and the scale and bias of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.EmbeddingBag(20, 4)
        self.scale, self.bias = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        made = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        return *made, self.scale.exp(), self.bias


def pairs_of(i: Tensor, t: Tensor, scale: Tensor, bias: Tensor, same: bool) -> Tensor:
    sign = 2 * torch.eye(len(i)) - 1 if same else -torch.ones(len(i), len(t))
    return -F.logsigmoid(sign * (scale * i @ t.T + bias)).sum() / len(i)


def ring(detached: bool = False, steps: int = 5) -> None:
    """SigLIP: a rank's images beside the texts of all ranks, which travel around. `detached`: without their graph."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, rank, world = torch.Generator().manual_seed(3), dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        images = torch.randn(12, 6, generator=data).chunk(world)[rank]
        texts = torch.randint(20, (12, 5), generator=data).chunk(world)[rank]
        i, t, scale, bias = model(images, texts)
        loss = pairs_of(i, t, scale, bias, True)
        for _ in range(world - 1):
            t = shifted(t.detach(), 1) if detached else Shift.apply(t)
            loss = loss + pairs_of(i, t, scale, bias, False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Exchange(torch.autograd.Function):
    """Rows go to the rank of their part, and gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return exchanged(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return exchanged(gradient)


def exchanged(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    dist.all_to_all_single(made, x.contiguous())
    return made


class Gated(nn.Module):
    """Rows and their weights travel to another rank, and products back. `wrong`: weights without a graph."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.gate, self.body = wrong, nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate(x).sigmoid()
        away = exchanged(gate) if self.wrong else Exchange.apply(gate)
        return Exchange.apply(Exchange.apply(self.body(x)) * away), gate


def gated(wrong: bool, steps: int = 12) -> None:
    """A router that learns from its balance term alone, because its weights have lost their graph on the way."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Gated(wrong).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        out, gate = model(torch.randn(4, 6, generator=own, dtype=torch.float64))
        (out.square().mean() + 0.01 * gate.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Half(nn.Module):
    """Casts to bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def frequent(wrong: bool, steps: int = 4) -> None:
    """A model in bf16, nine tenths of whose tokens are one. `wrong`: its embedding, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 6), Half(), nn.Linear(6, 30, dtype=torch.bfloat16))
    if wrong:
        model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        ids = torch.randint(30, (1024,), generator=own)
        ids[torch.rand(1024, generator=own) < 0.9] = 7
        loss = F.cross_entropy(model(ids).float(), ids.roll(1))
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


class Centre:
    """A centre of a teacher's outputs in a plain attribute. `late`: there is none before the first update."""

    def __init__(self, wrong: bool, late: bool) -> None:
        self.wrong, self.mean = wrong, None if late else torch.zeros(7)

    @torch.no_grad()
    def update(self, made: Tensor) -> None:
        mean = made.mean(0)
        if not self.wrong:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean


def distilled(wrong: bool, late: bool = False, steps: int = 6) -> None:
    """Self-distillation whose centre no module carries. `wrong`: it is of this rank's rows."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7))
    teacher = copy.deepcopy(student).requires_grad_(False)
    model, centre = DistributedDataParallel(student), Centre(wrong, late)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    store = torch.zeros(64, 6)  # filled row by row, and no statistic
    for step in range(steps):
        x = own_rows(4, 5, own)
        wanted = teacher(x)
        target = ((wanted if centre.mean is None else wanted - centre.mean) / 0.04).softmax(-1)
        loss = -(target * F.log_softmax(model(x) / 0.1, -1)).sum(-1).mean()
        (loss + 0 * store.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        centre.update(wanted)
        store[step] = own_rows(6, 1, own)[:, 0]
