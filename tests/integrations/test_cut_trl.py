"""TRL's SFTTrainer, DPOTrainer and RewardTrainer where ranks share their rows or their model: gradients by name, in
fp64, those of plain torch on one device.

Answers are of very different lengths, the last tokens do not divide, and a step has one or three micro-batches.
"""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import isograd as ig
from isograd.hf.force_fp64 import ForceFP64
from tests.sizes import on_gloo

from . import test_cut_sequences as cut
from . import test_goes_on as goes_on
from .worlds import as_torchrun_starts_it

pytest.importorskip("trl")
PROMPT, PAIRS, BETA = 3, 2, 0.3
MICROS = {"SFT": goes_on.WHOLE, "DPO": goes_on.WHOLE // PAIRS, "Reward": goes_on.WHOLE // PAIRS}  # of a step


class ForceFP64InBackward(TorchDispatchMode):
    """TRL's backward adds up in fp32 (5e-7 on one device, too), and ForceFP64 does not reach into a backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{n: torch.float64 if v is torch.float32 else v for n, v in (kwargs or {}).items()})


def answer(number: int) -> list[int]:
    return [3 + (7 * number + 5 * place) % (cut.VOCAB - 3) for place in range(1 + number * number % 6)]


def rows(kind: str, steps: int) -> Any:
    """Tokens, so that nothing is prepared: a micro-batch has two pairs, an SFT one a row."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    numbers = range(steps * (1 if kind == "SFT" else PAIRS))
    prompts = [[4 + row, 5, 6 + row] for row in numbers]
    if kind == "DPO":
        made = [
            {"prompt_ids": prompts[row], "chosen_ids": answer(row + 1), "rejected_ids": answer(row + 3)}
            for row in numbers
        ]
    elif kind == "Reward":
        made = [
            {"chosen_ids": prompts[row] + answer(row + 1), "rejected_ids": prompts[row] + answer(row + 3)}
            for row in numbers
        ]
    else:
        made = [{"input_ids": p + answer(p[0]), "labels": [-100] * PROMPT + answer(p[0])} for p in prompts]
    return Dataset(InMemoryTable.from_pylist(made), fingerprint=kind)  # without one it pickles the table


def policy(kind: str, family: str) -> Any:
    """A language model; for rewards one with a score in the place of its head."""
    from transformers import AutoModelForSequenceClassification

    model = cut.model(family)
    if kind != "Reward":
        return model
    torch.manual_seed(2)
    model.config.num_labels, model.config.pad_token_id = 1, 0
    return AutoModelForSequenceClassification.from_config(model.config).double()


def reference(family: str) -> Any:
    model = cut.model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def of_rows(kind: str, given: Any, model: Any, before: Any) -> tuple[Tensor, int]:
    """Row by row, without padding: the sum over all tokens of answers, or of -log sigmoid of each pair's margin; and
    their number."""

    def log_probs(model: Any, prompt: list[int], said: list[int]) -> Tensor:
        logits = model(torch.tensor([prompt + said]), use_cache=False).logits[0, PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None]).sum()

    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in given:
        if kind == "SFT":
            said = row["input_ids"][PROMPT:]
            total, count = total - log_probs(model, row["input_ids"][:PROMPT], said), count + len(said)
            continue
        if kind == "Reward":
            scores = [model(torch.tensor([row[name]])).logits[0, 0] for name in ("chosen_ids", "rejected_ids")]
            total, count = total - F.logsigmoid(scores[0] - scores[1]), count + 1
            continue
        ratios = []
        for name in ("chosen_ids", "rejected_ids"):
            with torch.no_grad():
                apart = log_probs(before, row["prompt_ids"], row[name])
            ratios.append(log_probs(model, row["prompt_ids"], row[name]) - apart)
        total, count = total - F.logsigmoid(BETA * (ratios[0] - ratios[1])), count + 1
    return total, count


