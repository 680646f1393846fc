"""GradCache around an encoder with experts: the gradient and the experts' counts of the full batch on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.errors import ContrastiveError
from isograd.losses.contrastive import GradientCache, InfoNCE
from isograd.nn import ExpertOptions, MoE
from tests.losses.contrastive.toys import Decoder, Found, assert_same, batch, sgd, truth, whole
from tests.parity import sparse

EXPERTS = ExpertOptions(number=4, per_token=2, width=5, every=2, balance="none", choice_bias=True, choice_bias_rate=0.1)
CHUNK = 2


class Tower(nn.Module):
    def __init__(self, mesh: Mesh, options: ExpertOptions = EXPERTS) -> None:
        super().__init__()
        self.encode = Decoder(1, mesh, experts=options)
        self.loss = InfoNCE(mesh, 8.0, learn_scale=True)
        self.double()


def counts_of(model: nn.Module) -> list[Tensor]:
    """Of each layer of experts: the load of the last step, and the bias after it."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    assert layers
    return [t for layer in layers for t in (layer.load.last, layer.choice_bias) if t is not None]


def cached(layout: str, rows: str) -> tuple[Found, list[Tensor]]:
    mesh = Mesh(layout)
    model = Tower(mesh).to(mesh.device)
    engine = ig.Engine(model, mesh, sgd, bucket_mb=0.001)
    cache = GradientCache(engine, model.loss, encode=model.encode, chunk=CHUNK)
    cache.backward(*batch(mesh.index("dp"), 0, rows).to(mesh.device).towers)
    found = Found({n: g.clone() for n, g in engine.grads().items()})
    found.loss = engine.step().loss
    return found, counts_of(model)


def one_device(parts: int, rows: str) -> tuple[Found, list[Tensor]]:
    """All rows in one graph, every expert on every token."""
    mesh = Mesh.unbound("dp1")
    model = Tower(mesh)
    one = whole([batch(r, 0, rows) for r in range(parts)])
    seen: list[tuple[MoE, Tensor, Tensor]] = []
    with sparse.dense(seen):
        vectors = [model.encode(*inputs) for inputs in one.towers]
    loss = truth(model.loss, vectors, one)
    loss.backward()
    found = Found({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, float(loss.detach()))
    load = torch.stack([chosen.sum((0, 1)) for _, _, chosen in seen]).sum(0)
    bias = EXPERTS.choice_bias_rate * (load.mean() - load).sign()
    return found, [load.long(), bias]


@pytest.mark.medium
@pytest.mark.parametrize("rows", ["uneven", "empty"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "dp2 ep2"), (2, "tp2 ep2 zero1"), (4, "dp2 cp2 ulysses ep4")])
def test_the_gradient_is_that_of_the_full_batch_on_one_device(worlds, ranks: int, layout: str, rows: str) -> None:
    """A rank with fewer chunks, or none, takes part in every exchange, and its extra forwards count nothing."""
    true, counts = one_device(ig.Layout.parse(layout).dp, rows)
    for found, mine in worlds(ranks).run(cached, layout, rows):
        assert_same(found, true, layout, 1e-9)
        assert all(torch.equal(a, b.to(a)) for a, b in zip(mine, counts, strict=True)), (mine, counts)


@pytest.mark.parametrize("options", [{"balance": "sequence"}, {"z_weight": 0.1}])
def test_a_balance_loss_that_would_be_left_out_is_refused(options: dict[str, Any]) -> None:
    mesh = Mesh("1")
    model = Tower(mesh, replace(EXPERTS, **options))
    engine = ig.Engine(model, mesh, sgd)
    with pytest.raises(ContrastiveError, match=r"IG971.*blocks\.1\.mlp"):
        GradientCache(engine, model.loss, encode=model.encode)
