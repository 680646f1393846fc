"""A small model with weights that are cut over ep, and the same model in plain torch on one device.

Its experts are matrices, chosen for each row by a number in the data. Ranks of an ep group share their rows: all of
them are gathered, each rank computes with its own experts, and the results are summed back to the rank that had the
row. Rows that tp ranks hold alike are sliced first. So a rank's gradient of an expert is that of the rows of its whole
ep group, which is what the contract says: it owes edp only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from isograd.comm import ops, raw
from isograd.comm.group import even_sizes
from isograd.core.contract import Shard, assemble, declare
from isograd.core.contract_table import contracts
from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine

from . import toys

EXPERTS, WIDTH = 8, 16
NOBODYS = (4, 5)  # experts that no row chooses: all that a rank of ep4 has
NAMES = ("weight", "bias", "sometimes")


class PlainExperts(nn.Module):
    """All experts, on one device: the definition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 5, dtype=torch.float64) / 4)
        self.sometimes = nn.Parameter(torch.randn(EXPERTS, dtype=torch.float64))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        shift = nn.functional.pad(self.bias[choice], (0, WIDTH - 5))
        return torch.einsum("nh,nhk->nk", x, self.weight[choice]) * self.sometimes[choice, None] + shift


class FoldedExperts(nn.Module):
    """This rank's experts. `sometimes` has no gradient on a rank whose experts no row chooses."""

    def __init__(self, whole: PlainExperts, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        shard = Shard.even("ep", 0, EXPERTS, mesh.size("ep"))
        self.first, self.stop = shard.ranges[mesh.index("ep")]
        for name in NAMES:
            value = whole.get_parameter(name)
            mine = nn.Parameter(value.detach()[self.first : self.stop].clone())
            self.register_parameter(name, declare(mine, mesh, shape=tuple(value.shape), shards=(shard,), data="edp"))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        tp, ep = self.mesh.group("tp"), self.mesh.group("ep")
        parts = even_sizes(len(x), tp.size)
        mine, chosen = ops.slice(x, tp, 0, parts), choice.split(list(parts))[tp.index]
        sizes = [int(n) for n in raw.gather_list(torch.tensor(len(mine)), ep)]
        rows, chosen = ops.all_gather(mine, ep, 0, sizes), raw.all_gather(chosen, ep, sizes)
        local = chosen - self.first
        here = (local >= 0) & (local < self.stop - self.first)
        local = local.clamp(0, self.stop - self.first - 1)
        y = torch.einsum("nh,nhk->nk", rows, self.weight[local])
        if here.any():
            y = y * self.sometimes[local, None]
        y = (y + nn.functional.pad(self.bias[local], (0, WIDTH - 5))) * here[:, None]
        return ops.gather_for_identical_use(ops.reduce_scatter(y, ep, 0, sizes), tp, 0, parts)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.experts: nn.Module = PlainExperts()

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return x + torch.tanh(self.experts(torch.tanh(self.dense(x)), choice))


class Folded(nn.Module):
    """Rows through two blocks with experts; `mesh` None: plain torch."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 5, dtype=torch.float64)
        self.never = PlainExperts()  # used by no row
        if mesh is not None:
            for block in self.blocks:
                block.experts = FoldedExperts(block.experts, mesh)
            self.never = FoldedExperts(self.never, mesh)

    def forward(self, x: Tensor, y: Tensor, choice: Tensor) -> tuple[Tensor, int]:
        """The mean over the rows, 0 over none."""
        h = self.first(x)
        for block in self.blocks:
            h = block(h, choice)
        return (self.out(h) - y).square().sum() / max(1, len(x)), len(x)


def micro_batch(step: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uneven rows, sometimes none; the experts of a micro-batch are few, and change with it."""
    x, y = toys.micro_batch(step, index + 7)
    choice = (torch.arange(len(x)) * 3 + index * 2 + step) % EXPERTS
    return x, y, choice + 2 * torch.isin(choice, torch.tensor(NOBODYS))


@dataclass
class Outcome:
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    numbers: list[tuple[float, float]] = field(default_factory=list)  # loss and norm of each step


STEPS, CLIP = 2, 0.5


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    return toys.adamw(list(model.parameters()))


@lru_cache
def one_device(micro_batches: int, steps: int = STEPS, optimizer: Callable[[nn.Module], Any] = adamw_of) -> Outcome:
    """Plain torch: the gradient of (sum over all rows) / (number of all rows), torch's clip and an optimizer."""
    model, outcome = Folded(None), Outcome()
    stepper = optimizer(model)
    for step in range(steps):
        batches = [micro_batch(step, index) for index in range(micro_batches)]
        rows = sum(len(x) for x, _, _ in batches)
        total = torch.stack([loss * count for loss, count in (model(*batch) for batch in batches)]).sum() / rows
        stepper.zero_grad()
        total.backward()
        outcome.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), CLIP)
        outcome.numbers.append((float(total.detach()), float(norm)))
        stepper.step()
    outcome.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def batches_of(mesh: Mesh, step: int, accumulation: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of this data rank."""
    return [micro_batch(step, mesh.index(DATA) * accumulation + j) for j in range(accumulation)]


def engine_of(layout: str, optimizer: toys.MakeOptimizer = toys.adamw, **options: object) -> tuple[Folded, Engine]:
    mesh = Mesh(layout)
    model = Folded(mesh)
    return model, Engine(model, mesh, optimizer, **{"clip": CLIP, "bucket_mb": 0.004, **options})  # type: ignore[arg-type]


def train(layout: str, accumulation: int, optimizer: toys.MakeOptimizer = toys.adamw, **options: object) -> Outcome:
    """The same training on this rank of a world."""
    model, engine = engine_of(layout, optimizer, **options)
    outcome = go_on(engine, range(STEPS), accumulation)
    outcome.parameters = whole_parameters(model, engine)
    return outcome


def go_on(engine: Engine, steps: Iterable[int], accumulation: int) -> Outcome:
    """These steps."""
    outcome = Outcome()
    for step in steps:
        engine.accumulate(batches_of(engine.mesh, step, accumulation))
        outcome.gradients.append({name: gradient.clone() for name, gradient in engine.grads().items()})
        stats = engine.step()
        outcome.numbers.append((stats.loss, stats.grad_norm))
    return outcome


def whole_parameters(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    with torch.no_grad(), engine.full_parameters():
        table = contracts(model, engine.mesh)
        return {r.name: assemble(r.parameter.detach(), r.contract, engine.mesh).clone() for r in table}


def differences(found: Outcome, truth: Outcome, tolerance: float = 1e-9) -> list[str]:
    """Everything in which a run is not one device's."""
    wrong = []
    pairs = [("gradients", a, b) for a, b in zip(found.gradients, truth.gradients, strict=True)]
    for what, ours, theirs in [*pairs, ("parameters", found.parameters, truth.parameters)]:
        for name, value in ours.items():
            expected = theirs.get(name, torch.zeros_like(value))
            if not float((value - expected).norm()) <= tolerance * float(expected.norm()):
                wrong.append(
                    f"{what} of {name}: {float((value - expected).norm()):.1e} of {float(expected.norm()):.1e}"
                )
        wrong += [f"{what} without {name}" for name in theirs.keys() - ours.keys()]
    for ours, theirs in zip(found.numbers, truth.numbers, strict=True):
        wrong += [f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=True) if abs(a - b) > tolerance * abs(b)]
    return wrong
