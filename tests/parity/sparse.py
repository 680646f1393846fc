"""Training with experts on a layout, and on one device by the dense definition: what test_experts.py compares.

The one device is plain torch. The transformer's layers of experts compute nn/naive.py (every expert on every token),
the whole step is one graph, and its loss is written down term by term. Neither engine nor routing is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.models import Transformer, TransformerConfig
from isograd.nn import ExpertOptions, MoE, Stream, naive

from . import cases

BASE = ExpertOptions(number=8, per_token=2, width=9, balance_weight=0.3, z_weight=0.02)
KINDS: dict[str, ExpertOptions] = {
    "two": BASE,
    "one, shared": replace(BASE, per_token=1, renormalise=False, shared=11, shared_gate=True),
    "sigmoid, dense first": replace(
        BASE, scores="sigmoid", groups=4, chosen_groups=2, scale=1.7, choice_bias=True, choice_bias_rate=0.02,
        dense_first=1, shared=7,
    ),
    "tight": replace(BASE, capacity=0.8, every=2),
    "one, dense first": replace(
        BASE, per_token=1, renormalise=False, dense_first=1, choice_bias=True, choice_bias_rate=0.02
    ),
}  # fmt: skip
RATE = 0.1


def config_of(kind: str, scope: str) -> TransformerConfig:
    return TransformerConfig(
        vocab=101, hidden=24, layers=4, heads=4, head_dim=6, mlp=20, experts=replace(KINDS[kind], balance=scope),
        qk_norm=kind == "two",
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What one training did. `before`: gradients of every step."""

    before: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    terms: list[dict[str, float]]
    biases: list[Tensor]
    loads: dict[str, Tensor]  # of the last step: how often each expert of a layer was chosen, anywhere


@dataclass(frozen=True)
class Case:
    """A case of test_experts.py."""

    layout: str
    zero: int
    kind: str
    scope: str
    accumulation: int
    recompute: bool
    idle: bool = False  # nobody chooses one of the experts, and the last data rank has no tokens

    def __str__(self) -> str:
        return f"{self.layout}-{self.zero}-{self.kind}-{self.scope}-{self.accumulation}-{self.recompute}"

    def run(self) -> Run:
        """On this rank of a world."""
        layout = str(Layout.parse(f"{self.layout} zero{self.zero}" if self.zero else self.layout))
        return train(layout, self.kind, self.scope, self.accumulation, self.recompute, self.idle)

    def wrong(self, results: list[Run]) -> list[str]:
        """All that is wrong with the ranks' results."""
        dp = Layout.parse(self.layout).dp
        empty = self.accumulation if self.idle and dp > 1 else 0
        truth = one_device(self.kind, self.scope, self.accumulation * dp, empty, self.idle)
        wrong = [line for found in results for line in differences(found, truth)]
        lost = truth.parameters.keys() - {name for found in results for name in found.parameters}
        wrong += [f"nobody holds {sorted(lost)}"] if lost else []
        unknown = truth.loads.keys() - {name for found in results for name in found.loads}
        wrong += [f"nobody knows the load of {sorted(unknown)}"] if unknown else []
        for found in results:
            if not all(any(torch.equal(bias, other) for other in truth.biases) for bias in found.biases):
                wrong.append("the bias of a layer's choice")
        return wrong


