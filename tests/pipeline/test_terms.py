"""A loss of several terms under pp: those of the last stage, and those that other stages return with their output."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd.core.layout import Layout
from isograd.core.loss_terms import Terms
from isograd.core.mesh import DATA, Mesh
from isograd.engine import Engine
from isograd.errors import IsogradError
from isograd.pipeline import Stages

from . import toys

SPLIT = {2: (3, 2), 3: (2, 2, 1), 4: (1, 2, 1, 1)}
SHARES = {"lm": 1.0, "large": 0.1, "own": 0.4}  # coefficients


def loss_of(output: Tensor, micro: toys.Micro) -> Terms:
    mean, rows = toys.loss_of(output, micro)
    return Terms(lm=(mean, rows), large=(output.abs().sum() / max(1, rows // 2), rows // 2, SHARES["large"]))


def own_term(x: Tensor, stage: int) -> tuple[Tensor, int]:
    """Of the activations that a stage passes on: a mean over rows, counted with another weight at each stage."""
    return x.square().sum() / max(1, len(x)), (stage + 1) * len(x)


def weights_of(micro: toys.Micro, stages: int, own: bool) -> dict[str, float]:
    rows = len(micro[0])
    passed_on = {"own": float(sum((stage + 1) * rows for stage in range(stages - 1)))}
    return {"lm": rows, "large": rows // 2, **(passed_on if own else {})}


class Talking(Stages):
    """Each stage but the last returns a term of its own after what it passes on."""

    def _piece(self, stage: int, x: Any, micro: Any) -> Any:
        x = super()._piece(stage, x, micro)
        if stage == len(self.parts) - 1:
            return x
        value, weight = own_term(x, stage)
        return x, Terms(own=(value, weight, SHARES["own"]))


def model_of(mesh: Mesh, stages: int, own: bool) -> Stages:
    kind, weights = Talking if own else Stages, partial(weights_of, stages=stages, own=own)
    return kind(toys.plain(), mesh, loss=loss_of, split=SPLIT[stages], weights=weights).double()


def one_device(stages: int, micros: list[toys.Micro], own: bool) -> tuple[dict[str, Tensor], float, dict[str, float]]:
    """In plain torch: the modules in turn."""
    modules = [module.double() for module in toys.plain()]
    ends = [sum(SPLIT[stages][: i + 1]) for i in range(stages - 1)]
    sums: dict[str, Any] = {}
    counts: dict[str, float] = {}
    for micro in micros:
        x = micro[0]
        terms = []
        for number, module in enumerate(modules, 1):
            x = module(x)
            if own and number in ends:
                terms.append(("own", *own_term(x, ends.index(number))))
        terms += [(name, term.value, term.weight) for name, term in loss_of(x, micro).items()]
        for name, value, weight in terms:
            counts[name] = counts.get(name, 0) + weight
            if weight:
                sums[name] = sums.get(name, 0) + value * weight
    means = {name: value / counts[name] for name, value in sums.items()}
    loss = sum(SHARES[name] * mean for name, mean in means.items())
    loss.backward()
    gradients = {f"kept.{i}.{n}": p.grad for i, m in enumerate(modules) for n, p in m.named_parameters()}
    return gradients, float(loss.detach()), {name: float(mean.detach()) for name, mean in means.items()}


def on_stages(layout: str, own: bool) -> list[str]:
    mesh = Mesh(layout)
    stages = mesh.layout.pp * mesh.layout.vpp
    engine = Engine(model_of(mesh, stages, own), mesh, lambda ps: torch.optim.SGD(ps, lr=0.1), bucket_mb=1e-4)
    every = [toys.micro_batch(0, index) for index in range(6)]
    share = 6 // mesh.size(DATA)
    mine = every[mesh.index(DATA) * share :][:share]
    found = engine.evaluate(mine)
    engine.accumulate(mine)
    gradients = {name: g.clone() for name, g in engine.grads().items()}
    stats = engine.step()
    truth, loss, means = one_device(stages, every, own)
    wrong = []
    for name, expected in truth.items():
        if not float((gradients[name] - expected).norm()) <= 1e-9 * float(expected.norm()):
            wrong.append(name)
    for what, got in (("step", stats), ("evaluation", found)):
        if abs(got.loss - loss) > 1e-12 or got.terms.keys() != means.keys():
            wrong.append(f"loss of the {what}: {got.loss} for {loss}")
        seen = {name: term.mean for name, term in got.terms.items()}
        wrong += [f"{n} of the {what}" for n, mean in means.items() if not abs(seen.get(n, 0) - mean) < 1e-12]
    return wrong


LAYOUTS = ("pp2", "pp2 gpipe zero1", "pp2 zb zero2", "pp2 vpp2", "pp3 zb", "dp2 pp2 zero1")


@pytest.mark.medium
@pytest.mark.parametrize("own", [False, True], ids=["last stage", "every stage"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_of_stages_are_those_of_one_device(worlds, layout: str, own: bool) -> None:
    ranks = Layout.parse(layout).world_size
    assert worlds(ranks).run(partial(on_stages, layout, own)) == [[]] * ranks


def forgotten_weights(how: str) -> str:
    mesh = Mesh("pp2")
    model = model_of(mesh, 2, own=how == "own")
    if how == "own":
        model.weights = lambda micro: {"lm": len(micro[0]), "large": len(micro[0]) // 2, "own": 2 * len(micro[0])}
    else:
        model.weights = None
    engine = Engine(model, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    with pytest.raises(IsogradError) as error:
        engine.train_step([toys.micro_batch(0, index) for index in range(3)])
    return str(error.value)


def test_weights_that_a_stage_does_not_bring_are_refused_on_all(worlds) -> None:
    """IG563, and nothing of the step is left; before, in the middle of a schedule, only the last stage can tell."""
    said = worlds(2).run(partial(forgotten_weights, "own"))
    assert all(words.startswith("IG563") and "'own'" in words and "rank 1" in words for words in said), said
    with pytest.raises(IsogradError, match=r"IG564|IG805"):
        worlds(2).run(partial(raised, "no weights"), timeout=60)


def raised(how: str) -> Mapping[str, str]:
    said = forgotten_weights(how)
    raise IsogradError(said[:5], said)  # the connections are closed: this world is started anew
