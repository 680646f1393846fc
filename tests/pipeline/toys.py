"""A small pipeline of foreign modules with the awkward things in it, and one device's training of it in plain torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.contract_table import contracts
from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine
from isograd.engine.zero import Shards
from isograd.pipeline import Stages

STEPS = 2
ROWS = (3, 0, 7, 2, 5, 1, 4, 6)  # rows per micro-batch: uneven, one empty
Make = Callable[[], "list[Any]"]
Micro = tuple[Tensor, Tensor]


class Use(nn.Module):
    """tanh(x W^t) with a weight that others may hold too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight))


class Fork(nn.Module):
    """Passes on two tensors: one changed, one as it came, and the numbers of the rows, which carry no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.up(x)), x, torch.arange(len(x))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(11, 8)
        self.rows = nn.Embedding(10, 8)

    def forward(self, up: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        return x + self.down(up) + self.rows(rows)


def block(seed: int, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 13), nn.GELU(), nn.Linear(13, width), nn.LayerNorm(width))


def plain() -> list[Any]:
    torch.manual_seed(0)
    return [nn.Linear(5, 8), block(1), block(2), block(3), nn.Linear(8, 3)]


def tied() -> list[Any]:
    """One weight on the first, a middle and the last stage of three."""
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(8, 8) / 3)
    return [nn.Linear(5, 8), Use(shared), block(1), block(2), Use(shared), block(3), Use(shared), nn.Linear(8, 3)]


class Idle(nn.Module):
    """Holds a weight and does not use it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x


def half_used() -> list[Any]:
    """A tie that only the first of its stages uses: the others must step it all the same."""
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(8, 8) / 3)
    return [nn.Linear(5, 8), Use(shared), block(1), block(2), Idle(shared), nn.Linear(8, 3)]


def tuples() -> list[Any]:
    torch.manual_seed(0)
    return [nn.Linear(5, 8), Fork(), Join(), block(1), Fork(), Join(), nn.Linear(8, 3)]


def partly_frozen() -> list[Any]:
    """The first and a middle module do not train; no gradient goes back beyond the first that does."""
    modules = [*plain(), nn.Linear(3, 3)]
    for number in (0, 2):
        modules[number].requires_grad_(False)
    modules[1].requires_grad_(False)[0].weight.requires_grad_(True)
    return modules


class Asking(nn.Module):
    """Asks autograd for the gradient of a hidden state within its forward, as adaptive weights of losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            hidden = torch.tanh(self.into(x))
            y = self.out(hidden)
            (asked,) = torch.autograd.grad(y.square().sum(), hidden, retain_graph=True)
        return y * (1 + asked.abs().sum(-1, keepdim=True))


class Clamped(nn.Module):
    """Uses a weight twice, whose whole gradient of a micro-batch passes through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.twice.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.twice(torch.tanh(self.twice(x))))


class Doubled(Tensor):
    """A weight whose class computes another linear map."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return (2 * found).as_subclass(Tensor) if func is F.linear else found


def special_linears() -> list[Any]:
    """What must be as plain autograd has it although the backward of linear maps is split."""
    torch.manual_seed(0)
    doubled = nn.Linear(8, 8)
    doubled.weight = nn.Parameter(doubled.weight.detach().as_subclass(Doubled))
    return [nn.Linear(5, 8), Asking(), doubled, block(1), Clamped(), Asking(), nn.Linear(8, 3)]


def loss_of(output: Tensor, micro: Micro) -> tuple[Tensor, int]:
    """The mean over the rows; NaN over none, as torch's own losses are."""
    return F.mse_loss(output, micro[1].to(output.dtype)), len(output)


def micro_batch(step: int, index: int) -> Micro:
    generator = torch.Generator().manual_seed(1000 * step + index)
    rows = ROWS[(index + step) % len(ROWS)]
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


@dataclass
class Outcome:
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of every step, before clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)  # before each step
    copies: dict[str, str] = field(default_factory=dict)  # what this rank holds at the end, as digests


def one_device(make: Make, micro_batches: int, clip: float = 0.5) -> Outcome:
    model = Stages(make(), Mesh.unbound("1"), loss=loss_of).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper, done = torch.optim.SGD(trained, lr=0.1, momentum=0.9), Outcome()
    for step in range(STEPS):
        micros = [micro_batch(step, index) for index in range(micro_batches)]
        rows = sum(len(x) for x, _ in micros)
        stepper.zero_grad()
        total = sum(model(*micro)[0] * len(micro[0]) for micro in micros if len(micro[0])) / rows
        total.backward()
        done.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        done.losses.append(float(total.detach()))
        done.norms.append(float(nn.utils.clip_grad_norm_(trained, clip)))
        stepper.step()
    done.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return done


