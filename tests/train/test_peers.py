"""Copies of parameters are compared over the ranks that hold them: experts over edp, everything else over dp and cp."""

from __future__ import annotations

import torch

from isograd.core.mesh import Mesh
from isograd.engine import Engine
from isograd.errors import TrainError
from isograd.train.run.peers import equal_copies
from tests.engine import folded
from tests.engine.toys import adamw


def drifted(layout: str, name: str, who: int) -> str:
    """What all ranks are told when one of them has changed an element of its copy."""
    model, engine = folded.engine_of(layout)
    equal_copies(engine, 1)
    if engine.mesh.rank == who:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3] += 1e-12
    try:
        equal_copies(engine, 2)
    except TrainError as error:
        return str(error)
    return ""


def started_apart() -> list[float]:
    """Of copies that were made with other values on each rank, the least and the largest under an engine."""
    mesh = Mesh("dp4 ep2")
    model = folded.Folded(mesh)
    weight = model.get_parameter("blocks.0.experts.weight")
    torch.nn.init.constant_(weight, mesh.rank)
    Engine(model, mesh, adamw)
    return [float(weight.min()), float(weight.max())]


def checks() -> list[str]:
    return [
        drifted("dp4 ep2", "blocks.1.experts.weight", 3),
        drifted("dp4 ep2", "out.weight", 2),
        drifted("tp2 dp2 ep2", "blocks.0.experts.bias", 2),
        drifted("tp2 dp2 ep2", "out.weight", 1),
        drifted("dp4 ep4", "blocks.0.experts.bias", 2),
    ]


def test_a_copy_that_drifts_is_named_with_the_ranks_that_hold_it(worlds) -> None:
    for experts, dense, folded_over_tp, tp, alone in worlds(4).run(checks):
        assert "IG984" in experts and "'edp'" in experts
        assert "rank 1 and rank 3 differ in blocks.1.experts.weight" in experts
        assert "'dp cp'" in dense and "out.weight" in dense
        assert "'edp'" in folded_over_tp and "blocks.0.experts.bias" in folded_over_tp
        assert "'tp'" in tp and "out.weight" in tp
        assert alone == ""  # nobody else holds it


def test_copies_of_an_expert_begin_as_those_of_the_first_rank_that_has_one(worlds) -> None:
    assert worlds(4).run(started_apart) == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
