"""A run with experts goes on under any other ep: its checkpoint holds all experts as one tensor, each element once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from isograd.checkpoint import CheckpointManager
from isograd.checkpoint.read import Reader
from isograd.core.mesh import DATA
from tests.checkpoint import toys
from tests.checkpoint.test_resume import assert_same_run, world_of
from tests.engine import folded

CHAIN = (("dp2 ep2 zero1", 2), ("dp4 ep4 zero3", 4), ("tp2", 2), ("1", 1), ("dp2 tp2 ep2 zero2", 4), ("dp2 tp2 ep4", 4))
MICRO_BATCHES = 4


def one_step(folder: Path, layout: str, number: int) -> list[str]:
    """Go on for a step from what the layout before has saved. In what it differs from one device's step."""
    truth = folded.one_device(MICRO_BATCHES, len(CHAIN))
    model, engine = folded.engine_of(layout)
    if number:
        with engine.full_parameters(), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
    with CheckpointManager(folder, engine) as keeper:
        found = keeper.load()
        assert (found.step if found else 0) == number
        outcome = folded.go_on(engine, [number], MICRO_BATCHES // engine.mesh.size(DATA))
        keeper.save(number + 1)
    expected = folded.Outcome([truth.gradients[number]], {}, [truth.numbers[number]])
    return [f"{layout}: {line}" for line in folded.differences(outcome, expected)]


def test_experts_go_on_under_another_ep(worlds, tmp_path: Path) -> None:
    for number, (layout, ranks) in enumerate(CHAIN):
        assert worlds(ranks).run(partial(one_step, tmp_path, layout, number)) == [[]] * ranks
    reader = Reader(tmp_path / f"step-{len(CHAIN):08d}")
    truth = folded.one_device(MICRO_BATCHES, len(CHAIN)).parameters
    assert {key for key in reader.manifest.tensors if key.startswith("model/")} == {f"model/{n}" for n in truth}
    for name, value in truth.items():
        saved = reader.read(f"model/{name}")
        assert float((saved - value).norm()) <= 1e-9 * float(value.norm()), name
    assert reader.read("optimizer/exp_avg/blocks.0.experts.weight").shape == (folded.EXPERTS, 16, 16)
    reader.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [("dp2 ep2 zero1", "dp4 ep4 zero3"), ("dp2 tp2 sp ep4 zero2", "tp2"), ("pp2 dp2 ep2 zero1", "dp2 ep2 zero3")],
)
def test_a_transformer_with_experts_goes_on_under_another_layout(
    worlds, tmp_path: Path, before: str, after: str
) -> None:
    """The counts of the step before and the bias of the choice go with it."""
    truth = worlds(world_of(before)).run(partial(toys.save_then_go_on, tmp_path, before, model="experts"))[0]
    for found in worlds(world_of(after)).run(partial(toys.resume, tmp_path, after, model="experts")):
        assert_same_run(found, truth)
