"""A step of several terms is the step of one device: each term is divided by its own weight over all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from isograd.comm import world
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.models import Transformer, TransformerConfig
from isograd.nn.loss import Head
from isograd.sequence.attend import token_layout_for

from . import several, toys

WAYS = ("eager", "no_sync", "reproducible", "overlap", "step", "said")


def every_way(accumulation: int, stages: tuple[int, ...] = (0, 1, 2, 3), ways: tuple[str, ...] = WAYS) -> list[str]:
    ranks = world.world()[1]
    truth, wrong = several.one_device(ranks * accumulation), []
    for zero in stages:
        for way in ways:
            found = several.run(f"dp{ranks} zero{zero}", ranks * accumulation, way)
            wrong += [f"zero{zero} {way}: {words}" for words in several.differences(found, truth)]
    return wrong


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_term_is_divided_by_its_own_weight(worlds, ranks: int, accumulation: int) -> None:
    assert worlds(ranks).run(partial(every_way, accumulation)) == [[]] * ranks


def a_rank_without_data() -> list[str]:
    truth = several.one_device(4)
    found = several.run("dp3 zero1", 4, "overlap", idle=1)
    return list(several.differences(found, truth))


def test_a_rank_without_any_backward_announces_nothing_and_steps(worlds) -> None:
    assert worlds(3).run(a_rank_without_data) == [[]] * 3


def example_of_the_theory() -> list[float]:
    """3 tokens and 1 token, one sequence each; each number is a multiple of the one parameter, which is 1."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    engine = Engine(model, Mesh("dp2"), toys.sgd)
    tokens, lm, balance = [(3, 2.0, 1.0), (1, 6.0, 3.0)][engine.mesh.rank]
    found = []
    for several_weights in (True, False):
        one = model(torch.ones(1, dtype=torch.float64)).sum()
        if several_weights:
            engine.backward(Terms(lm=(one * lm, tokens), balance=(one * balance, 1)))
        else:
            engine.backward(one * (lm + balance), weight=tokens)
        found.append(float(next(g for _, g in engine.grads().items())))
        engine.discard()
    return found


def test_one_divisor_is_wrong_by_the_numbers_of_the_theory(worlds) -> None:
    assert worlds(2).run(example_of_the_theory) == [[5.0, 4.5]] * 2


# -- layers that are cut


class TwoMeans(Head):
    """The loss of all labels, and that of the labels that 3 divides, each with its number."""

    def forward(self, x: Tensor, labels: Tensor, chunk: int | None = None) -> Terms:  # type: ignore[override]
        some = torch.where(labels % 3 == 0, labels, self.ignore_index)
        return Terms(lm=super().forward(x, labels, chunk), some=(*super().forward(x, some, chunk), 0.3))


CONFIG = TransformerConfig(vocab=101, hidden=24, layers=4, heads=8, kv_heads=2, head_dim=6, mlp=40, qk_norm=True)


def two_means(mesh: Mesh) -> Transformer:
    model = Transformer(CONFIG, mesh, dtype=torch.float64)
    if model.head is not None:
        model.head.__class__ = TwoMeans
    return model


def texts(of: range) -> list[dict[str, Tensor]]:
    """Micro-batches with uneven labels; number 3 has none, and number 1 none that 3 divides."""
    found = []
    for index in of:
        window = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(index))
        labels = window[:, 1:].clone()
        labels[:, : index % 5] = -100
        labels[labels % 3 == 0 if index == 1 else labels < 101 * (index == 3)] = -100
        found.append({"tokens": window[:, :-1], "labels": labels})
    return found


def cut_layers(layout: str) -> list[str]:
    mesh = Mesh(layout)
    share = 4 // mesh.size("dp")
    mine, rows = texts(range(4))[mesh.index("dp") * share :][:share], {"lm": 0, "some": 0}
    places = token_layout_for(11, 2, mesh)
    for micro in mine:  # under cp: of this rank's part of each sequence
        labels = places.shard(micro["labels"], mesh.index("cp"), -100)
        rows["lm"] += int((labels >= 0).sum())
        rows["some"] += int(((labels >= 0) & (labels % 3 == 0)).sum())
    engine = Engine(two_means(mesh), mesh, toys.sgd, bucket_mb=0.01)
    engine.begin(**rows)
    engine.accumulate(mine)
    found, stats = {name: g.clone() for name, g in engine.grads().items()}, engine.step()

    model = two_means(Mesh.unbound("1"))
    results = [model(**micro) for micro in texts(range(4))]
    counts = {name: sum(float(terms[name].weight) for terms in results) for name in rows}  # type: ignore[attr-defined]
    means = {name: sum(t[name].value * t[name].weight for t in results) / counts[name] for name in rows}  # type: ignore
    (means["lm"] + 0.3 * means["some"]).backward()
    wrong = [] if abs(stats.loss - float((means["lm"] + 0.3 * means["some"]).detach())) < 1e-12 else ["loss"]
    for name in rows:
        seen = stats.terms[name]
        wrong += [name] * (abs(seen.mean - float(means[name].detach())) > 1e-12 or seen.weight != counts[name])
    whole = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        error = float((found[name] - parameter.grad).norm())
        wrong += [name] * (not error <= 1e-9 * max(float(parameter.grad.norm()), 1e-6 * whole))
    value = engine.evaluate(mine)
    wrong += [] if abs(value.terms["some"].weight - counts["some"]) < 1e-9 else ["evaluate"]
    return wrong


@pytest.mark.parametrize("layout", ["tp2 sp zero1", "cp2", "cp2 ring zero3", "pp2 zero2", "pp2 vpp2 zb"])
def test_terms_of_cut_layers_are_those_of_one_device(worlds, layout: str) -> None:
    assert worlds(2).run(partial(cut_layers, layout)) == [[], []]
