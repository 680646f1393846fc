"""Other libraries' loops on imagined cards: gradients and parameters of one device, in fp64, and nothing races.

The loops are those of tests/integrations. The world is joined by isograd, or (`JOINED`) before it by a library that
gives no device_id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isograd.core.mesh import Mesh
from isograd.hf.build import build
from tests.hf import test_hugging as hugging
from tests.integrations import test_accelerate as accelerate
from tests.integrations import test_cut_sequences as cut
from tests.integrations import test_deepspeed_loop as deepspeed
from tests.integrations import test_deepspeed_pipe as pipe
from tests.integrations import test_trainer as trainer

from . import run
from .on_cards import some, values

JOINED = True


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


TRAINER = some(("zero1", "own", JOINED), slow=((None, "default", JOINED), ("dp2 zero3", "own", not JOINED)))


@pytest.mark.parametrize(("layout", "stream", "join"), TRAINER)
def test_the_trainer_trains_as_the_stock_one_on_one_device(layout: str | None, stream: str, join: bool) -> None:
    expected = trainer.stock()
    for found in values(2, stream, trainer.run, layout, join=join):
        trainer.same(found, expected)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)


CUT = some(
    slow=(("cp2 ulysses zero1", 2), ("cp2 ring zero3", 2), ("tp2 zero1", 2), ("dp2 tp2 sp zero3", 4), ("pp2 1f1b", 2))
)


@pytest.mark.parametrize(("layout", "ranks"), CUT)
def test_the_trainers_gradients_under_cut_layouts_are_those_of_one_device(layout: str, ranks: int) -> None:
    found = values(ranks, "own", cut.by_the_trainer, layout, 3)
    rows = found[0]["rows"]
    whole = {name: value for one in found for name, value in one.items()} | {"loss": cut.one_device(rows)["loss"]}
    cut.same(whole, rows)


@pytest.mark.slow
def test_the_trainer_resumes_on_cards_under_other_layouts(tmp_path: Path) -> None:
    for twice, uncut in values(2, "own", trainer.resumed, str(tmp_path), join=JOINED):
        for name, value in uncut["parameters"].items():
            assert torch.allclose(twice["parameters"][name], value, rtol=1e-9, atol=1e-11), name


ACCELERATE = some(
    ("zero3", "own", JOINED), (None, "own", JOINED),
    slow=(("zero1", "default", not JOINED), (None, "default", not JOINED)),
)  # fmt: skip


@pytest.mark.parametrize(("layout", "stream", "join"), ACCELERATE)
def test_a_loop_of_accelerate_trains_as_one_device(layout: str | None, stream: str, join: bool) -> None:
    expected = accelerate.one_device(True)
    for found in values(2, stream, accelerate.ours, True, layout, join=join):
        same(found, expected)


@pytest.mark.slow
def test_accelerates_state_of_one_stage_is_loaded_under_another() -> None:
    expected = accelerate.one_device(True)
    for seen in values(2, "own", accelerate.resumed_under, "zero3", "zero1", join=JOINED):
        same(seen["found"], expected)


DEEPSPEED = some(([1, 3], "own", not JOINED), slow=(([0, 2], "default", JOINED), ([3, 2], "own", JOINED)))


@pytest.mark.parametrize(("stages", "stream", "join"), DEEPSPEED)
def test_a_loop_of_deepspeed_trains_as_one_device(stages: list[int], stream: str, join: bool) -> None:
    expected = [deepspeed.one_device(weighed) for weighed in (True, False)]
    for each in values(2, stream, deepspeed.ours, stages, join=join):
        assert len(each) == 2 * len(stages)
        for place, found in enumerate(each):
            deepspeed.is_equal(found, expected[place % 2])


PIPES = some((2, 1, {}), slow=((1, 1, {}), (2, 0, {"activation_checkpoint_interval": 2})))


@pytest.mark.parametrize(("stages", "stage", "more"), PIPES)
def test_a_pipeline_of_deepspeed_trains_as_one_device(stages: int, stage: int, more: dict[str, Any]) -> None:
    expected = pipe.one_device("tied", 2 // stages * 3)
    for found in values(2, "own", pipe.trained, "tied", stages, stage, 3, more):
        pipe.is_equal(found, expected)


@pytest.mark.slow
def test_a_checkpoint_of_deepspeeds_loop_resumes_at_another_stage(tmp_path: Path) -> None:
    expected = deepspeed.one_device(True)
    for found, loaded, same_weights, *_ in values(2, "own", deepspeed.saved, str(tmp_path)):
        deepspeed.is_equal(found, expected)
        assert loaded == ("global_step2", {"epoch": 7}, (None, None))
        assert same_weights


@pytest.mark.slow
@pytest.mark.parametrize("join", [JOINED, not JOINED])
def test_a_loop_of_fabric_trains_as_one_device(join: bool) -> None:
    from tests.integrations import test_fabric as fabric

    for each in values(2, "own", fabric.ours, [None, "zero1", "dp2 zero3"], join=join):
        for place, found in enumerate(each):
            fabric.is_equal(found, fabric.one_device(place % 2 == 0))


@pytest.mark.slow
def test_a_loop_of_fabric_resumes_at_another_stage(tmp_path: Path) -> None:
    from tests.integrations import test_fabric as fabric

    for found, *_, kept in values(2, "own", fabric.saved, str(tmp_path)):
        fabric.is_equal(found, fabric.one_device(True))
        assert kept


@pytest.mark.slow
@pytest.mark.parametrize("join", [JOINED, not JOINED])
def test_a_fit_of_lightning_trains_as_one_device(join: bool) -> None:
    from tests.integrations import test_lightning as lightning

    expected = lightning.one_device(True)
    for each in values(2, "own", lightning.ours, True, [None, "zero1", "dp2 zero3"], join=join):
        for found in each:
            same(found, expected)


@pytest.mark.slow
def test_a_fit_of_lightning_is_saved_behind_its_end_and_resumed(tmp_path: Path) -> None:
    """Lightning moves a module to the CPU when a fit is over: not what an engine holds."""
    from tests.integrations import test_lightning as lightning

    for found, *_ in values(2, "own", lightning.saved, str(tmp_path)):
        same(found, lightning.one_device(True))


@pytest.mark.slow
def test_a_fit_of_lightning_is_validated_behind_its_end(tmp_path: Path) -> None:
    from tests.integrations import test_lightning as lightning

    for held_out, expected, *_ in values(2, "own", lightning.behind_a_fit, str(tmp_path)):
        assert held_out == pytest.approx(expected, rel=1e-6)


def keeps_the_cards_numbers() -> bool:
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    build(hugging.config_of("llama"), Mesh.unbound("1"), torch.float32)
    return torch.equal(before, torch.cuda.get_rng_state())


def test_building_a_model_leaves_the_seed_of_a_card_alone() -> None:
    (result,) = run(keeps_the_cards_numbers)
    assert result.value is True, result.error