def by_micro_batch(make: Make, micro_batches: int) -> dict[str, Tensor]:
    """Gradients of the first step on one device, one micro-batch after the other, as hooks see them."""
    model = Stages(make(), Mesh.unbound("1"), loss=loss_of).double()
    micros = [micro for index in range(micro_batches) if len((micro := micro_batch(0, index))[0])]
    for micro in micros:
        (model(*micro)[0] * len(micro[0])).backward()
    rows = sum(len(x) for x, _ in micros)
    return {n: p.grad / rows for n, p in model.named_parameters() if p.grad is not None}


def masked(layout: str) -> dict[str, Tensor]:
    """Gradients of micro-batches of which one has rows, and none that counts."""

    def loss(output: Tensor, micro: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, float]:
        _, y, mask = micro
        errors = (output - y.to(output.dtype)).square().mean(1)
        return (errors * mask).sum() / mask.sum(), float(mask.sum())

    model = Stages(plain(), Mesh(layout), loss=loss).double()
    engine = Engine(model, model.mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    (a, b), (x, y) = micro_batch(0, 0), micro_batch(0, 2)
    micros = [(a, b, torch.ones(len(a))), (x, y, torch.zeros(len(x))), (*micro_batch(0, 1), torch.ones(0))]
    engine.accumulate(micros)
    return {name: g.clone() for name, g in engine.grads().items()}


def train(layout: str, make: Make, micro_batches: int, clip: float = 0.5, **options: Any) -> Outcome:
    """The same on this rank of a world; micro_batches are of all data ranks together."""
    mesh = Mesh(layout)
    model = Stages(make(), mesh, loss=loss_of, **options).double()
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), clip=clip, bucket_mb=1e-4)
    share, done = micro_batches // mesh.size(DATA), Outcome()
    for step in range(STEPS):
        micros = [micro_batch(step, mesh.index(DATA) * share + j) for j in range(share)]
        done.evaluated.append(engine.evaluate(micros).loss)
        engine.accumulate(micros)
        done.gradients.append({name: g.clone() for name, g in engine.grads().items()})
        stats = engine.step()
        done.losses.append(stats.loss)
        done.norms.append(stats.grad_norm)
    with engine.full_parameters():
        done.parameters = {r.name: r.parameter.detach().clone() for r in contracts(model, mesh)}
    done.copies = {name: digest(value) for name, value in done.parameters.items()}
    return done


def digest(value: Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def differences(found: Sequence[Outcome], truth: Outcome) -> list[str]:
    """Of all ranks' outcomes: gradients by name, parameters, losses, norms and copies; empty when all is right."""
    wrong: list[str] = []
    for step, (ours, theirs) in enumerate(zip(found[0].gradients, truth.gradients, strict=True)):
        if ours.keys() != theirs.keys():
            wrong.append(f"gradients of {sorted(ours.keys() ^ theirs.keys())} on one side only")
        for name in sorted(ours.keys() & theirs.keys()):
            error = float((ours[name] - theirs[name]).norm())
            if not error <= 1e-9 * float(theirs[name].norm()):
                wrong.append(f"gradient of {name} in step {step}: error {error:.1e}")
    copies: dict[str, str] = {}
    for rank, outcome in enumerate(found):
        for name, value in outcome.parameters.items():
            if not float((value - truth.parameters[name]).norm()) <= 1e-9 * float(truth.parameters[name].norm()):
                wrong.append(f"parameter {name} on rank {rank}")
            if copies.setdefault(name, outcome.copies[name]) != outcome.copies[name]:
                wrong.append(f"copies of {name} differ on rank {rank}")
        for what in ("losses", "norms"):
            if not torch.allclose(*(torch.tensor(getattr(o, what)) for o in (outcome, truth)), rtol=1e-9, atol=0):
                wrong.append(f"{what} {getattr(outcome, what)} instead of {getattr(truth, what)}")
        if not torch.allclose(torch.tensor(outcome.evaluated), torch.tensor(truth.losses), rtol=1e-9, atol=0):
            wrong.append(f"evaluated {outcome.evaluated} instead of {truth.losses}")
    missing = truth.parameters.keys() - copies.keys()
    return wrong + ([f"nobody holds {sorted(missing)}"] if missing else [])


def with_groups(ps: Shards) -> torch.optim.Optimizer:
    """A group for what the first stage alone has; its rate is its own."""
    patterns = {"kept.0.*": {"lr": 0.01}, "*": {}} if "kept.0.weight" in ps.names else {"*": {}}
    return torch.optim.SGD(ps.groups(patterns), lr=0.1)
