"""Small programs as their users write them, from the issue's survey of public training code: one function per program.

Each runs on every rank of a world under Capture (see `watched`); `test_field.py` says what the verifier must say of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import isograd_verify
from isograd_verify.watch.capture import Capture

Program = Callable[..., None]


def watched(program: Program, directory: str, *args: Any) -> None:
    """One rank of a program, watched for two steps; an error of the watcher's own is told, as in `verify run`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Capture(directory, steps=2, lenient=True):
        program(*args)


def rows(*shape: int, seed: int = 0, own: bool = True) -> Tensor:
    """Random numbers; `own`: this rank's, which differ from the other ranks'."""
    generator = torch.Generator().manual_seed(100 * seed + (dist.get_rank() if own else 0))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def train(model: nn.Module, loss_of: Callable[[int], Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- data parallel -----------------------------------------------------------------------------------------------


def first_output() -> None:
    """DDP whose loss gives the bias the same gradient on every rank: 1 / rows for each of the rows."""
    model = DistributedDataParallel(seeded(lambda: nn.Linear(3, 4)))
    train(model, lambda step: model(rows(5, 3, seed=step))[:, 0].mean())


def lbfgs() -> None:
    """DDP with LBFGS, whose closure runs forward and backward inside the optimizer's step, several times."""
    model = DistributedDataParallel(seeded(lambda: nn.Linear(3, 2)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(3):
        x, y = rows(6, 3, seed=step), rows(6, 2, seed=step + 50)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def closure_unreduced() -> None:
    """An optimizer with a closure, and nobody sums the gradients."""
    model = seeded(lambda: nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = rows(6, 3, seed=step)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            dist.all_reduce(loss.detach())
            return loss

        optimizer.step(closure)


def policy_gradient() -> None:
    """A negated mean: minus the mean of advantage times log-probability."""
    model = DistributedDataParallel(seeded(lambda: nn.Linear(3, 4)))

    def loss(step: int) -> Tensor:
        chosen = F.log_softmax(model(rows(5, 3, seed=step)), -1)[:, 1]
        return -(chosen * rows(5, seed=step + 50)).mean()

    train(model, loss)


def dropped(own_seed: bool) -> None:
    """Dropout on data ranks. One seed on all of them, and they drop the same elements of different rows."""
    model = DistributedDataParallel(seeded(lambda: nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.3), nn.Linear(30, 1))))
    torch.manual_seed(7 + (dist.get_rank() if own_seed else 0))
    train(model, lambda step: model(rows(5, 3, seed=step)).square().mean())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.extra = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.value(y), self.extra(y).mean()


def unused_mean() -> None:
    """find_unused_parameters, and a mean that is computed and never used."""
    model = DistributedDataParallel(seeded(Heads), find_unused_parameters=True)
    train(model, lambda step: model(rows(5, 3, seed=step))[0].square().mean())


def masked_terms() -> None:
    """As TRL's losses: masked sums by the mask's sum, negated logsigmoids, a clamp, metrics beside the loss."""
    model = DistributedDataParallel(seeded(lambda: nn.Linear(3, 4)))

    def loss(step: int) -> Tensor:
        logps = F.log_softmax(model(rows(5, 3, seed=step)), -1).gather(1, torch.zeros(5, 1, dtype=torch.long)).squeeze()
        mask = torch.ones(5, dtype=torch.float64)
        ratio = torch.exp(logps - logps.detach())
        policy = -torch.min(ratio, torch.clamp(ratio, 0.8, 1.2)) * rows(5, seed=step + 9)
        preference = -F.logsigmoid(0.1 * (logps[:2] - logps[2:4])).mean()
        chosen = -logps.sum() / mask.sum()
        (-logps).mean().item()
        return ((policy * mask).sum() / mask.sum().clamp(min=1.0)) + preference + 0.1 * chosen.neg().neg()

    train(model, loss)


class Fused(torch.autograd.Function):
    """The sum of a cross-entropy over valid labels, with its backward, as fused kernels have it: torch sees no loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        valid = labels != -100
        chosen = torch.zeros_like(logits).scatter(1, labels.clamp(min=0)[:, None], 1.0) * valid[:, None]
        ctx.save_for_backward(logits.softmax(-1) * valid[:, None] - chosen)
        return -(logits.log_softmax(-1) * chosen).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradient, None


def fused(weighed: bool, own_count: bool) -> None:
    """A loss that only its program can count. `weighed`: it says so in one line. `own_count`: a mean of means."""
    model = DistributedDataParallel(seeded(lambda: nn.Linear(3, 5)))
    rank, world = dist.get_rank(), dist.get_world_size()

    def loss(step: int) -> Tensor:
        labels = torch.arange(7) % 5
        labels[: 2 + 3 * rank] = -100
        count = (labels != -100).sum().double()
        total = Fused.apply(model(rows(7, 3, seed=step)), labels)
        if weighed:
            total = isograd_verify.weigh(total, count, reduction="sum")
        everyone = count.clone()
        dist.all_reduce(everyone)
        scale = 1.7 / count if own_count else 1.7 * world / everyone  # no whole number divides
        return total * scale

    train(model, loss)


def by_hand(own_count: bool, form: str) -> None:
    """log_softmax and gather, a mask, and a division in one of the ways in which programs write it."""
    model = DistributedDataParallel(seeded(lambda: nn.Linear(3, 5)))
    rank, world = dist.get_rank(), dist.get_world_size()

    def loss(step: int) -> Tensor:
        labels = torch.arange(7) % 5
        mask = (torch.arange(7) >= 2 + 3 * rank).double()
        chosen = F.log_softmax(model(rows(7, 3, seed=step)), -1).gather(1, labels[:, None])[:, 0]
        everyone = mask.sum()
        dist.all_reduce(everyone)
        total, count = -(chosen * mask).sum(), mask.sum() if own_count else everyone / world
        if form == "times the inverse":
            return total * (1 / float(count)) if own_count else total * (1 / float(everyone)) * world
        if form == "cast":
            return (total.float() / (count if own_count else everyone)).double() * (1 if own_count else world)
        return total / count if own_count else total / everyone * world

    train(model, loss)


# -- contrastive: open_clip's losses -----------------------------------------------------------------------------


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(5, 4), nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.logit_scale.exp()


def gathered(x: Tensor, with_grad: bool) -> Tensor:
    if with_grad:
        return torch.cat(dist_nn.all_gather(x))
    pieces = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x)
    pieces[dist.get_rank()] = x
    return torch.cat(pieces)


def open_clip(with_grad: bool, scaled: bool = False) -> None:
    """open_clip's loss over all rows on every rank. Without gather_with_grad, its default, encoders get half of their
    gradient on two ranks. `scaled`: that factor is put back by the program."""
    model = DistributedDataParallel(seeded(Clip))

    def loss(step: int) -> Tensor:
        image, text, scale = model(rows(3, 5, seed=step), rows(3, 6, seed=step + 50))
        logits = scale * gathered(image, with_grad) @ gathered(text, with_grad).T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss(step).backward()
        if scaled:
            for name, parameter in model.named_parameters():
                if "logit_scale" not in name:
                    parameter.grad.mul_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()


# -- tensor parallel ---------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens))).flatten(0, 1)


def words(vocabulary: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(vocabulary, (3, 8), generator=generator)
    return text[:, :-1], text[:, 1:].flatten()


def column_parallel(vocabulary: int, output: str = "whole") -> None:
    """DTensor's column-parallel head over two ranks. `output`: 'whole' logits; 'loss_parallel'; or 'log_softmax',
    label smoothing by hand inside loss_parallel, which takes log_softmax's backward away: wrong."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = seeded(lambda: Words(vocabulary))
    if output == "whole":
        from torch.distributed.tensor import Replicate

        plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    else:
        plan = {"head": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = words(vocabulary, step)
        if output == "loss_parallel":
            with loss_parallel():
                F.cross_entropy(model(tokens), labels).backward()
        elif output == "log_softmax":
            with loss_parallel():
                chosen = F.log_softmax(model(tokens), -1)
                (F.nll_loss(chosen, labels) - 0.1 * chosen.mean()).backward()
        else:
            F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def words_alone(vocabulary: int) -> None:
    """One device's run of `column_parallel`."""
    model = seeded(lambda: Words(vocabulary))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = words(vocabulary, step)
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- torch.distributed.pipelining --------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.add_module(f"layer{index}", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def pipeline(steps_of_schedule: int = 1, scale: bool = True) -> None:
    """Two stages and GPipe. With two calls of the schedule per optimizer step, scale_grads divides the gradients of
    the first call twice."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = [Stage(0).double(), Stage(1).double()]
    model = whole[rank]
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss, scale_grads=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for call in range(steps_of_schedule):
            x, y = rows(4, 4, seed=10 * step + call, own=False), rows(4, 4, seed=10 * step + call + 500, own=False)
            schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()


def zero_bubble(wrong: bool) -> None:
    """Two stages on each of two ranks, and data-parallel copies of both: all stages give their parameters the same
    names. Wrong: the last stage's weight is not summed over its copies."""
    mesh, data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), dist.get_rank() % 2
    first = dist.get_rank() // 2
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(4)]
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    stages = [PipelineStage(parts[i], i, 4, cpu, group=group) for i in (first, first + 2)]
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=F.mse_loss)
    mine = [p for i in (first, first + 2) for p in parts[i].parameters()]
    optimizer = torch.optim.SGD(mine, lr=0.1)
    for step in range(3):
        x, y = (torch.randn(8, 4, dtype=torch.float64, generator=seed(10 * step + k + 2 * data)) for k in (0, 1))
        schedule.step(x) if first == 0 else schedule.step(target=y)
        for p in mine:
            if not (wrong and p is parts[3][0].weight):
                dist.all_reduce(p.grad, group=mesh["dp"].get_group())
                p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()


def stages_by_hand(wrong: str = "") -> None:
    """Two stages, two micro-batches and plain sends. Wrong: "order", what comes back is taken for the other
    micro-batch's, or "doubled"; "undivided", by the number of micro-batches; "joined", the loss takes something of the
    other rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)  # both stages begin with the same weights
    stage = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()).double()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for step in range(3):
        x, y = (torch.randn(8, 4, dtype=torch.float64, generator=seed(10 * step + k)).chunk(2) for k in (0, 1))
        if rank == 0:
            made = [stage(part) for part in x]
            for one in made:
                dist.send(one.detach(), 1)
            for one in made[:: -1 if wrong == "order" else 1]:
                came = torch.empty_like(one)
                dist.recv(came, 1)
                one.backward(2 * came if wrong == "doubled" else came)
        given = [torch.empty(4, 4, dtype=torch.float64) for _ in range(2 * rank)]
        for number, one in enumerate(given):
            dist.recv(one, 0)
            made_last = stage(one.requires_grad_())
            if wrong == "joined":
                dist.broadcast(torch.ones(1), 1, group=dist.new_group([1]))
            (F.mse_loss(made_last, y[number]) / (1 if wrong == "undivided" else 2)).backward()
        for one in given:
            dist.send(one.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def pipeline_of_labels(own_count: bool) -> None:
    """Two stages; the second micro-batch has one label fewer than the first."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = [Stage(0).double(), Stage(1).double()][rank]
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) if own_count else F.cross_entropy(logits, labels, reduction="sum") / 3

    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss, scale_grads=own_count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = rows(4, 4, seed=10 * step, own=False)
        schedule.step(x) if rank == 0 else schedule.step(target=torch.tensor([0, 1, 2, -100]))
        optimizer.step()
        optimizer.zero_grad()


def pipeline_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Stage(0), Stage(1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = rows(4, 4, seed=10 * step, own=False), rows(4, 4, seed=10 * step + 500, own=False)
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.mse_loss(model(a), b) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
