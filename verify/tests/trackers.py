"""Programs in the forms of public trackers and libraries (issue 42), each wrong or right by its arguments.

They run on every rank of a world under Capture (field.watched), or beside one device (test_beside.py's fixture);
test_trackers.py says what the verifier must say of each. Patterns of libraries that tests do not install (fairscale,
DeepSpeed) are written in plain torch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .field import Clip, rows, seeded
from .people import VOCAB, WIDTH, net, text


def mlp(seed: int = 0, inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def averaged(parameters: Any) -> None:
    """Every gradient, averaged over all ranks."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# -- each rank steps its own parameters ----------------------------------------------------------------------------


def sharded_ddp(unreduced: str = "") -> None:
    """fairscale's ShardedDDP with OSS: two micro-batches, the first under no_sync; each gradient goes to its owner and
    is set to None elsewhere; owners step and broadcast. `unreduced`: a parameter whose owner keeps its own part."""
    model, rank, world = mlp(), dist.get_rank(), dist.get_world_size()
    named = list(model.named_parameters())
    owner = {name: i % world for i, (name, _) in enumerate(named)}
    optimizer = torch.optim.SGD([p for n, p in named if owner[n] == rank], lr=0.1)
    for step in range(4):
        for micro in range(2):
            x, y = rows(5, 6, seed=2 * step + micro), rows(5, 3, seed=50 + 2 * step + micro)
            (F.mse_loss(model(x), y) / 2).backward()
        for name, parameter in named:
            parameter.grad /= world
            if name != unreduced:
                dist.reduce(parameter.grad, owner[name])
            if owner[name] != rank:
                parameter.grad = None
        optimizer.step()
        for name, parameter in named:
            dist.broadcast(parameter.data, owner[name])
        model.zero_grad()


def zero_by_hand(forgotten: str = "", unreduced: str = "") -> None:
    """ZeRO 1 by hand: gradients are reduced to their owner, whose optimizer holds them alone, and weights are broadcast
    after the step. `forgotten`: a parameter that is not broadcast; `unreduced`: one whose gradient is not reduced."""
    model, rank, world = mlp(), dist.get_rank(), dist.get_world_size()
    named = list(model.named_parameters())
    owner = {name: i % world for i, (name, _) in enumerate(named)}
    optimizer = torch.optim.AdamW([p for n, p in named if owner[n] == rank], lr=1e-2)
    for step in range(4):
        x, y = rows(5, 6, seed=step), rows(5, 3, seed=50 + step)
        F.mse_loss(model(x), y).backward()
        for name, parameter in named:
            parameter.grad /= world
            if name != unreduced:
                dist.reduce(parameter.grad, owner[name])
        optimizer.step()
        for name, parameter in named:
            if name != forgotten:
                dist.broadcast(parameter.data, owner[name])
        model.zero_grad()


# -- several optimizers --------------------------------------------------------------------------------------------


def sparse_embedding(unreduced: bool = False) -> None:
    """Sparse embeddings with SparseAdam, and AdamW for the rest. `unreduced`: the embedding's is not summed."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(VOCAB, WIDTH, sparse=True), nn.Linear(WIDTH, VOCAB)
    model = nn.Sequential(embed, head)
    sparse, dense = torch.optim.SparseAdam(embed.parameters(), lr=1e-3), torch.optim.AdamW(head.parameters(), lr=1e-3)
    for step in range(4):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens).flatten(0, 1), labels).backward()
        averaged(head.parameters())
        if not unreduced:
            grad = embed.weight.grad.coalesce().to_dense()
            dist.all_reduce(grad)
            embed.weight.grad = (grad / dist.get_world_size()).to_sparse(1)
        sparse.step()
        dense.step()
        model.zero_grad()


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of matrices."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                p.add_(u @ v, alpha=-group["lr"])


def muon_and_adamw(unreduced: bool = False) -> None:
    model = DistributedDataParallel(net()) if not unreduced else net()
    matrices = [p for n, p in model.named_parameters() if "block" in n and p.dim() == 2]
    others = [p for n, p in model.named_parameters() if not ("block" in n and p.dim() == 2)]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, lr=1e-3)]
    for step in range(4):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        if unreduced:
            averaged(others)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


class Adversaries(nn.Module):
    """A generator's loss. `outside`: its discriminator stands in a list, where torch finds no submodule."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.maker = mlp(0, 4, 6)
        self.judges = [mlp(1, 6, 1)] if outside else nn.ModuleList([mlp(1, 6, 1)])

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.maker(noise)
        scores = self.judges[0](torch.cat([real, fake.detach()]))
        return F.softplus(-scores[:5]).mean() + F.softplus(scores[5:]).mean() + 0.1 * (fake - real).square().mean()


