"""TRL's GRPOTrainer under tp and ep: its own loop, generation, rewards and advantages; gradients by name, in fp64,
those of the stock trainer in one process, where a step is one micro-batch.

Prompts and completions are of very different lengths, and a step has one or three micro-batches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import isograd as ig
from isograd.hf.force_fp64 import ForceFP64

from . import test_cut_sequences as cut
from . import test_cut_trl as others
from .worlds import as_torchrun_starts_it

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.medium,
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func', which is an experimental feature"),  # TRL's own
]
LONGEST, OF_A_PROMPT, BETA = 6, 2, 0.2
calls: list[int] = []  # of the reward function: how many completions it was given


def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The same completions however many data ranks share a generation; of very different lengths."""
    made = [completion(p, place) for place, p in enumerate(prompts, trainer.accelerator.process_index * len(prompts))]
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": made, "logprobs": None}


def completion(prompt: str, place: int) -> list[int]:
    number = len(prompt.split()) + int(prompt.split(maxsplit=1)[0][1:]) + 3 * (place % OF_A_PROMPT)
    return [3 + (number * 5 + token) % (cut.VOCAB - 3) for token in range(1 + number * number % LONGEST)]


class Draws:
    """In the place of torch.multinomial: what each completion draws depends on its place among all of them."""

    def __init__(self, first: int) -> None:
        self.first, self.step = first, 0

    def __call__(self, probabilities: Tensor, num_samples: int) -> Tensor:
        self.step += 1
        place = self.first + torch.arange(len(probabilities), dtype=torch.float64)
        drawn = (0.37 * place + 0.61 * self.step) % 1
        return (probabilities.cumsum(-1) < drawn[:, None]).sum(-1, keepdim=True).clamp(max=probabilities.shape[-1] - 1)


