"""Other libraries' loops on imagined cards: gradients and parameters of one device, in fp64, and nothing races.

The loops are those of tests/integrations. The world is joined by isograd, or (`JOINED`) before it by a library that
gives no device_id. "FOLDER" is one of the test's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
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

JOINED, FOLDER, RECOMPUTED = True, "FOLDER", {"activation_checkpoint_interval": 2}
stock = cache(trainer.stock)
of_accelerate, of_deepspeed, of_pipe = map(cache, (accelerate.one_device, deepspeed.one_device, pipe.one_device))


def is_stock(found: dict[str, Any]) -> None:
    trainer.same(found, stock())
    assert found["evaluated"] == pytest.approx(stock()["evaluated"], rel=1e-6)


def is_uncut(found: tuple[Any, Any]) -> None:
    for name, value in found[1]["parameters"].items():
        assert torch.allclose(found[0]["parameters"][name], value, rtol=1e-9, atol=1e-11), name


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


def is_accelerates(found: dict[str, Any]) -> None:
    same(found, of_accelerate(True))


def is_deepspeeds(each: list[Any]) -> None:
    """Of each stage: weighed, and not."""
    for place, found in enumerate(each):
        deepspeed.is_equal(found, of_deepspeed(place % 2 == 0))
    assert len(each) == 4


def is_resumed(found: tuple[Any, ...]) -> None:
    deepspeed.is_equal(found[0], of_deepspeed(True))
    assert found[1] == ("global_step2", {"epoch": 7}, (None, None))
    assert found[2]


def is_a_pipes(micro_batches: int, found: Any) -> None:
    pipe.is_equal(found, of_pipe("tied", micro_batches))


CASES: list[Any] = some(
    ("own", JOINED, trainer.run, ("zero1",), is_stock),
    ("own", JOINED, accelerate.ours, (True, "zero3"), is_accelerates),
    ("own", JOINED, accelerate.ours, (True, None), is_accelerates),
    ("own", not JOINED, deepspeed.ours, ([1, 3],), is_deepspeeds),
    ("own", not JOINED, pipe.trained, ("tied", 2, 1, 3, {}), partial(is_a_pipes, 3)),
    slow=(
        ("default", JOINED, trainer.run, (None,), is_stock),
        ("own", not JOINED, trainer.run, ("dp2 zero3",), is_stock),
        ("own", JOINED, trainer.resumed, (FOLDER,), is_uncut),
        ("default", not JOINED, accelerate.ours, (True, "zero1"), is_accelerates),
        ("default", not JOINED, accelerate.ours, (True, None), is_accelerates),
        ("own", JOINED, accelerate.resumed_under, ("zero3", "zero1"), lambda seen: is_accelerates(seen["found"])),
        ("default", JOINED, deepspeed.ours, ([0, 2],), is_deepspeeds),
        ("own", JOINED, deepspeed.ours, ([3, 2],), is_deepspeeds),
        ("own", not JOINED, deepspeed.saved, (FOLDER,), is_resumed),
        ("own", not JOINED, pipe.trained, ("tied", 1, 1, 3, {}), partial(is_a_pipes, 6)),
        (
            "own",
            not JOINED,
            pipe.trained,
            ("tied", 2, 0, 3, {"activation_checkpoint_interval": 2}),
            partial(is_a_pipes, 3),
        ),
    ),
)


@pytest.mark.parametrize(("stream", "join", "program", "args", "is_right"), CASES)
def test_a_loop_trains_saves_and_resumes_as_on_one_device(
    tmp_path: Path, stream: str, join: bool, program: Callable[..., Any], args: tuple[Any, ...], is_right: Any
) -> None:
    folder = [str(tmp_path) if one == FOLDER else one for one in args]
    for found in values(2, stream, program, *folder, join=join):
        is_right(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("cp2 ulysses zero1", 2), ("cp2 ring zero3", 2), ("tp2 zero1", 2), ("dp2 tp2 sp zero3", 4), ("pp2 1f1b", 2)],
)
def test_the_trainers_gradients_under_cut_layouts_are_those_of_one_device(layout: str, ranks: int) -> None:
    found = values(ranks, "own", cut.by_the_trainer, layout, 3)
    rows = found[0]["rows"]
    whole = {name: value for one in found for name, value in one.items()} | {"loss": cut.one_device(rows)["loss"]}
    cut.same(whole, rows)


STAGES = [None, "zero1", "dp2 zero3"]


@pytest.mark.slow
@pytest.mark.parametrize("join", [JOINED, not JOINED])
def test_loops_of_fabric_and_fits_of_lightning_train_as_one_device(join: bool) -> None:
    from tests.integrations import test_fabric as fabric
    from tests.integrations import test_lightning as lightning

    for each in values(2, "own", fabric.ours, STAGES, join=join):
        for place, found in enumerate(each):
            fabric.is_equal(found, fabric.one_device(place % 2 == 0))
    for each in values(2, "own", lightning.ours, True, STAGES, join=join):
        for found in each:
            same(found, lightning.one_device(True))


@pytest.mark.slow
def test_fabric_and_lightning_resume_and_a_fit_is_validated_behind_its_end(tmp_path: Path) -> None:
    """Fabric at another stage. Lightning moves a module to the CPU when a fit is over: not what an engine holds."""
    from tests.integrations import test_fabric as fabric
    from tests.integrations import test_lightning as lightning

    for found, *_, kept in values(2, "own", fabric.saved, str(tmp_path / "fabric")):
        fabric.is_equal(found, fabric.one_device(True))
        assert kept
    for found, *_ in values(2, "own", lightning.saved, str(tmp_path / "lightning")):
        same(found, lightning.one_device(True))
    for held_out, expected, *_ in values(2, "own", lightning.behind_a_fit, str(tmp_path / "behind")):
        assert held_out == pytest.approx(expected, rel=1e-6)


def keeps_the_cards_numbers() -> bool:
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    build(hugging.config_of("llama"), Mesh.unbound("1"), torch.float32)
    return torch.equal(before, torch.cuda.get_rng_state())


def test_building_a_model_leaves_the_seed_of_a_card_alone() -> None:
    (result,) = run(keeps_the_cards_numbers)
    assert result.value is True, result.error
