"""TRL's GRPOTrainer on the engine: runs that are cut and resumed, adapters, and completions that vLLM would make."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import isograd as ig
from isograd.comm import world

from . import toys
from .test_grpo import alike, on, trained

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func', which is an experimental feature"),  # TRL's own
]
STEADY = {"lr_scheduler_type": "constant", "save_strategy": "steps"}
RUNS: list[dict[str, Any]] = [
    {"loss_type": "grpo", "max_steps": 7, "save_steps": 6},  # an epoch has six steps
    {"loss_type": "dapo", "max_steps": 4, "save_steps": 2, "num_iterations": 2, "beta": 0.1},
    {"loss_type": "bnpo", "max_steps": 4, "save_steps": 3, "temperature": 1.3},  # sampled
]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: " ".join(map(str, options.values())))
def test_a_run_that_is_resumed_ends_as_one_without_a_cut(worlds, tmp_path: Path, options: dict[str, Any]) -> None:
    toys.model().save_pretrained(tmp_path / "first")
    first, cut = str(tmp_path / "first"), options["save_steps"]
    given = options | STEADY | {"output_dir": str(tmp_path)}
    uncut = on(2, worlds, "zero1", True, given, 2, first)
    assert any(row["grad_norm"] > 0 for row in uncut[0]["log"][cut:])
    for layout in ("zero1", "zero3"):
        resumed = on(2, worlds, layout, True, given, 2, first, str(tmp_path / f"checkpoint-{cut}"))
        for one, expected in zip(resumed, uncut, strict=True):
            alike(one, expected, layout)


def refusals(folder: str) -> list[str]:
    """Of runs that resume where a checkpoint does not have all."""
    said = []
    for options in (
        {"num_iterations": 2, "save_steps": 3},
        {"steps_per_generation": 12, "save_steps": 2},
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "beta": 0.1, "save_steps": 1},
    ):
        given = {"output_dir": folder, "max_steps": 3, **STEADY, **options}
        trained(None, True, given, 2, folder)
        try:
            trained(None, True, given | {"max_steps": 6}, 2, folder, f"{folder}/checkpoint-{options['save_steps']}")
        except ig.IsogradError as error:
            said.append(str(error))
    return said


def test_a_resume_without_all_that_the_run_had_is_refused_with_the_steps_that_can_be_resumed(tmp_path: Path) -> None:
    toys.model().save_pretrained(tmp_path)
    middle, third, mixed = refusals(str(tmp_path))
    assert all("IG873" in text for text in (middle, third, mixed))
    assert "save_steps=2" in middle and "save_steps=3" in third
    assert "sync_ref_model" in mixed


def test_a_further_train_makes_completions_of_its_own(tmp_path: Path) -> None:
    """The first one ends in the middle of a generation, whose completions the stock Trainer would go on with."""
    from trl import GRPOTrainer

    train, generate = GRPOTrainer.train, GRPOTrainer._generate_and_score_completions
    made = []

    def twice(self: Any, **given: Any) -> None:
        train(self, **given)
        made.append("a further train")
        train(self, **given)

    def noted(self: Any, inputs: Any) -> Any:
        made.append(self.state.global_step)
        return generate(self, inputs)

    toys.model().save_pretrained(tmp_path)
    with mock.patch.multiple(GRPOTrainer, train=twice, _generate_and_score_completions=noted):
        trained(None, True, {"num_iterations": 2, "max_steps": 3}, toys.STEP, str(tmp_path))
    assert made == [0, 2, "a further train", 0, 2]


@pytest.mark.parametrize("given", ["config", "model"])
def test_an_adapter_trains_as_with_the_stock_trainer_and_resumes(worlds, tmp_path: Path, given: str) -> None:
    """The reference is the model without its adapter, or with the one that it began with."""
    toys.model().save_pretrained(tmp_path / "first")
    first, options = str(tmp_path / "first"), {"loss_type": "grpo", "beta": 0.2, **STEADY, "save_steps": 2}
    expected = trained(None, False, options | {"save_strategy": "no"}, toys.STEP, first, None, given)
    assert all(row["grad_norm"] > 0 for row in expected["log"])
    for ranks, layout, micro in ((2, "zero1", 2), (2, "zero3", 4)):
        folder = tmp_path / f"{ranks} {layout}"
        for one in on(ranks, worlds, layout, True, options | {"output_dir": str(folder)}, micro, first, None, given):
            alike(one, expected, (ranks, layout))
        assert (folder / "checkpoint-2" / "adapter_model.safetensors").exists()
    checkpoint = str(tmp_path / "2 zero3" / "checkpoint-2")
    for one in on(2, worlds, "zero1", True, options | {"output_dir": str(folder)}, 2, first, checkpoint, given):
        alike(one, expected, "resumed")


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_an_adapter_generates(worlds, layout: str) -> None:
    """By sampling, with a checkpointed forward, as GRPOConfig has it."""
    options = {"temperature": 1.3, "loss_type": "dapo", "beta": 0.1, "gradient_checkpointing": True}
    one, other = on(2, worlds, layout, True, options, 2, None, None, "config")
    assert any(row["grad_norm"] > 0 for row in one["log"])
    assert all(torch.equal(value, other["parameters"][name]) for name, value in one["parameters"].items())


class StandsForVllm:
    """What GRPOTrainer asks of vLLM: it takes the weights of the model, and makes completions by them."""

    def __init__(self, model: Any, **_: Any) -> None:
        self.model, self.sent = model, 0.0

    def sync_weights(self) -> None:
        """As TRL's reads them: parameter by parameter, whole."""
        assert all(parameter.numel() for parameter in self.model.parameters())
        self.sent = sum(float(parameter.detach().abs().sum()) for parameter in self.model.parameters())

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        """Completions that depend on the weights sent, in their log probabilities."""
        completions = []
        for place, prompt in enumerate(prompts, world.world()[0] * len(prompts)):
            number = prompt[0] + 3 * (place % 2)
            completions.append([3 + (number * 5 + token) % (toys.VOCAB - 3) for token in range(1 + number**2 % 6)])
        told = [[[-3.5 - self.sent / 1e4 - token % 5 / 5] for token in ids] for ids in completions]
        return prompts, completions, told, None


def by_vllm(*args: Any) -> dict[str, Any]:
    from trl.trainer import grpo_trainer

    with mock.patch.object(grpo_trainer, "VLLMGeneration", StandsForVllm):
        return trained(*args)


@pytest.mark.parametrize("loss", ["dapo", "vespo"])
def test_completions_and_log_probabilities_of_vllm_train_as_in_one_process(worlds, tmp_path: Path, loss: str) -> None:
    toys.model().save_pretrained(tmp_path)
    options = {"use_vllm": True, "vllm_mode": "colocate", "loss_type": loss, "max_completion_length": 6}
    options["vllm_importance_sampling_mode"] = "token_truncate"
    expected = by_vllm(None, False, options, toys.STEP, str(tmp_path))
    assert all(row["grad_norm"] > 0 for row in expected["log"])
    for layout in ("zero1", "zero3"):
        for one in worlds(2).run(by_vllm, layout, True, options, 2, str(tmp_path)):
            alike(one, expected, layout)