def rewards(completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """Whole numbers, which differ within a group whose completions are alike."""
    calls.append(len(completion_ids))
    torch.rand(len(calls) % 3)  # a reward function may draw
    log_metric("length", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("length", [len(ids) for ids in completion_ids])
    return [float(sum(ids) % 7) - len(ids) + 2 * (place % OF_A_PROMPT) for place, ids in enumerate(completion_ids)]


def prompts(count: int) -> list[str]:
    """Of one to five words."""
    return [" ".join(f"w{(7 * row + 3 * word) % 50}" for word in range(1 + row * row % 5)) for row in range(count)]


def saved(folder: Path, family: str) -> str:
    cut.model(family).save_pretrained(folder)
    return str(folder)


def trained(
    folder: str, family: str, layout: str | None, accumulation: int, rows: int, options: dict[str, Any],
    resume: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Gradients of each step by name, parameters, the log and what was generated. layout: None for the stock trainer,
    whose micro-batch is the whole step."""
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, TrainerCallback

    calls.clear()
    data = others.rows_of(layout or "")
    size = rows if layout is None else rows // accumulation // data
    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as scratch, ForceFP64():
        given = {"output_dir": scratch, "num_generations": OF_A_PROMPT, "max_completion_length": LONGEST, "seed": 1}
        given |= {"per_device_train_batch_size": size, "per_device_eval_batch_size": size, "use_cpu": True}
        given |= {"gradient_accumulation_steps": 1 if layout is None else accumulation, "bf16": False}
        given |= {"max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "max_steps": 2}
        given |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "gradient_checkpointing": False}
        given |= {"router_aux_loss_coef": 0.0} if "moe" in family else {}
        generates = "temperature" in options
        arguments = trl.GRPOConfig(disable_tqdm=True, **(given | options))
        kind = trl.GRPOTrainer if layout is None else ig.integrations.trainer(trl.GRPOTrainer, layout)
        seen: list[dict[str, Tensor]] = []

        class Looks(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                own = {n: p.grad for n, p in found.model.named_parameters()} if layout is None else found.engine.grads()
                seen.append({name: g.clone() for name, g in own.items()})

        texts = Dataset(InMemoryTable.from_pylist([{"prompt": text} for text in prompts(12)]), fingerprint="prompts")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        found = kind(
            model, rewards, arguments, texts, eval_dataset=texts.select(range(4)), processing_class=others.tokenizer(),
            rollout_func=None if generates else rollout, callbacks=[Looks()],
        )  # fmt: skip
        generated: list[Any] = []
        generate = type(found)._generate

        def noted(asked: Any) -> Any:
            first = found.accelerator.process_index * len(asked)
            with mock.patch.object(torch, "multinomial", Draws(first)):
                generated.append((made := generate(found, asked))[1])
            return made

        found._generate = noted
        with others.ForceFP64InBackward():
            found.train(resume_from_checkpoint=resume)
        made = list(calls)
        logs = {
            name: list(kept) for name, kept in found._logs.items() if name in ("prompt", "completion", "advantages")
        }
        logs |= {name: {n: list(v) for n, v in found._logs[name].items()} for name in ("rewards", "extra")}
        evaluated = found.evaluate()
        weights = {n: p.detach().clone() for n, p in found.model.named_parameters()}
        return {
            "grads": seen, "log": found.state.log_history, "evaluated": evaluated, "generated": generated,
            "calls": made, "weights": weights, "logs": logs,
        }  # fmt: skip


def near(found: dict[str, Tensor], truth: dict[str, Tensor], case: object) -> None:
    assert found.keys() == truth.keys()
    errors = {n: float((found[n] - t).abs().max() / t.abs().max().clamp(min=1e-12)) for n, t in truth.items()}
    print(case, max(errors.values()))
    assert max(errors.values()) < 1e-9, (case, errors)


AS_ONE_DEVICE = {
    "num_tokens",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/rewards/mean",
    "rewards/rewards/std",
}
AS_ONE_DEVICE |= {f"completions/{what}_length" for what in ("mean", "min", "max")} | {"completions/clipped_ratio"}
OF_A_MICRO_BATCH = {"kl", "entropy", "clip_ratio/region_mean", "length"}  # TRL logs the mean of those of micro-batches
CASES = [
    (2, "tp2", 1, "llama", {"loss_type": "grpo", "beta": BETA}),
    (2, "tp2 sp zero3", 3, "llama", {"loss_type": "dapo", "temperature": 1.3}),
    (2, "tp2 zero1", 3, "llama", {"loss_type": "grpo", "num_iterations": 2, "beta": BETA, "max_steps": 3}),
    (2, "dp2 ep2 zero3", 3, "qwen3_moe", {"loss_type": "dapo", "temperature": 1.3}),
    pytest.param(4, "dp2 tp2 sp zero2", 3, "llama", {"loss_type": "grpo", "temperature": 1.3, "beta": BETA},
                 marks=pytest.mark.slow),
    pytest.param(4, "dp2 tp2 zero3", 1, "llama", {"loss_type": "bnpo"}, marks=pytest.mark.slow),
    pytest.param(4, "dp2 tp2 ep4 zero1", 3, "qwen3_moe", {"loss_type": "grpo", "temperature": 1.3},
                 marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "layout", "accumulation", "family", "options"), CASES)
def test_grpo_has_the_gradients_of_one_device(
    worlds, tmp_path: Path, ranks: int, layout: str, accumulation: int, family: str, options: dict[str, Any]
) -> None:
    folder, rows = saved(tmp_path, family), 12
    truth = trained(folder, family, None, 1, rows, options)
    assert all(float(g.abs().max()) > 0 for g in truth["grads"][0].values())
    every = worlds(ranks).run(trained, folder, family, layout, accumulation, rows, options)
    data = others.rows_of(layout)
    ours = [rows for found in every[:: ranks // data] for rows in found["generated"][:1]]
    assert [ids for rows in ours for ids in rows] == truth["generated"][0]
    for rank, found in enumerate(every):
        assert len(found["grads"]) == len(truth["grads"])
        for step, true in enumerate(truth["grads"]):
            near(found["grads"][step], true, (rank, step))
        tp_index = rank % (ranks // data)
        assert sum(found["calls"]) * data == (sum(truth["calls"]) if tp_index == 0 else 0)
        for one, other in zip(found["log"], truth["log"], strict=True):
            for name in other.keys() & AS_ONE_DEVICE | (
                other.keys() & OF_A_MICRO_BATCH if accumulation == 1 else set()
            ):
                assert one[name] == pytest.approx(other[name], rel=1e-5), name
        if tp_index == 0:
            assert found["logs"] == truth["logs"]


@pytest.mark.parametrize(
    ("ranks", "layout", "then", "family"),
    [
        (2, "tp2 sp zero1", "dp2 zero3", "llama"),
        (2, "dp2 zero2", "tp2", "llama"),
        pytest.param(2, "dp2 ep2 zero1", "tp2 zero3", "qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_layout(
    worlds, tmp_path: Path, ranks: int, layout: str, then: str, family: str
) -> None:
    folder, options = saved(tmp_path / "first", family), {"loss_type": "grpo", "max_steps": 4}
    options |= {"beta": BETA} if family == "llama" else {}  # a reference takes grouped products, which have no fp64
    truth = trained(folder, family, None, 1, 12, options)
    written = options | {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2}
    worlds(ranks).run(trained, folder, family, layout, 3, 12, written | {"max_steps": 2})
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    for found in worlds(ranks).run(trained, folder, family, then, 1, 12, written, checkpoint):
        assert len(found["grads"]) == 2
        for step, true in enumerate(truth["grads"][2:]):
            near(found["grads"][step], true, step)


def drawn(folder: str, layout: str, options: dict[str, Any]) -> Any:
    """What ranks generate by torch's own random numbers, and their weights behind two steps; or a refusal."""
    own = mock.patch.object(Draws, "__call__", lambda self, *given, **named: multinomial(*given, **named))
    with own, mock.patch("trl.trainer.grpo_trainer.VLLMGeneration"):
        try:
            found = trained(folder, "llama", layout, 1, 12, options)
        except ig.IsogradError as error:
            return str(error)
    return found["generated"], found["weights"]


multinomial = torch.multinomial


def test_ranks_of_a_tp_group_draw_the_same_completions(worlds, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    (mine, _), (others, _) = worlds(2).run(drawn, folder, "tp2 sp", {"loss_type": "dapo", "temperature": 1.3})
    assert mine == others and mine[0] != mine[1]
    assert len({tuple(ids) for ids in mine[0]}) > len(mine[0]) // 2  # the two of a prompt differ


def test_what_tp_and_ep_do_not_have_is_refused_by_name(worlds, tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    for layout, options, word in (
        ("tp2", {"use_vllm": True, "vllm_mode": "colocate"}, "use_vllm"),
        ("tp2", {"num_generations": 8}, "num_generations=8 of 12 on the data ranks: set steps_per_generation"),
        ("tp2", {"per_device_eval_batch_size": 1}, "set per_device_eval_batch_size"),
        ("cp2 ulysses", {}, "IG855"),
        ("pp2", {}, "IG855"),
    ):
        for said in worlds(2).run(drawn, folder, layout, {"loss_type": "grpo"} | options):
            assert word in said, said