def micros_of(step: int, first: int, many: int, of: int, empty: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches first ... first + many - 1 of a step: uneven labels, the last of all without any. The last `empty`
    of all have no tokens either."""
    config = config_of("two", "none")
    texts = [cases.Text(rows=0 if number >= of - empty else cases.BATCH) for number in range(first, first + many)]
    return [cases.micro_batch(config, step, first + i, of, text)[:2] for i, text in enumerate(texts)]


def nobody_chooses_one(model: Transformer) -> None:
    """Layers with a bias of the choice lose an expert; it is among those of the last ep rank."""
    for module in model.modules():
        if isinstance(module, MoE) and module.choice_bias is not None:
            module.choice_bias[-1] = -9.0


@contextmanager
def dense(seen: list[tuple[MoE, Tensor, Tensor]]) -> Iterator[None]:
    """Layers of experts compute the definition; `seen` gets (layer, logits, chosen) of each call."""
    fast = MoE.forward

    def forward(layer: MoE, x: Tensor, stream: Stream) -> tuple[Tensor, None]:
        whole = x.view(stream.batch, stream.length, -1)
        weights = dict(layer.named_parameters())
        y, logits, chosen = naive.moe(whole, weights, layer.options, F.silu, layer.choice_bias)
        seen.append((layer, logits, chosen))
        return y.view_as(x), None

    MoE.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        MoE.forward = fast  # type: ignore[method-assign]


@lru_cache
def one_device(kind: str, scope: str, count: int, empty: int, idle: bool) -> Run:
    """`count` micro-batches a step, the last `empty` of them without tokens."""
    config = config_of(kind, scope)
    options = config.experts
    assert options is not None
    model = Transformer(config, Mesh.unbound("1"), dtype=torch.float64)
    if idle:
        nobody_chooses_one(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    done = Run([], {}, [], [], [], [], {})
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    earlier: dict[MoE, Tensor] = {}
    for step in range(cases.STEPS):
        seen: list[tuple[MoE, Tensor, Tensor]] = []
        micros = micros_of(step, 0, count - empty, count)
        labels = sum(int((wanted != -100).sum()) for _, wanted in micros)
        optimizer.zero_grad()
        with dense(seen):
            parts = [F.cross_entropy(model(t).flatten(0, 1), w.flatten(), reduction="sum") for t, w in micros]
        terms = {"lm": torch.stack(parts).sum() / labels, "balance": torch.zeros(()), "z": torch.zeros(())}
        for layer in layers:
            logits = torch.cat([logits for of, logits, _ in seen if of is layer])  # [sequences, s, experts]
            chosen = torch.cat([chosen for of, _, chosen in seen if of is layer])
            often = chosen.flatten(0, 1).sum(0)
            if scope == "sequence":
                each = [naive.balance(a, b, options) for a, b in zip(logits, chosen, strict=True)]
                terms["balance"] = terms["balance"] + torch.stack(each).mean()
            elif scope == "batch":
                terms["balance"] = terms["balance"] + naive.balance(logits, chosen, options)
            else:
                scores = logits.softmax(-1) if options.scores == "softmax" else logits.sigmoid()
                share = earlier.get(layer, torch.ones_like(often))
                mean = (scores / scores.sum(-1, keepdim=True)).flatten(0, 1).mean(0)
                terms["balance"] = terms["balance"] + options.number * (mean * share / share.sum()).sum()
            terms["z"] = terms["z"] + naive.z(logits)
            earlier[layer] = often
            if layer.choice_bias is not None:
                layer.choice_bias += options.choice_bias_rate * (often.mean() - often).sign().float()
        loss = terms["lm"] + options.balance_weight * terms["balance"] + options.z_weight * terms["z"]
        loss.backward()
        done.before.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        done.losses.append(float(loss.detach()))
        done.terms.append({name: float(term.detach()) for name, term in terms.items()})
        done.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP)))
        optimizer.step()
    done.parameters.update({n: p.detach().clone() for n, p in model.named_parameters()})
    done.loads.update({n: earlier[layer] for n, layer in model.named_modules() if isinstance(layer, MoE)})
    done.biases.extend(layer.choice_bias for layer in layers if layer.choice_bias is not None)
    return done


def train(layout: str, kind: str, scope: str, accumulation: int, recompute: bool, idle: bool = False) -> Run:
    """The same on this rank of a world."""
    mesh, config = Mesh(layout), config_of(kind, scope)
    model = Transformer(config, mesh, dtype=torch.float64).to(mesh.device)
    model.recompute = recompute
    if idle:
        nobody_chooses_one(model)
    empty = accumulation if idle and mesh.size("dp") > 1 else 0
    engine = Engine(model, mesh, cases.sgd, clip=cases.CLIP, bucket_mb=0.01)
    done, all_of_them = Run([], {}, [], [], [], [], {}), accumulation * mesh.size("dp")
    for step in range(cases.STEPS):
        texts = micros_of(step, mesh.index("dp") * accumulation, accumulation, all_of_them, empty)
        micros: list[Any] = [tuple(given.to(mesh.device) for given in text) for text in texts]
        evaluated = engine.evaluate(micros)
        assert evaluated.weight > 0  # and it counts nothing
        engine.accumulate(micros)
        done.before.append({name: g.clone() for name, g in engine.grads().items()})
        stats = engine.step()
        done.losses.append(stats.loss)
        done.norms.append(stats.grad_norm)
        done.terms.append({name: mean.mean for name, mean in stats.terms.items()})
    with torch.no_grad(), engine.full_parameters():
        done.parameters.update(
            {r.name: assemble(r.parameter.detach(), r.contract, mesh).clone() for r in contracts(model, mesh)}
        )
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    done.biases.extend(layer.choice_bias for layer in layers.values() if layer.choice_bias is not None)
    done.loads.update({name: layer.load.last for name, layer in layers.items() if layer.load.last is not None})
    return done


def differences(found: Run, truth: Run) -> list[str]:
    """Everything in which a run is not one device's, in words."""
    wrong = []
    pairs = [*zip(found.before, truth.before, strict=True), (found.parameters, truth.parameters)]
    for number, (ours, theirs) in enumerate(pairs):
        whole = float(torch.stack([g.norm() for g in theirs.values()]).norm())
        if not ours.keys() <= theirs.keys():
            wrong.append(f"only here: {sorted(ours.keys() - theirs.keys())}")
        for name in sorted(ours.keys() & theirs.keys()):
            error = float((ours[name] - theirs[name]).norm())
            if not error <= cases.TOLERANCE * max(float(theirs[name].norm()), cases.FLOOR * whole):
                wrong.append(f"{name} in {number}: error {error:.1e} of {float(theirs[name].norm()):.1e}")
    numbers = [("loss", found.losses, truth.losses), ("norm", found.norms, truth.norms)]
    for step, (ours_of, theirs_of) in enumerate(zip(found.terms, truth.terms, strict=True)):
        numbers += [(f"{name} in {step}", [ours_of[name]], [theirs_of[name]]) for name in ours_of]
    for what, ours_, theirs_ in numbers:
        if not all(abs(a - b) <= cases.TOLERANCE * abs(b) for a, b in zip(ours_, theirs_, strict=True)):
            wrong.append(f"{what}: {ours_} instead of {theirs_}")
    for name, load in found.loads.items():
        if not torch.equal(load, truth.loads[name]):
            wrong.append(f"load of {name}: {load.tolist()} instead of {truth.loads[name].tolist()}")
    return wrong
