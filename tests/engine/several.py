"""A model whose loss has several terms, uneven data, and the step of one device in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine import Engine

from . import toys

SHARES = {"lm": 1.0, "balance": 0.3, "kl": -0.7, "never": 5.0, "shown": 0.0}  # coefficients
Micro = tuple[Tensor, Tensor, Tensor]


def micro_batch(step: int, index: int) -> Micro:
    """Inputs, targets, and the weights of the terms: uneven, each 0 somewhere, `never` everywhere."""
    x, y = toys.micro_batch(step, index)
    weights = [len(x), (3 * index + step) % 4, 0.5 * (index % 3), 0, 1 + index % 2]
    return x, y, torch.tensor(weights, dtype=torch.float64)


class Several(nn.Module):
    """Returns Terms; `balance` is absent where it has no weight, `lm` and `kl` are NaN there, as torch's means are."""

    def __init__(self, finite: bool = False) -> None:
        """finite: no term is NaN."""
        super().__init__()
        self.finite = finite
        self.toy = toys.Toy()
        self.router = nn.Linear(13, 3, bias=False)
        self.double()

    def forward(self, x: Tensor, y: Tensor, weights: Tensor) -> Terms:
        inside = x if len(x) else x.new_ones(1, 13)
        routed = torch.softmax(self.router(inside), -1)
        none = 1.0 if self.finite else weights[2] / weights[2]  # a mean over nothing: NaN, and so is its gradient
        values = {
            "lm": self.toy(x).sum() if self.finite and not len(x) else toys.loss_of(self.toy, x, y),
            "balance": (routed.mean(0).square().sum() + self.toy.gain) * 3,
            "kl": F.softplus(self.toy.twice(torch.tanh(self.toy.first(inside)))).mean() * routed.amax() * none,
            "never": routed.prod(),
            "shown": routed.sum().detach() + len(x),
        }
        given = {n: (v, w, SHARES[n]) for (n, v), w in zip(values.items(), weights.tolist(), strict=True)}
        return Terms(**{n: term for n, term in given.items() if n != "balance" or term[1]})


class Saying(Several):
    """Says its weights before it runs."""

    def term_weights(self, x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return dict(zip(SHARES, weights, strict=True))


@dataclass
class Found:
    """What a run did: gradients of each step before clip, and what its stats said."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    terms: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def one_device(count: int, steps: int = 2, clip: float = 0.5) -> Found:
    """In plain torch: each term is the mean over all of its things; the loss is the sum of coefficient * mean."""
    model, found = Several(), Found()
    stepper = toys.sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        micros = [micro_batch(step, index) for index in range(count)]
        totals = torch.stack([weights for *_, weights in micros]).sum(0).tolist()
        sums = {name: torch.zeros((), dtype=torch.float64) for name in SHARES}
        for micro in micros:
            for name, (value, weight, _) in model(*micro).items():
                if weight:
                    sums[name] = sums[name] + value * weight
        means = {n: sums[n] / total for n, total in zip(SHARES, totals, strict=True) if total}
        loss = torch.stack([SHARES[name] * mean for name, mean in means.items()]).sum()
        stepper.zero_grad()
        loss.backward()
        found.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        found.losses.append(float(loss.detach()))
        found.terms.append(
            {n: (float(means[n].detach()) if n in means else math.nan, t) for n, t in zip(SHARES, totals, strict=True)}
        )
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepper.step()
    found.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def micros_of(mesh: Mesh, step: int, count: int, idle: int | None = None) -> list[Micro]:
    """This data rank's part of `count` micro-batches, cut in order. idle: a data rank that has none."""
    ranks = [rank for rank in range(mesh.size("dp")) if rank != idle]
    if mesh.index("dp") == idle:
        return []
    place, share = ranks.index(mesh.index("dp")), -(-count // len(ranks))
    return [micro_batch(step, index) for index in range(count)[place * share : (place + 1) * share]]


def run(layout: str, count: int, way: str = "eager", idle: int | None = None, steps: int = 2, **options: Any) -> Found:
    """The same on a layout. way: eager, no_sync, step ("train_step"), said ("train_step" of a model that says its
    weights), or the name of an option of Engine. idle: a data rank without any micro-batch."""
    mesh, found = Mesh(layout), Found()
    model = (Saying if way == "said" else Several)(finite=mesh.layout.zero == 3)
    options |= {"reproducible": {"reproducible": True}, "overlap": {"overlap": False}}.get(way, {})
    engine = Engine(model, mesh, toys.sgd, clip=0.5, bucket_mb=0.02, **options)
    for step in range(steps):
        micros = micros_of(mesh, step, count, idle)
        if way in ("step", "said"):
            engine.accumulate(micros)
        else:
            engine.begin(**announced(micros))
            for number, micro in enumerate(micros):
                with engine.no_sync() if way == "no_sync" and number < len(micros) - 1 else nullcontext():
                    engine.backward(model(*micro))
        found.gradients.append({name: g.clone() for name, g in engine.grads().items()})
        stats = engine.step()
        found.losses.append(stats.loss)
        found.norms.append(stats.grad_norm)
        found.terms.append({name: (term.mean, term.weight) for name, term in stats.terms.items()})
    with engine.full_parameters():
        found.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def announced(micros: list[Micro]) -> dict[str, float]:
    sums = sum((weights for *_, weights in micros), torch.zeros(len(SHARES), dtype=torch.float64))
    return dict(zip(SHARES, sums.tolist(), strict=True))


def differences(found: Found, truth: Found) -> Iterator[str]:
    """In words; gradients by name."""
    for step, (ours, theirs) in enumerate(zip(found.gradients, truth.gradients, strict=True)):
        for name, expected in theirs.items():
            error = float((ours[name] - expected).norm())
            if not error <= 1e-9 * float(expected.norm()):
                yield f"step {step}, gradient of {name}: error {error:.1e} of {float(expected.norm()):.1e}"
        yield from (f"step {step}, gradient of {n}" for n in ours.keys() - theirs.keys() if ours[n].any())
    for name, expected in truth.parameters.items():
        if not torch.allclose(found.parameters[name], expected, rtol=0, atol=1e-12):
            yield f"parameter {name}"
    for what in ("losses", "norms"):
        pairs = zip(getattr(found, what), getattr(truth, what), strict=True)
        yield from (f"{what}: {a} for {b}" for a, b in pairs if not abs(a - b) <= 1e-12 * max(abs(b), 1))
    for ours, theirs in zip(found.terms, truth.terms, strict=True):
        for name, (mean, weight) in theirs.items():
            if not weight and name not in ours:  # nobody has said that there is such a term
                continue
            close = abs(ours[name][0] - mean) <= 1e-12 * max(abs(mean), 1) or (
                math.isnan(mean) and math.isnan(ours[name][0])
            )
            if not close or ours[name][1] != weight:
                yield f"stats of {name}: {ours[name]} for {(mean, weight)}"
