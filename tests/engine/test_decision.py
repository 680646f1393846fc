"""What the card decides about a step is what the host decides; where it is in doubt, it leaves the step to the host."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from isograd import Mesh
from isograd.core.mesh import DATA
from isograd.engine import step_status
from isograd.engine.decision import places_of, verdict_of
from isograd.errors import IsogradError

LAYOUTS = ["dp3", "dp2 tp2", "tp3", "cp2 tp2", "pp2 dp2"]
WRONG = {
    "a NaN": [math.nan],
    "an Inf": [math.inf],
    "a negative number": [-1.0],
    "a tiny number": [1e-300],
    "nearly as much": [1.0005],
    "zero": [0.0],
    "one more": [4.0],
}


def rows_of(layout: str) -> tuple[Tensor, list[Tensor]]:
    """What ranks say in a step that is right: squares, weight, loss, digest, wrong inputs."""
    mesh = Mesh.unbound(layout)
    ranks = mesh.layout.world_size
    rows = torch.tensor([[0.3 + rank, 3.0, 1.0, 7.0, 0.0] for rank in range(ranks)], dtype=torch.float64)
    return rows, places_of(mesh, "tp")


def data_ranks(mesh: Mesh) -> list[int]:
    """Those whose weights are added up: on the last stage."""
    return list(mesh.layout.ranks(DATA, mesh.layout.rank({**mesh.coordinates, "pp": mesh.layout.pp - 1})))


def host_takes(rows: Tensor, same_inputs: Tensor, layout: str) -> bool:
    """As Engine._decide and Decision.take do."""
    mesh, ranks = Mesh.unbound(layout), len(rows)
    columns = [torch.zeros(ranks)] * 5
    more, used = {"losses": torch.zeros(ranks, 2)}, torch.zeros(ranks, 1, dtype=torch.bool)
    table = step_status.StepStatus(rows[:, 1], rows[:, 2], *columns, more, used)
    digests = rows[same_inputs, 3]
    try:
        step_status.refuse_wrong(table, mesh)
    except IsogradError:
        return False
    weight = float(rows[data_ranks(mesh), 1].sum())
    equal = not bool(rows[:, 4].any()) and not bool((digests != digests[:, :1]).any())
    return equal and weight > 0 and math.isfinite(math.sqrt(sum(rows[:, 0].tolist())) / weight)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_card_takes_no_step_that_the_host_refuses(layout: str, wrong: str) -> None:
    rows, places = rows_of(layout)
    assert not verdict_of(rows, places, 1.0, 1.0).refused
    for column, number in product(range(5), WRONG[wrong]):
        if column == 3 and not math.isfinite(number):  # a digest is a whole number
            continue
        for rank in range(len(rows)):
            rows, _ = rows_of(layout)
            rows[rank, column] = number
            refused = bool(verdict_of(rows, places, 1.0, 1.0).refused)
            assert refused or host_takes(rows, places[2], layout), (column, rank)
            exact = wrong not in ("a tiny number", "an Inf")  # of these it leaves some to the host
            assert refused is not host_takes(rows, places[2], layout) or not exact, (column, rank)


@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_clips_as_the_host_does(layout: str, clip: float | None) -> None:
    rows, places = rows_of(layout)
    verdict = verdict_of(rows, places, clip, 4.0)
    scale = 1 / (float(rows[data_ranks(Mesh.unbound(layout)), 1].sum()) * 4.0)
    norm = math.sqrt(sum(rows[:, 0].tolist())) * scale
    factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    assert float(verdict.grad_norm) == pytest.approx(norm, rel=1e-15)
    assert float(verdict.divisor) == pytest.approx(1 / (scale * factor), rel=2.0**-23)
    assert not verdict.refused


def test_ranks_of_uneven_counts_are_added_in_pairs() -> None:
    rows = torch.rand(7, 5, dtype=torch.float64)
    rows[:, 3:] = 0
    places = places_of(Mesh.unbound("dp7"), "tp")
    s = rows[:, 0]
    pairs = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + s[6])
    expected = pairs.sqrt() * (1.0 / verdict_weight(rows[:, 1]))
    assert verdict_of(rows, places, None, 1.0).grad_norm.equal(expected)


def verdict_weight(w: Tensor) -> Tensor:
    return ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + w[6])