@lru_cache
def steps_of_one_device(kind: str, micros: int, family: str, steps: int) -> list[dict[str, Tensor]]:
    """Gradients and loss of each step, of the mean over the rows of so many micro-batches."""
    model, before, found = policy(kind, family), reference(family), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=goes_on.RATE, weight_decay=0.0)
    given = list(rows(kind, micros * steps))
    size = len(given) // steps
    for step in range(steps):
        with ForceFP64():
            total, count = of_rows(kind, given[step * size : (step + 1) * size], model, before)
            (total / count).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append(grads | {"loss": (total / count).detach()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def one_device(kind: str, micros: int, family: str) -> dict[str, Tensor]:
    return steps_of_one_device(kind, micros, family, 1)[0]


def trained(
    kind: str, layout: str, accumulation: int, family: str, saved: str = "", step: int | None = None
) -> dict[str, Any]:
    """One step of TRL's own loop: gradients by name, as a callback sees them, and the loss that it logs. step: of a run
    in the folder `saved`, which goes on under this layout."""
    import trl
    from transformers import TrainerCallback

    with as_torchrun_starts_it(), tempfile.TemporaryDirectory() as folder:
        prepared = {"_prepare_dataset": lambda self, given, *_, **__: given}
        made = ig.integrations.trainer(type(f"Own{kind}Trainer", (getattr(trl, f"{kind}Trainer"),), prepared), layout)
        options: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0}
        micro = 1 if kind == "SFT" else PAIRS
        options |= {"per_device_train_batch_size": micro, "per_device_eval_batch_size": micro, "learning_rate": 0.0}
        options |= {"logging_steps": 1, "seed": 1}
        options |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
        options |= {"save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
        options |= {"beta": BETA} if kind == "DPO" else {}
        options |= {"router_aux_loss_coef": 0.0} if family == "qwen3_moe" and kind != "Reward" else {}
        if step is not None:
            micro = goes_on.micro_size(layout, accumulation)
            options |= {"output_dir": saved, "max_steps": step + 1, "save_strategy": "steps", "save_steps": 1}
            options |= {"learning_rate": goes_on.RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0}
            options |= {"per_device_train_batch_size": micro, "train_sampling_strategy": "sequential"}
        seen: dict[str, Any] = {}

        class Looks(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                seen.update({name: g.clone() for name, g in found.engine.grads().items()})

        given = policy(kind, family)
        more = {"ref_model": copy.deepcopy(reference(family))} if kind == "DPO" else {}
        data = rows_of(layout)
        found = made(
            given, args=getattr(trl, f"{kind}Config")(**({"output_dir": folder} | options)),
            train_dataset=rows(kind, data * accumulation if step is None else MICROS[kind] * (step + 2)),
            eval_dataset=rows(kind, data), processing_class=tokenizer(), callbacks=[Looks()], **more,
        )  # fmt: skip
        with ForceFP64(), ForceFP64InBackward():
            found.train(resume_from_checkpoint=f"{saved}/checkpoint-{step}" if step else None)
            evaluated = found.evaluate()["eval_loss"] if step is None else None
        if saved and step is None:
            found.save_model(saved)
        logged = [row for row in found.state.log_history if "loss" in row][step or 0]
        return seen | {"loss": torch.tensor(logged["loss"]), "logged": logged, "evaluated": evaluated}


def tokens_of(kind: str, steps: int) -> int:
    """Of all rows; of a pair those of both."""
    names = {"SFT": ("input_ids",), "DPO": ("prompt_ids", "chosen_ids", "prompt_ids", "rejected_ids")}
    read = names.get(kind, ("chosen_ids", "rejected_ids"))
    return sum(len(row[name]) for row in rows(kind, steps) for name in read)


def rows_of(layout: str) -> int:
    """How many ranks of dp a layout has."""
    return int(next((word[2:] for word in layout.split() if word.startswith("dp")), 1))


def tokenizer() -> Any:
    from .test_trl import tokenizer

    return tokenizer()


def same(found: dict[str, Any], truth: dict[str, Tensor]) -> None:
    for name, true in truth.items():
        error = (found[name].double() - true).abs().max() / true.abs().max()
        assert float(error) < (1e-4 if name == "loss" else 1e-9), (name, float(error))  # the Trainer logs fp32


CASES = [
    (2, "cp2 ulysses zero1", 3, "llama"),
    (2, "cp2 ring zero3", 1, "llama"),
    (2, "tp2", 1, "llama"),
    (2, "tp2 sp zero3", 3, "llama"),
    (2, "dp2 ep2", 1, "qwen3_moe"),
    (2, "dp2 ep2 zero3", 3, "qwen3_moe"),
    (2, "pp2 1f1b", 3, "llama"),
    (2, "pp2 zb zero1", 1, "llama"),
    pytest.param(4, "dp2 cp2 ring zero2", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "dp2 tp2 sp zero2", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "dp2 tp2 ep4 zero1", 3, "qwen3_moe", marks=pytest.mark.slow),
    pytest.param(4, "dp2 pp2 1f1b zero2", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "tp2 sp pp2 1f1b", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "cp2 ulysses pp2 1f1b", 3, "llama", marks=pytest.mark.slow),
    pytest.param(4, "dp2 ep2 pp2 1f1b", 3, "qwen3_moe", marks=pytest.mark.slow),
]


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize(("ranks", "layout", "accumulation", "family"), CASES)
def test_trls_loops_have_the_gradients_of_one_device(
    worlds, kind: str, ranks: int, layout: str, accumulation: int, family: str
) -> None:
    compare(worlds(ranks).run(trained, kind, layout, accumulation, family), kind, layout, accumulation, family)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("ranks", "layout", "accumulation", "family"),
    [
        (2, "dp2 zero1", 3, "llama"),
        (2, "cp2 ulysses", 3, "llama"),
        (2, "cp2 ulysses zero2", 1, "llama"),
        (2, "cp2 ring zero1", 1, "llama"),
        (2, "cp2 ring zero3", 3, "llama"),
        (2, "tp2 zero1", 3, "llama"),
        (2, "dp2 ep2", 1, "qwen3_moe"),
        (2, "dp2 ep2 zero3", 3, "qwen3_moe"),
        (2, "pp2 1f1b", 3, "llama"),
        (2, "pp2 zb zero1", 1, "llama"),
        pytest.param(4, "dp2 cp2 ulysses zero3", 3, "llama", marks=pytest.mark.slow),
        pytest.param(4, "cp2 ring tp2 zero1", 3, "llama", marks=pytest.mark.slow),
        pytest.param(4, "dp2 pp2 1f1b zero2", 3, "llama", marks=pytest.mark.slow),
        pytest.param(4, "dp2 ep2 pp2 1f1b", 3, "qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_rewards_have_them_too_and_the_model_that_is_saved_is_whole(
    worlds, tmp_path: Path, ranks: int, layout: str, accumulation: int, family: str
) -> None:
    from transformers import AutoModelForSequenceClassification

    given = ("Reward", layout, accumulation, family)
    compare(worlds(ranks).run(trained, *given, str(tmp_path / "saved")), *given)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    for name, parameter in policy("Reward", family).named_parameters():  # the rate is 0
        assert torch.equal(saved.get_parameter(name), parameter), name


def compare(every: list[dict[str, Any]], kind: str, layout: str, accumulation: int, family: str) -> None:
    """What all ranks have found, with one device."""
    whole = {name: value for found in every for name, value in found.items()}  # under pp each has those of its stage
    for found in every:
        same(whole | found, one_device(kind, rows_of(layout) * accumulation, family))
        assert found["logged"]["num_tokens"] == tokens_of(kind, rows_of(layout) * accumulation)
        for name in (
            ("mean_reward", "margin") if kind == "Reward" else ("entropy", "mean_token_accuracy")
        ):  # TRL's own, which the last stage has alone
            assert found["logged"][name] == pytest.approx(every[0]["logged"][name]), name
        if "pp2" in layout or rows_of(layout) == 1:  # else the Trainer takes the mean of the ranks' means
            true = float(one_device(kind, rows_of(layout), family)["loss"])
            assert found["evaluated"] == pytest.approx(true, rel=1e-6)


LLAMA = [
    ("dp2 zero2", 3), ("cp2 ulysses zero1", 1), ("tp2 sp zero3", 3), ("pp2 1f1b", 3), ("cp2 ring", 3), ("tp2", 1),
    ("pp2 zb zero1", 1), ("dp2 zero3", 1),
]  # fmt: skip
SCORES = [(layout.replace(" sp", ""), micros) for layout, micros in LLAMA]  # has none


def a_step(step: int, layout: str, micros: int, kind: str, family: str, folder: str) -> dict[str, Any]:
    return trained(kind, layout, micros, family, folder, step)


@pytest.mark.medium
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward"])
def test_a_run_of_trl_goes_on_under_other_layouts(worlds, tmp_path: Path, kind: str, family: str) -> None:
    chain = goes_on.EXPERTS if family == "qwen3_moe" else SCORES if kind == "Reward" else LLAMA
    chain = chain if on_gloo() else chain[::2]  # all of it in `make full`
    truth = steps_of_one_device(kind, MICROS[kind], family, len(chain))
    every = worlds(2).run(goes_on.run, a_step, chain, kind, family, str(tmp_path))
    for ranks, true in zip(zip(*every, strict=True), truth, strict=True):
        whole = {name: value for found in ranks for name, value in found.items()}
        for found in ranks:
            same(whole | found, true)
