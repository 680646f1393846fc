"""A foreign model with the awkward things in it, uneven data, and the one-device loop that is the truth for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine

ROWS = (3, 0, 7, 2, 5, 1, 4, 6)  # rows per micro-batch: uneven, one empty


class Toy(nn.Module):
    """Odd sizes, a scalar, a module used twice, a frozen weight and one that nothing uses."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, 37)
        self.twice = nn.Linear(37, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(37, 150, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(150, 5)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        return self.out(torch.tanh(self.last(self.frozen(x)) * self.gain))  # type: ignore[no-any-return]


def micro_batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    rows = ROWS[(index + step) % len(ROWS)]
    x = torch.randn(rows, 13, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the rows; NaN over none, as torch's own losses are."""
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(x.to(dtype)), y.to(dtype))


class Failing:
    """Inside, a backward of the toy raises at the parameter at `place`, in the order of their gradients."""

    NAMES = (
        "out.bias",
        "out.weight",
        "gain",
        "last.weight",
        "twice.bias",
        "twice.weight",
        "first.bias",
        "first.weight",
    )
    PLACES = len(NAMES)

    def __init__(self, model: nn.Module, place: int) -> None:
        self.parameter = model.get_parameter(self.NAMES[place])

    def __enter__(self) -> None:
        self.hook = self.parameter.register_hook(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


MakeOptimizer = Callable[..., torch.optim.Optimizer]


def adamw(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@dataclass
class Outcome:
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def one_device(micro_batches: int, steps: int, optimizer: MakeOptimizer, clip: float | None) -> Outcome:
    """What training means, in plain torch: the gradient of (sum over all rows) / (number of all rows)."""
    model, outcome = Toy(), Outcome()
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        total, rows = torch.zeros((), dtype=torch.float64), 0
        for index in range(micro_batches):
            x, y = micro_batch(step, index)
            if len(x):
                total = total + loss_of(model, x, y) * len(x)
            rows += len(x)
        stepper.zero_grad()
        (total / rows).backward()
        trainable = [p for p in model.parameters() if p.grad is not None]
        if step == 0:
            outcome.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcome.losses.append(float(total.detach()) / rows)
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, clip or torch.inf)))
        stepper.step()
    outcome.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def engine_run(
    layout: str,
    micro_batches: int = 4,
    steps: int = 2,
    optimizer: MakeOptimizer = adamw,
    clip: float | None = 0.5,
    unsynced: str = "",
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> Outcome:
    """The same training under a layout. `unsynced`: for each of a rank's micro-batches in turn, 'n' for no_sync."""
    mesh = Mesh(layout)
    model, outcome = Toy(dtype), Outcome()
    engine = Engine(model, mesh, optimizer, clip=clip, **{"bucket_mb": 0.02, **options})  # type: ignore[arg-type]
    share = micro_batches // mesh.size(DATA)
    for step in range(steps):
        for j in range(share):
            x, y = micro_batch(step, mesh.index(DATA) * share + j)
            with engine.no_sync() if unsynced[j : j + 1] == "n" else nullcontext():
                engine.backward(loss_of(model, x, y), weight=len(x))
        if step == 0:
            outcome.gradients = {name: g.clone() for name, g in engine.grads().items()}
        stats = engine.step()
        outcome.losses.append(stats.loss)
        outcome.norms.append(stats.grad_norm)
    with engine.full_parameters():
        outcome.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def assert_same_training(found: Outcome, truth: Outcome, tolerance: float = 1e-9) -> None:
    """Each gradient by name against its own norm (and the unused one's must be zero); loss, norm and parameters too."""
    for name, gradient in found.gradients.items():
        expected = truth.gradients.get(name, torch.zeros_like(gradient))
        error = float((gradient - expected).norm())
        assert error <= tolerance * float(expected.norm()), f"gradient of {name}: error {error:.2e}"
    assert truth.gradients.keys() <= found.gradients.keys()
    for name, value in truth.parameters.items():
        error = float((found.parameters[name] - value).norm())
        assert error <= tolerance * float(value.norm()), f"parameter {name} after the steps: error {error:.2e}"
    for ours, theirs in zip(found.losses + found.norms, truth.losses + truth.norms, strict=True):
        assert abs(ours - theirs) <= tolerance * abs(theirs)


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    unlike = [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]
    assert not unlike, f"bits differ in {unlike}"
