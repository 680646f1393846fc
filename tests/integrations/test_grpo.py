"""TRL's GRPOTrainer on the engine: its own loop, generation, rewards and advantages, against the stock one in one
process, where a step is one micro-batch of all completions, which are uneven. TRL's log probabilities are in fp32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.comm import world

from . import toys
from .worlds import as_torchrun_starts_it

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func', which is an experimental feature"),  # TRL's own
]
LONGEST, OF_A_PROMPT = 6, 2  # tokens of a completion, completions of a prompt


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The same completions however many ranks share a generation; of very different lengths; in one of five
    no token counts."""
    made, counts = [], []
    for place, prompt in enumerate(prompts, world.world()[0] * len(prompts)):
        number = int(prompt.split()[0][1:]) + 3 * (place % OF_A_PROMPT)
        length = 1 + number * number % LONGEST
        made.append([3 + (number * 5 + token) % (toys.VOCAB - 3) for token in range(length)])
        counts.append([int(number % 5 != 4)] * length)
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": made, "logprobs": None, "env_mask": counts}


def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) - len(ids) for ids in completion_ids]


def trained(
    layout: str | None, ours: bool, options: dict[str, Any], micro: int = toys.STEP, saved: str | None = None,
    resume: str | None = None, adapter: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """saved: a folder from which TRL loads its reference, too. resume: a checkpoint. adapter: given as "config", or as
    a "model" that has it already."""
    import trl
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    from .test_trl import texts, tokenizer

    with as_torchrun_starts_it() as (_, ranks), tempfile.TemporaryDirectory() as scratch:
        given = {"num_generations": OF_A_PROMPT, "max_completion_length": LONGEST, "temperature": 1.0, "max_steps": 3}
        given |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": toys.STEP // (micro * ranks)}
        given |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2, "seed": 1}
        given |= {"max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
        arguments = trl.GRPOConfig(disable_tqdm=True, **({"output_dir": scratch} | given | options))
        kind = ig.integrations.trainer(trl.GRPOTrainer, layout) if ours else trl.GRPOTrainer
        rows = texts("SFT").select_columns(["prompt"])
        model = toys.model() if saved is None else GPT2LMHeadModel.from_pretrained(saved, dtype=torch.float64)
        torch.manual_seed(2)  # of adapters
        parts = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        found = kind(
            get_peft_model(model, parts) if adapter == "model" else model, rewards, arguments, rows,
            processing_class=tokenizer(), peft_config=parts if adapter == "config" else None,
            rollout_func=None if options.get("temperature") or options.get("use_vllm") else rollout,
        )  # fmt: skip
        found.train(resume_from_checkpoint=resume)
        if ours:
            with found.engine.full_parameters():
                return toys.trained(found)
        return toys.trained(found)


def on(ranks: int, worlds: Any, *args: Any) -> list[dict[str, Any]]:
    return [trained(*args)] if ranks == 1 else worlds(ranks).run(trained, *args)


LOSSES: list[dict[str, Any]] = [
    *({"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")),
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "beta": 0.2, "num_iterations": 2},
    {"loss_type": "dapo", "entropy_coef": 0.1},
    {"loss_type": "bnpo", "importance_sampling_level": "sequence", "beta": 0.1},
]


@pytest.mark.parametrize("options", LOSSES, ids=lambda options: " ".join(map(str, options.values())))
def test_grpo_trains_as_one_device_with_the_whole_step_in_a_micro_batch(
    worlds, tmp_path: Path, options: dict[str, Any]
) -> None:
    toys.model().save_pretrained(tmp_path)
    expected = trained(None, False, options, saved=str(tmp_path))
    assert all(row["grad_norm"] > 0 for row in expected["log"])
    cases = [(1, None, 2), (2, "zero1", 2)]
    if options == {"loss_type": "grpo"}:
        cases += [(2, None, 4), (2, "zero3", 2), (4, "zero2", 2)]
    for ranks, layout, micro in cases:
        for one in on(ranks, worlds, layout, True, options, micro, str(tmp_path)):
            alike(one, expected, (ranks, layout))


def alike(one: dict[str, Any], expected: dict[str, Any], case: object) -> None:
    for mine, theirs in zip(one["log"], expected["log"], strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), case
    assert one["parameters"].keys() == expected["parameters"].keys()
    for name, value in expected["parameters"].items():
        # Norms are equal to 1e-5: log probabilities are in fp32. AdamW divides by a gradient's size, which
        # makes the noise of a small one as large as that of a large one; a step moves a parameter by 1e-2.
        assert torch.allclose(one["parameters"][name], value, rtol=1e-4, atol=2e-5), (case, name)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_ranks_generate_with_the_whole_model_and_stay_alike(worlds, layout: str) -> None:
    """TRL's own generation, by sampling: completions differ from rank to rank in number of tokens."""
    first, second = worlds(2).run(trained, layout, True, {"temperature": 1.3, "loss_type": "dapo"}, 2)
    before = toys.model().state_dict()
    for name, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][name]), name
    assert any(not torch.equal(value, before[name]) for name, value in first["parameters"].items())


def refused(folder: str) -> list[str]:
    import trl

    said = []
    for options in (
        {"loss_type": "other"},
        {"top_entropy_quantile": 0.5},
        {"use_adaptive_entropy": True},
        {"loss_type": "grpo", "entropy_coef": 0.1},
        {"sync_ref_model": True, "beta": 0.1},
    ):
        try:
            trained("zero3", True, options, toys.STEP, folder)
        except (ig.IsogradError, ValueError) as error:
            said.append(str(error))
    stock = trl.GRPOTrainer

    class Own(stock):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    trl.GRPOTrainer = Own
    try:
        trained(None, True, {})
    except ig.IsogradError as error:
        said.append(str(error))
    finally:
        trl.GRPOTrainer = stock
    return said


def test_what_is_not_a_mean_over_the_step_is_refused_by_name(tmp_path: Path) -> None:
    toys.model().save_pretrained(tmp_path)
    words = ["loss_type='other'", "top_entropy_quantile", "use_adaptive_entropy", "entropy_coef with loss_type='grpo'"]
    words += ["sync_ref_model with zero3"]
    for text, word in zip(refused(str(tmp_path)), [*words, "counts of the whole step"], strict=True):
        assert "IG856" in text and word in text
