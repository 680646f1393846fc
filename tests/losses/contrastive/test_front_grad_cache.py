"""FAILURES C, GradCache: the public methods, overridden and called one by one, give the gradient of one device."""

from __future__ import annotations

import inspect
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isograd as ig
from isograd.core.mesh import Mesh
from isograd.errors import ContrastiveError
from isograd.integrations.contrastive.grad_cache import GradCache, gather_input_tensor
from tests.losses.contrastive.test_front_ends import UNEVEN, Tower, assert_right, gradients, info_nce, joined, rows
from tests.losses.contrastive.toys import sgd

METHODS = {  # of GradCache 0.0.1
    "__init__": "models chunk_sizes loss_fn split_input_fn get_rep_fn fp16 scaler",
    "__call__": "args kwargs",
    "split_inputs": "model_input chunk_size",
    "get_input_tensors": "model_input",
    "model_call": "model model_input",
    "get_reps": "model_out",
    "compute_loss": "reps loss_kwargs",
    "forward_no_grad": "model model_inputs",
    "build_cache": "reps loss_kwargs",
    "forward_backward": "model model_inputs cached_gradients random_states no_sync_except_last",
    "cache_step": "model_inputs no_sync_except_last loss_kwargs",
}


class Outputs:
    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors


class Overridden(GradCache):
    """As users write it: the model's call and what is taken from its output are their own."""

    def model_call(self, model: nn.Module, model_input: Any) -> Outputs:
        return Outputs(model(model_input["x"]) * 2)

    def get_reps(self, model_out: Outputs) -> Tensor:
        return model_out.vectors / 2

    def compute_loss(self, *reps: Tensor, **loss_kwargs: Any) -> Tensor:
        return 2 * super().compute_loss(*reps, **loss_kwargs)


def loss(queries: Tensor, documents: Tensor) -> Tensor:
    return gather_input_tensor(info_nce)(queries, documents=documents, scale=3.0)


def one_by_one(cache: GradCache, *inputs: Tensor, late: bool = True) -> Tensor:
    """The body of GradCache's own cache_step."""
    parts = [cache.split_inputs(x, size) for x, size in zip(inputs, cache.chunk_sizes, strict=True)]
    passes = [cache.forward_no_grad(model, x) for model, x in zip(cache.models, parts, strict=True)]
    assert not any(vectors.requires_grad for vectors, _ in passes)
    gradients, value = cache.build_cache(*(vectors for vectors, _ in passes))
    chunked = [g.split(size) for g, size in zip(gradients, cache.chunk_sizes, strict=True)]
    for number, model in enumerate(cache.models):
        cache.forward_backward(model, parts[number], chunked[number], passes[number][1], no_sync_except_last=late)
    return value


def runs() -> dict[str, tuple[dict[str, Tensor], float]]:
    mesh, found = Mesh("dp2"), {}
    x, y = (rows(mesh.rank, UNEVEN, column) for column in (0, 1))
    for name in ("overridden", "one by one"):
        tower = Tower()
        tower.scale.requires_grad_(False)
        averaged = DistributedDataParallel(tower)
        model = Tower()
        engine = ig.Engine(model, mesh, sgd)
        if name == "overridden":
            value = Overridden([averaged, averaged], 2, loss)({"x": x}, UserDict(x=y))
            Overridden([model, model], [2, 3], loss, engine=engine)({"x": x}, UserDict(x=y))
        else:
            value = one_by_one(GradCache([averaged, averaged], 2, loss), x, y)
            with engine.backward_context():
                one_by_one(GradCache([model, model], [2, 3], loss, engine=engine), x, y)
        found[f"{name}/DDP"] = gradients(averaged), float(value)
        found[f"{name}/engine"] = dict(engine.grads()), float(value)
    return found


def test_methods_overridden_and_called_one_by_one_have_the_gradient_of_one_device(worlds) -> None:
    model = Tower()
    value = info_nce(model(joined(rows, UNEVEN, 0)), model(joined(rows, UNEVEN, 1)), 3.0)
    value.backward()
    for found in worlds(2).run(runs):
        assert len(found) == 4
        for label, (mine, seen) in found.items():
            times = 2 if label.startswith("overridden") else 1
            true = {name: times * g for name, g in gradients(model).items()}
            assert_right(mine, true, label)
            assert abs(seen - times * float(value.detach())) < 1e-12, label


def test_the_methods_are_those_of_gradcache() -> None:
    def arguments(function: Any) -> str:
        parameters = inspect.signature(function).parameters.values()
        return " ".join(p.name for p in parameters if p.name not in ("self", "engine"))

    for name, expected in METHODS.items():
        if name != "__call__":
            assert arguments(getattr(GradCache, name)) == expected, name
    theirs = pytest.importorskip("grad_cache", reason="METHODS are those of GradCache 0.0.1").GradCache
    for name, expected in METHODS.items():
        assert arguments(getattr(theirs, name)) == expected, name
    plain, tower = Tower(), Tower()
    x, y = (rows(0, (5,), column) for column in (0, 1))
    real = theirs([plain, plain], [2, 3], lambda q, d: info_nce(q, d, 3.0))
    mine = GradCache([tower, tower], [2, 3], lambda q, d: info_nce(q, d, 3.0))
    for inputs in ([x, y], {"x": x, "y": y}, x, ([x], {"y": y})):
        cut = [cache.get_input_tensors(cache.split_inputs(inputs, 2)) for cache in (real, mine)]
        assert all(torch.equal(a, b) for a, b in zip(*cut, strict=True))
    assert torch.equal(one_by_one(real, x, y, late=False), one_by_one(mine, x, y))
    for (name, p), q in zip(plain.named_parameters(), tower.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.allclose(p.grad, q.grad, rtol=1e-12, atol=1e-15), name


def test_inputs_that_are_not_one_per_model_are_refused_and_leave_the_step_as_it_was() -> None:
    model = Tower()
    engine = ig.Engine(model, Mesh("dp1"), sgd)
    cache = GradCache([model, model], 2, loss, engine=engine)
    x = rows(0, (5,), 0)
    with pytest.raises(ContrastiveError, match="IG963"):
        cache(x)
    cache(x, x + 1)
    engine.step()
