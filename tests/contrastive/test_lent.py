"""Gradients of vectors that are computed in the replay: the memory of the vectors and no more; the same bits in
whatever pieces they are asked for; and beside a loss of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

import isograd as ig
from isograd.contrastive import GradCache, InfoNCE, SigLIP
from isograd.contrastive.lent import Lent
from isograd.mesh import Mesh
from tests.contrastive.toys import sgd

SIZE = 384
Make = Callable[[Mesh], nn.Module]
LOSSES: dict[str, tuple[Make, str]] = {
    "one way": (lambda mesh: InfoNCE(mesh, tile=64), ""),
    "both ways, a trained scale": (lambda mesh: InfoNCE(mesh, both=True, learn_scale=True, tile=64), ""),
    "both ways, ids, a guide": (lambda mesh: InfoNCE(mesh, both=True, margin=0.1, tile=64), "ids guides"),
    "sigmoid": (lambda mesh: SigLIP(mesh, tile=64), "ids"),
}


class Live(TorchDispatchMode):
    """The largest sum of bytes that tensors made inside have at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.present: dict[StorageWeakRef, int] = {}
        self.own: set[StorageWeakRef] = set()
        self.peak = 0

    def knows(self, what: Any) -> None:
        """These tensors are not counted."""
        self.own.update(StorageWeakRef(t.untyped_storage()) for t in tree.tree_leaves(what) if isinstance(t, Tensor))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree.tree_leaves(made):
            if isinstance(tensor, Tensor) and (key := StorageWeakRef(tensor.untyped_storage())) not in self.own:
                self.present[key] = tensor.untyped_storage().nbytes()
        self.present = {key: size for key, size in self.present.items() if not key.expired()}
        self.peak = max(self.peak, sum(self.present.values()))
        return made


def given(masks: str, count: int) -> dict[str, list[Tensor]]:
    torch.manual_seed(3)
    found = {"ids": [torch.randint(count, (count,)) for _ in range(2)]} if "ids" in masks else {}
    if "guides" in masks:
        found["guides"] = [torch.randn(count, 8) for _ in range(2)]
    return found


def peak(loss: str, count: int, layout: str = "dp1") -> int:
    """Bytes of a step in chunks of 64 rows; `count` rows on each rank."""
    mesh, (make, masks) = Mesh(layout), LOSSES[loss]
    model = nn.Linear(4, SIZE)
    model.loss = make(mesh)
    cache = GradCache(ig.Engine(model, mesh, sgd), model.loss, encode=lambda x: F.linear(x, model.weight, model.bias))
    towers, more = [torch.randn(count, 4) for _ in range(2)], given(masks, count)
    with Live() as live:
        live.knows([*model.parameters(), towers, more])
        cache.backward(*towers, **more)
    cache.engine.discard()
    return live.peak


@pytest.mark.parametrize("loss", list(LOSSES))
def test_each_further_row_takes_the_memory_of_its_vectors_and_no_more(loss: str) -> None:
    """5 % of it are states of random generators, 5 kB for each chunk."""
    few, many = 256, 1024
    growth = (peak(loss, many) - peak(loss, few)) / ((many - few) * 2 * SIZE * 4)
    assert 1.0 <= growth <= 1.1


def test_on_two_ranks_it_takes_that_of_the_vectors_of_both(worlds) -> None:
    """And for a moment that of a tower's own vectors beside the gathered ones: a quarter."""
    few, many = 256, 1024
    for loss in ("one way", "both ways, ids, a guide"):
        peaks = zip(*(worlds(2).run(peak, loss, count, "dp2") for count in (few, many)), strict=True)
        for small, large in peaks:
            assert 1.0 <= (large - small) / ((many - few) * 2 * 2 * SIZE * 4) <= 1.3


def lent(loss: nn.Module, masks: str) -> tuple[Lent, Callable[[list[Tensor]], Tensor]]:
    """Vectors of 37 rows, among them equal ones, with what their gradient is computed from."""
    torch.manual_seed(5)
    towers = [torch.randn(37, 6) for _ in range(2)]
    towers[1][7:14] = towers[1][:7]
    more = given(masks, 37)
    if "guides" in more:
        more["guides"] = [t.clone() for t in towers]  # the guide finds equal documents as near as a row's own
    vectors = Lent([t.requires_grad_() for t in towers])
    loss(vectors, **more).backward()
    return vectors, lambda plain: loss(plain, **more)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_gradients_have_the_same_bits_in_whatever_pieces_they_are_asked_for(loss: str) -> None:
    make, masks = LOSSES[loss]
    module = make(Mesh("dp1"))
    module.tile = 8
    if "guides" in masks:
        module.margin = 0.0  # what is hidden hangs on roundings
    vectors, plainly = lent(module, masks)
    whole = [vectors.gradient(tower, slice(0, 37)) for tower in (0, 1)]
    for pieces in (1, 5, 8, 11, 30):
        for tower in (1, 0):
            firsts = reversed(range(0, 37, pieces))
            parts = [vectors.gradient(tower, slice(first, min(first + pieces, 37))) for first in firsts]
            assert torch.equal(torch.cat(parts[::-1]), whole[tower])
    plain = [t.detach().clone().requires_grad_() for t in vectors]
    plainly(plain).backward()
    for mine, true in zip(whole, plain, strict=True):
        assert true.grad is not None
        assert float((mine - true.grad).norm()) < 1e-5 * float(true.grad.norm())


class Spread(InfoNCE):
    """InfoNCE, and a term of one's own on the vectors; three times as much of both."""

    def forward(self, towers: Any, *args: Any, **more: Any) -> Tensor:
        return 3 * (super().forward(towers, *args, **more) + 0.1 * towers[0].square().mean())


def test_a_loss_that_adds_to_another_one_has_both_gradients() -> None:
    mesh = Mesh("dp1")
    torch.manual_seed(2)
    model = nn.Linear(4, 6).double()
    model.loss = Spread(mesh, 5.0, learn_scale=True, tile=3).double()
    x, y = torch.randn(2, 11, 4, dtype=torch.float64)
    engine = ig.Engine(model, mesh, sgd)
    GradCache(engine, model.loss, encode=lambda x: F.linear(x, model.weight, model.bias), chunk=4).backward(x, y)
    found = dict(engine.grads())
    q, d = (F.linear(t, model.weight, model.bias) for t in (x, y))
    near = F.normalize(q, dim=1) @ F.normalize(d, dim=1).T * model.loss.log_scale.exp()
    loss = 3 * (F.cross_entropy(near, torch.arange(11)) + 0.1 * q.square().mean())
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, true in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        assert float((found[name] - true).norm()) <= 1e-12 * float(true.norm()), name


def test_without_a_backward_of_its_loss_a_tower_gets_nothing() -> None:
    vectors = Lent([torch.randn(5, 6, requires_grad=True) for _ in range(2)])
    InfoNCE(Mesh("dp1"))(vectors)
    assert not vectors.gradient(0, slice(0, 5)).any()
