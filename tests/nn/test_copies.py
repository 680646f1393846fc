"""A copy of a model owes what the model owes: moving averages of weights, reference models, teachers."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch

from isograd.core.contract import assemble
from isograd.core.contract_table import contracts
from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import ContractError, LayoutError
from isograd.models import Transformer, preset
from isograd.nn import cross_entropy
from tests.engine import toys

UNEVEN = {tied: replace(preset("tiny-llama"), vocab=101, tied=tied) for tied in (False, True)}  # tp2: 51 and 50 tokens


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, 3:5] = torch.tensor([50, 51])  # the border between the two ranks
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train(model: Transformer, mesh: Mesh) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and whole parameters after one step."""
    engine = Engine(model, mesh, toys.sgd)
    loss = engine.train_step(batch()).loss
    return loss, {r.name: assemble(r.parameter.detach(), r.contract, mesh) for r in contracts(model, mesh)}


def copies(layout: str, tied: bool) -> None:
    """A copy made before, one made of a model without memory, and one made of a model that an engine has stepped."""
    mesh = Mesh(layout)
    model = Transformer(UNEVEN[tied], mesh, dtype=torch.float64)
    bare = copy.deepcopy(Transformer(UNEVEN[tied], mesh, dtype=torch.float64, device="meta"))
    early = copy.deepcopy(model)
    assert [(r.name, r.contract) for r in contracts(early, mesh)] == [
        (r.name, r.contract) for r in contracts(model, mesh)
    ]
    assert (early.head.weight is early.embed.weight) == tied
    assert early.mesh is mesh
    first = train(model, mesh)
    for other in (early, bare):
        loss, parameters = train(other, mesh)
        assert loss == first[0]
        toys.assert_same_bits(parameters, first[1])
    late = copy.deepcopy(model)
    assert len(late._forward_pre_hooks) <= 1
    second = train(model, mesh)
    loss, parameters = train(late, mesh)
    assert loss == second[0]
    toys.assert_same_bits(parameters, second[1])
    refuse_what_cannot_be_known(model, mesh)


def refuse_what_cannot_be_known(model: Transformer, mesh: Mesh) -> None:
    """A weight without a contract cannot say where the vocabulary is cut; a mesh of a world cannot be pickled."""
    with pytest.raises(ContractError, match="IG303"):
        cross_entropy(torch.zeros(3, 24).double(), model.head.weight.detach().clone(), torch.zeros(3).long(), mesh)
    with pytest.raises(LayoutError, match=r"IG111(.|\n)*model\.state_dict\(\)"):
        torch.save(model, io.BytesIO())
    with pytest.raises(LayoutError, match="IG111"):
        pickle.dumps(mesh)


@pytest.mark.parametrize("tied", [False, True])
def test_a_deep_copy_under_tp_cuts_owes_and_trains_as_the_model(worlds, tied: bool) -> None:
    """FAILURES A15: the copy had no contracts and took its slice of the vocabulary for another; A17: torch.save."""
    worlds(2).run(copies, "tp2 sp", tied)


def test_a_model_of_no_world_is_pickled_with_its_contracts() -> None:
    mesh = Mesh.unbound("tp2 sp", rank=1)
    model = Transformer(UNEVEN[False], mesh)
    again = pickle.loads(pickle.dumps(model))
    assert [(r.name, r.contract) for r in contracts(again, mesh)] == [
        (r.name, r.contract) for r in contracts(model, mesh)
    ]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