def discriminator(outside: bool = False) -> None:
    model = DistributedDataParallel(Adversaries(outside))
    parameters = [*model.module.maker.parameters(), *model.module.judges[0].parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for step in range(4):
        real, noise = rows(5, 6, seed=step), rows(5, 4, seed=step + 50)
        optimizer.zero_grad()
        model(real, noise).backward()
        optimizer.step()


# -- mistakes that were passed, or named as something else ---------------------------------------------------------


def norm_of_own_shards(by_hand: str = "") -> None:
    """DDP, with a clip by hand. `by_hand`: "local" takes the norm of this rank's own loss gradient, which differs."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = rows(5, 6, seed=step), rows(5, 3, seed=50 + step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if by_hand == "local":
            norm = norm * (1 + loss.detach())
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, 0.1 / float(norm)))
        optimizer.step()
        optimizer.zero_grad()


def changed_in_a_flat_sum(how: str, decay: float, bound: float, undivided: bool = False) -> None:
    """Gradients of two micro-batches are summed in one buffer and copied back, or stay views of it; then the program
    adds decay by hand, or clips by hand. `undivided`: wrong, nobody divides by the number of micro-batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for micro in range(2):
            tokens, labels = text(10 * step + micro)
            (F.cross_entropy(model(tokens), labels) / (1 if undivided else 2)).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            if how == "copied":
                parameter.grad.copy_(part.view_as(parameter))
            else:
                parameter.grad = part.view_as(parameter)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            if decay:
                parameter.grad.add_(parameter.detach(), alpha=decay)
            if bound:
                parameter.grad.mul_(bound / norm)
        optimizer.step()
        optimizer.zero_grad()


def clipped_before_the_sum(local: bool = True) -> None:
    """Gradients summed by hand. `local`: wrong, each rank clips by its own norm first."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        tokens, labels = text(step, 2 + 3 * dist.get_rank())
        (F.cross_entropy(model(tokens), labels, reduction="sum") * dist.get_world_size() / 49).backward()
        if local:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        averaged(model.parameters())
        if not local:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


class Column(nn.Module):
    """Column-parallel, then row-parallel: a model cut over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(0)
        up, down = torch.randn(8, 6, dtype=torch.float64) * 0.3, torch.randn(3, 8, dtype=torch.float64) * 0.3
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64) + 0.5)
        self.up = nn.Parameter(up.chunk(world)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.float64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = ToTp.apply(x * self.scale)
        return FromTp.apply(torch.tanh(x @ self.up.T) @ self.down.T) + self.bias


class ToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class FromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def tensor_parallel(wrong: str = "") -> None:
    """Two tensor-parallel ranks. `wrong`: "data" are others on each of them."""
    model = Column()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = rows(5, 6, seed=step, own=wrong == "data"), rows(5, 3, seed=50 + step, own=wrong == "data")
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_per_micro(undivided: bool = True, times: int = 4) -> None:
    """A mean per micro-batch by a loss that hides its labels. `undivided`: nobody divides by their number."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(times):
            tokens, labels = text(10 * step + micro)
            with model.no_sync() if micro < times - 1 else nullcontext():
                loss = Hidden.apply(model(tokens), labels)
                (loss if undivided else loss / times).backward()
        optimizer.step()
        optimizer.zero_grad()


class Hidden(torch.autograd.Function):
    """A fused loss that takes one-hot targets' logsumexp with a cap: no plain cross-entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = logits.detach().requires_grad_()
            capped = 5 * torch.tanh(inner / 5)
            loss = (capped.logsumexp(-1) - capped.gather(1, labels[:, None])[:, 0]).mean()
            (gradient,) = torch.autograd.grad(loss, inner)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None


def reduced_twice(twice: bool = True) -> None:
    """DDP, and a second sum by hand."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        if twice:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def hook_that_never_runs(runs: bool = False) -> None:
    """Gradients are averaged by hooks of parameters; a layer's hooks are put on copies that are thrown away."""
    model = net()
    held = []
    for name, parameter in model.named_parameters():
        target = parameter
        if name.startswith("norm") and not runs:
            target = parameter.detach().clone().requires_grad_()
            held.append(target)

        def average(p: Tensor) -> None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

        target.register_post_accumulate_grad_hook(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


class Tasks(nn.Module):
    """A body, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: Tensor, task: Tensor, every: bool) -> Tensor:
        x = torch.tanh(self.body(x))
        own = self.heads[int(task[0])](x)
        return own + 0 * sum(head(x) for head in self.heads) if every else own


def tasks(wrong: bool = True) -> None:
    """Each rank has rows of another task, under FSDP2, which reduces the gradients that a rank has in one buffer.
    `wrong`: the other task's head has none."""
    model = seeded(Tasks)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y, task = rows(5, 6, seed=step), rows(5, 3, seed=50 + step), torch.full((5,), dist.get_rank())
        F.mse_loss(model(x, task, not wrong), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def group_of_one(wrong: bool = True) -> None:
    """Gradients are averaged over a group that has this rank alone: the reduction does nothing."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()] if wrong else None
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        for parameter in model.parameters():
            if dist.get_world_size(group) > 1:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
        optimizer.step()
        optimizer.zero_grad()


def functional(reduced: bool = True) -> None:
    """A torch.func training loop: gradients are returned and never stand in .grad."""
    model = mlp()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    for step in range(3):
        x, y = rows(5, 6, seed=step), rows(5, 3, seed=50 + step)
        gradients = torch.func.grad(loss_of)(parameters, x, y)
        for name, gradient in gradients.items():
            if reduced:
                dist.all_reduce(gradient)
            parameters[name].grad = gradient / dist.get_world_size()
        optimizer.step()


def raises(at: int = 3) -> None:
    """A right program that raises in its third step."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        tokens, labels = text(step)
        F.cross_entropy(model(tokens), labels).backward()
        if step == at:
            raise ValueError("no more data")
        optimizer.step()
        optimizer.zero_grad()


def two_and_two(undivided: bool = True, twice: bool = False) -> None:
    """Two micro-batches on two ranks, as a Trainer accumulates: a factor of two may come from either. `undivided`: each
    mean counts once; `twice`: micro-batches are divided, and gradients summed where DDP has averaged them."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(2):
            tokens, labels = text(10 * step + micro)
            with model.no_sync() if micro == 0 else nullcontext():
                loss = F.cross_entropy(model(tokens), labels)
                (loss if undivided else loss / 2).backward()
        for parameter in model.parameters() if twice else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


# -- adjoints ------------------------------------------------------------------------------------------------------


class Gather(torch.autograd.Function):
    """Rows of all ranks. `backward` sums what all ranks send back, or drops the others'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, right: bool) -> Tensor:
        ctx.right, ctx.rows = right, len(x)
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.right:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient.narrow(0, ctx.rows * dist.get_rank(), ctx.rows), None


def contrastive(gather: str = "right") -> None:
    """A contrastive loss of each rank's images and the texts of all ranks. `gather`: "right"; "dropped" (the losses of
    other ranks do not come back); DTensor's "full_tensor" and "to_local", which drop them, too, unless they are told
    that gradients are "partial"; "nn" is torch.distributed.nn's, whose backward on gloo reads a gradient as if it were
    contiguous ("noncontiguous")."""
    from torch.distributed.nn.functional import all_gather
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    model = DistributedDataParallel(seeded(Clip))
    world, rank = dist.get_world_size(), dist.get_rank()
    way, _, partial = gather.partition(" ")
    mesh = init_device_mesh("cpu", (world,)) if way in ("full_tensor", "to_local") else None
    back: dict[str, Any] = {"grad_placements": [Partial()]} if partial else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def everywhere(x: Tensor) -> Tensor:
        if way == "full_tensor":
            return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor(**back)
        if way == "to_local":
            return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local(**back)
        if way == "nn":
            return torch.cat(all_gather(x))
        if way == "noncontiguous":
            return torch.cat([part.T for part in all_gather(x.T.contiguous())])
        return Gather.apply(x, way == "right")

    for step in range(4):
        images, texts = rows(5, 5, seed=step), rows(5, 6, seed=step + 50)
        image, text, scale = model(images, texts)
        logits = scale * image @ everywhere(text).T
        F.cross_entropy(logits, torch.arange(len(image)) + len(image) * rank).backward()
        optimizer.step()
        optimizer.zero_grad()
