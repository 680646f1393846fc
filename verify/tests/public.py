"""Programs in the forms of public libraries that were misjudged in the survey (docs/survey.md); test_public.py judges
them.

Each has a right and a wrong form. They run on every rank of a world under Capture (field.watched), or beside one device
(test_beside.py's fixture).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .field import rows, seeded, train


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 5)))


def clip_rows(model: nn.Module) -> None:
    """Adaptive clipping, as timm's: no row of a gradient is larger than a share of its row of weights."""
    for parameter in model.parameters():
        gradient, weight = (t.detach().reshape(len(t), -1) for t in (parameter.grad, parameter))
        most = 0.01 * weight.norm(dim=1, keepdim=True).clamp_min(1e-3)
        factor = (most / gradient.norm(dim=1, keepdim=True).clamp_min(1e-6)).clamp_max(1)
        parameter.grad.detach().copy_((gradient * factor).view_as(parameter))


def own_changes(kind: str) -> None:
    """DDP, and what the program does to gradients itself before the step: "rows" clips them row by row, "noise" adds
    some, "mask" takes some out. Wrong: "half" divides one tensor by the number of ranks once more; "cut" is zero."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(rows(7, 6, seed=step)).square().mean().backward()
        first = model.module[0].weight.grad
        if kind == "rows":
            clip_rows(model)
        elif kind == "noise":
            first.add_(rows(*first.shape, seed=step + 70, own=False))
        elif kind == "mask":
            first[::2] = 0
        elif kind == "half":
            first.copy_(first / dist.get_world_size())
        elif kind == "cut":
            first.zero_()
        optimizer.step()
        optimizer.zero_grad()


def copied_back(accumulate: int = 2) -> None:
    """No DDP: micro-batches are added in a buffer of the program's own, summed there, and copied into .grad."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        kept = [torch.zeros_like(p) for p in model.parameters()]
        for micro in range(accumulate):
            model(rows(7, 6, seed=10 * step + micro)).square().mean().backward()
            for part, parameter in zip(kept, model.parameters(), strict=True):
                part.add_(parameter.grad)
                if micro < accumulate - 1:
                    parameter.grad = None
        flat = torch.cat([t.flatten() for t in kept])
        dist.all_reduce(flat)
        for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in kept]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        optimizer.zero_grad()


class Faint(nn.Module):
    """A shift that hardly reaches the loss: its gradient is rounding beside the others', as a key bias's is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(6, 5), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1e-9 * self.shift


def half_precision_hook(cut: bool) -> None:
    """DDP that sums in fp16, which makes the faintest gradient zero. `cut`: a strong one is made zero as well."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Faint())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(rows(7, 6, seed=step).float()).square().mean().backward()
        if cut:
            model.module.inner.bias.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(5, 4), nn.Linear(6, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def accumulated_pairs(right: bool) -> None:
    """Contrastive accumulation as open_clip's loop does it: features of all micro-batches are computed without a graph,
    then each micro-batch computes the whole loss with its own features. Right: the temperature learns from one."""
    model = DistributedDataParallel(seeded(Two))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        micros = [(rows(4, 5, seed=10 * step + i), rows(4, 6, seed=10 * step + i + 50)) for i in range(3)]
        with torch.no_grad():
            kept = [model(*micro)[:2] for micro in micros]
        for i, micro in enumerate(micros):
            image, text, scale = model(*micro)
            images, texts = (
                torch.cat([own if j == i else one[side] for j, one in enumerate(kept)])
                for side, own in enumerate((image, text))
            )
            logits = (scale.detach() + 0 * scale if right and i else scale) * images @ texts.T
            F.cross_entropy(logits, torch.arange(len(logits))).backward()
        optimizer.step()
        optimizer.zero_grad()


class Gathered(nn.Module):
    """A model whose loss is inside, and sees the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text, scale = self.two(image, text)
        everyone = torch.cat(dist_nn.all_gather(text)) if dist.get_world_size() > 1 else text
        labels = torch.arange(len(image)) + dist.get_rank() * len(image)
        return F.cross_entropy(scale * image @ everyone.T, labels)


def loss_inside(right: bool) -> None:
    """The loss joins the rows of all ranks inside of the module that is called. Wrong: its backward counts by half."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient / dist.get_world_size()

    model = DistributedDataParallel(seeded(Gathered))

    def loss(step: int) -> Tensor:
        value: Tensor = model(rows(4, 5, seed=step), rows(4, 6, seed=step + 50))
        return value if right else Half.apply(value)

    train(model, loss)


def cached(scaled: bool) -> None:
    """GradCache: representations of all chunks without a graph, the gradient of the loss over the rows of all ranks to
    this rank's, and each chunk once more with a graph. DDP averages, so the loss is to be `scaled` by the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def everyone(own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own)
        parts[rank] = own
        return torch.cat(parts)

    for step in range(4):
        sides = [rows(6, 6, seed=step + start).split(2) for start in (0, 50)]
        with torch.no_grad():
            kept = [torch.cat([model(chunk) for chunk in side]) for side in sides]
        kept = [side.requires_grad_() for side in kept]
        logits = everyone(kept[0]) @ everyone(kept[1]).T
        (F.cross_entropy(logits, torch.arange(len(logits))) * (world if scaled else 1)).backward()
        each = [(c, g) for side, k in zip(sides, kept, strict=True) for c, g in zip(side, k.grad.chunk(3), strict=True)]
        for i, (chunk, gradient) in enumerate(each):
            model.require_backward_grad_sync = i == len(each) - 1
            torch.dot(model(chunk).flatten(), gradient.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_closure(wrong: bool) -> None:
    """Every step is given a closure, as by Lightning. Wrong: twice the gradient."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(rows(7, 6, seed=step)).square().mean()
            (loss * (dist.get_world_size() if wrong else 1)).backward()
            return loss

        optimizer.step(closure)


def sharded_twice(wrong: bool) -> None:
    """Tensor parallel over pairs of ranks, FSDP2 over the other pairs: rows are cut twice. Wrong: each data rank's loss
    is divided by its own number of rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = seeded(lambda: nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    words = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], {"0": words, "1": ColwiseParallel(), "3": RowwiseParallel()})
    for child in (model[0], model[1], model[3], model):
        fully_shard(child, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = mesh["data"].get_local_rank()
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + data)
        x = torch.randint(8, (5 + 3 * data,), generator=generator)
        labels = torch.arange(len(x)) % 4
        loss = F.cross_entropy(model(x), labels, reduction="mean" if wrong else "sum")
        (loss if wrong else loss * 2 / 13).backward()
        optimizer.step()
        optimizer.zero_grad()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        return self.head(torch.tanh(x)) if self.head is not None else x


def piped(scale: bool) -> None:
    """torch's pipelining over as many stages as there are ranks; unscaled, nobody divides by the micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Words)
    if rank:
        model.embed = None
    if rank < world - 1:
        model.head = None
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.cross_entropy, scale_grads=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        words, labels = torch.randint(9, (2, 6), generator=generator)
        schedule.step(*([words] if rank == 0 else []), **({"target": labels} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
