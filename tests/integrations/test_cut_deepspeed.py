"""Sequences cut over cp, models cut over tp and ep, in a loop of DeepSpeed's: gradients by name, in fp64, those of
transformers on one device; and arguments that contradict each other. Runs that go on under another layout:
test_goes_on.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import world
from isograd.errors import IsogradError
from isograd.hf.force_fp64 import ForceFP64

from .test_cut_sequences import Rows, model, same


class SequenceGroups:
    """What DeepSpeed asks of an mpu."""

    def get_sequence_parallel_world_size(self) -> int:
        return 2

    def get_sequence_parallel_rank(self) -> int:
        return world.world()[0] % 2


class TensorGroups:
    """The same, as Megatron has it."""

    def get_tensor_model_parallel_world_size(self) -> int:
        return 2

    def get_tensor_model_parallel_rank(self) -> int:
        return world.world()[0] % 2


WAYS: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # by which a loop of DeepSpeed's asks for axes: keys, arguments
    "config": ({"sequence_parallel_size": 2}, {}),
    "mpu": ({}, {"mpu": SequenceGroups()}),
    "autotp": ({"tensor_parallel": {"autotp_size": 2}}, {}),
    "tensor mpu": ({}, {"mpu": TensorGroups()}),
}


def by_deepspeed(stage: int, accumulation: int, way: str, kind: str = "llama") -> dict[str, Any]:
    """A loop of DeepSpeed's: `engine(**batch)` and `engine.backward(output.loss)`. way: one of these, or a layout."""
    size, given = WAYS.get(way, ({}, {"layout": way}))
    if way == "mesh_param":
        given = {"mesh_param": (world.world()[1] // 2, 2)}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    shared = 1 if "ep" in way else 2
    rows = Rows(world.world()[1] // shared * accumulation)
    whole = model(kind)
    if stage > 1:
        given = given | {"model_parameters": whole.parameters()}
    engine, _, loader, _ = ig.integrations.deepspeed.initialize(
        model=whole, config=config | size, training_data=rows, **given
    )
    seen: dict[str, Any] = {}
    with ForceFP64():
        for number, batch in enumerate(loader):
            loss = engine(**batch).loss
            if number == 0:
                codes = []
                divided, weighed = lambda: engine.backward(loss / 2), lambda: engine.backward(loss, weight=7)
                for wrong in (divided, weighed) if shared > 1 else ():
                    try:
                        wrong()
                    except IsogradError as error:
                        codes.append(error.code)
                seen["codes"] = codes
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                seen |= {name: g.clone() for name, g in engine.engine.grads().items()}
            engine.step()
    seen |= {"loss": torch.tensor(engine.optimizer.stats.loss, dtype=torch.float64), "rows": engine.train_batch_size()}
    state = engine.module_state_dict()
    assert all(state[name].shape == p.shape for name, p in model(kind).named_parameters())
    return seen


@pytest.mark.medium
@pytest.mark.parametrize(
    "ranks, cases",
    [
        (2, [(1, 1, "config"), (3, 3, "mesh_param"), (1, 3, "dp1 cp2 ring")]),
        (2, [(0, 1, "autotp"), (1, 3, "tensor mpu"), (3, 3, "dp1 tp2 sp zero3")]),
        pytest.param(4, [(2, 3, "mpu"), (2, 3, "tensor mpu"), (0, 3, "dp2 tp2 sp zero2")], marks=pytest.mark.slow),
    ],
)
def test_a_loop_of_deepspeed_has_the_gradients_of_one_device_under_cp_and_tp(worlds, ranks: int, cases: Any) -> None:
    for stage, accumulation, way in cases:
        rows = ranks // 2 * accumulation
        for found in worlds(ranks).run(by_deepspeed, stage, accumulation, way):
            assert (found["rows"], found["codes"]) == (rows, ["IG861", "IG861"])
            same(found, rows)


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loop_of_deepspeed_has_them_under_ep(worlds, stage: int) -> None:
    for found in worlds(2).run(by_deepspeed, stage, 3, "dp2 ep2", "qwen3_moe"):
        same(found, 6, "qwen3_moe")


def deepspeed_of(**given: Any) -> Any:
    """An engine of DeepSpeed's loop, and what it says of a wrong argument."""
    config: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    config |= given.pop("config", {})
    return ig.integrations.deepspeed.initialize(model=model(), config=config, **given)[0]


def refused() -> dict[str, str]:
    """What is said of arguments that contradict each other."""
    said = {}
    stage = {"zero_optimization": {"stage": 2}}
    for what, given in {
        "stage": {"layout": "tp2 zero3", "config": stage},
        "size": {"layout": "tp2", "config": {"tensor_parallel": {"autotp_size": 1}}},
        "two": {"layout": "cp2", "mpu": SequenceGroups()},
        "stages": {"layout": "pp2"},
    }.items():
        try:
            deepspeed_of(**given)
        except IsogradError as error:
            said[what] = f"{error.code} {error.seen}"
    return said


@pytest.mark.medium
def test_two_layouts_that_differ_are_refused(worlds) -> None:
    for said in worlds(2).run(refused):
        assert said["stage"] == "IG865 zero_optimization.stage is not the zero3 of layout"
        assert said["size"].startswith("IG865 autotp_size is not the 2 of layout")
        assert said["two"].startswith("IG868 two of layout") and said["stages"].startswith("IG855 ")


def parted(layout: str) -> list[str]:
    """The rows of the second step are other ones on rank 1."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ig.integrations.deepspeed.initialize(model=model("llama"), config=config, layout=layout)
    rows, said = Rows(3), []
    for step in range(3):
        number = 2 if step == 1 and world.world()[0] else step
        batch = {name: value[None] for name, value in rows[number].items()}
        try:
            engine.backward(engine(**batch).loss)
            engine.step()
            said.append("trained")
        except IsogradError as error:
            said.append(error.code)
    return said


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["cp2 ulysses zero1", "cp2 ring zero3", "tp2 sp"])
def test_ranks_of_a_group_that_come_to_have_other_rows_are_refused(worlds, layout: str) -> None:
    assert worlds(2).run(parted, layout) == [["trained", "IG516", "trained"]] * 2
