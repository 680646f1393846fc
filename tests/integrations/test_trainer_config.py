"""Arguments of transformers, TRL and peft become the config of a run that takes the Trainer's own steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isograd.cli.main import main
from isograd.integrations.trainer_config import COUNTS, FLAGS, IDLE, NUMBERS, OPEN, convert
from isograd.train.optimizers import rate
from isograd.train.reading import load

ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-0.6B", "output_dir": "runs/mine", "learning_rate": 2e-4, "max_steps": 200,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_ratio": 0.05, "bf16": True,
    "lr_scheduler_type": "cosine", "adam_beta2": 0.95, "logging_steps": 10, "save_steps": 50, "eval_steps": 25,
    "gradient_checkpointing": True, "lora_r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "max_length": 512,
    "report_to": ["wandb"], "load_best_model_at_end": True, "num_train_epochs": 3, "group_by_length": False,
}  # fmt: skip


def test_a_file_of_arguments_becomes_a_config_that_reads(tmp_path: Path, capsys) -> None:
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(ARGUMENTS))
    words = [str(tmp_path / "args.yaml"), str(tmp_path / "run.yaml"), "--ranks", "4"]
    assert main(["config", "from", *words]) == 0
    assert "open        num_train_epochs" in capsys.readouterr().out
    made = load(tmp_path / "run.yaml").config
    assert (made.layout, made.batch, made.micro_batches, made.steps) == ("dp4", 32, 4, 200)
    assert made.model.path == "hf://Qwen/Qwen3-0.6B" and made.model.dtype == "bf16" and made.model.recompute is True
    assert made.adapter is not None and (made.adapter.rank, made.adapter.alpha) == (16, 32.0)
    assert made.data is not None and (made.data.length, made.data.seed) == (512, 42)
    optimizer = made.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay, optimizer.clip) == (2e-4, (0.9, 0.95), 0.0, 1.0)
    assert (optimizer.warmup, optimizer.schedule, made.log.wandb) == (10, "cosine", "isograd")
    assert (made.checkpoint.every, made.checkpoint.keep_best, made.evaluate.every) == (50, "eval_loss", 25)


@pytest.mark.parametrize(
    ("given", "warmup", "seed"),
    [
        ({"warmup_ratio": 0.05}, 1, 42),
        ({"warmup_steps": 0.3}, 3, 42),
        ({"warmup_steps": 4, "warmup_ratio": 0.5}, 4, 42),
        ({"seed": 3, "data_seed": 0}, 0, 0),
        ({"seed": 3}, 0, 3),
    ],
)
def test_a_warmup_below_one_is_a_share_of_the_steps_and_a_seed_of_0_is_a_seed(given, warmup: int, seed: int) -> None:
    found, rows = convert({"max_steps": 10, **given}, None)
    assert (found["optimizer"]["warmup"], found["data"]["seed"]) == (warmup, seed)
    assert {row.fate for row in rows} == {"taken"}


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_learning_rates_are_the_trainers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    found, _ = convert({"lr_scheduler_type": kind, "warmup_steps": 3, "max_steps": 12}, None)
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0)
    schedule = transformers.get_scheduler(kind, theirs, num_warmup_steps=3, num_training_steps=12)
    from isograd.train.sections import Optimizer

    ours = Optimizer.model_validate({**found["optimizer"], "lr": 1.0})
    for step in range(12):
        # They count a warmup from 0, and the step at its end as its last: ours takes no step at a rate of 0.
        if step > 3:
            assert rate(ours, step, 12) == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-12), step
        theirs.step()
        schedule.step()


def test_what_would_train_otherwise_is_refused_by_name(tmp_path: Path, capsys) -> None:
    given = {**ARGUMENTS, "neftune_noise_alpha": 5, "optim": "adafactor", "learning_rat": 1e-4}
    (tmp_path / "args.json").write_text(json.dumps(given))
    assert main(["config", "from", str(tmp_path / "args.json"), str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "IG865" in said and all(name in said for name in ("neftune_noise_alpha", "optim", "learning_rat"))
    assert "did you mean 'learning_rate'" in said and not (tmp_path / "run.yaml").exists()


TRL = {
    "use_peft": True,
    "load_in_4bit": True,
    "packing": True,
    "packing_strategy": "bfd_split",
    "assistant_only_loss": True,
}
AXOLOTL = {
    "base_model": "HuggingFaceTB/SmolLM2-135M", "adapter": "qlora", "load_in_4bit": True, "lora_r": 32,
    "lora_alpha": 16, "lora_target_linear": True, "val_set_size": 0.05,
    "datasets": [{"path": "mine.jsonl", "type": "chat_template"}],
    "sequence_len": 2048, "sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
    "num_epochs": 1, "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": 2e-4, "bf16": "auto",
    "tf32": False, "flash_attention": True, "train_on_inputs": False, "strict": False, "evals_per_epoch": 4,
    "wandb_project": "", "output_dir": "out", "warmup_ratio": 0.1, "gradient_checkpointing": True,
}  # fmt: skip


def test_what_trl_and_axolotl_call_quantised_adapters_packs_and_answers(tmp_path: Path, capsys) -> None:
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({"max_steps": 9, "model_name_or_path": "a/b", **TRL}))
    assert main(["config", "from", str(tmp_path / "args.yaml"), str(tmp_path / "trl.yaml")]) == 0
    made = load(tmp_path / "trl.yaml").config
    assert made.adapter is not None and made.data is not None
    assert (made.task, made.adapter.base_bits, made.data.packing) == ("chat", 4, "documents")
    assert "adapter" not in convert({"max_steps": 9, "use_peft": False, "lora_r": 8}, None)[0]

    (tmp_path / "ax.yaml").write_text(yaml.safe_dump(AXOLOTL))
    assert main(["config", "from", str(tmp_path / "ax.yaml"), str(tmp_path / "made.yaml")]) == 0
    said = capsys.readouterr().out
    assert all(f"open        {name}" in said for name in ("datasets", "num_epochs", "bf16", "evals_per_epoch"))
    made = load(tmp_path / "made.yaml").config
    assert made.adapter is not None and made.data is not None
    assert (made.adapter.rank, made.adapter.base_bits, made.adapter.targets) == (32, 4, "all-linear")
    assert (made.task, made.batch, made.micro_batches, made.data.length) == ("chat", 8, 4, 2048)
    assert (made.data.packing, made.data.held_out, made.optimizer.name) == ("whole", 0.05, "adamw_8bit")


@pytest.mark.parametrize(("loss", "task"), [("sigmoid", "preference"), ("ipo", "preference"), ("nll", "language")])
def test_losses_of_trl_are_those_of_a_task_or_refused(loss: str, task: str) -> None:
    found, rows = convert({"max_steps": 3, "loss_type": loss, "beta": 0.2}, None)
    assert found.get("task", "language") == task and not [row for row in rows if row.fate == "refused"]
    assert found.get("preference", {}).get("beta") == (0.2 if task == "preference" else None)
    assert [row.fate for row in convert({"loss_type": "dft"}, None)[1] if row.key == "loss_type"] == ["refused"]


def test_names_are_those_of_the_installed_libraries() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    theirs = set(transformers.TrainingArguments.__dataclass_fields__) | set(peft.LoraConfig.__dataclass_fields__)
    # "args" of scripts, of TRL, and of callbacks; and what older releases had
    others = {"early_stopping_patience", "lora_r", "dataset_name", "train_file", "overwrite_output_dir"}
    others |= {"logging_dir", "save_safetensors", "dataset_config", "dataset_train_split", "dataset_test_split"}
    others |= {
        "strict",
        "flash_attention",
        "lora_task_type",
        "evals_per_epoch",
        "saves_per_epoch",
    }  # of axolotl, of TRL
    others |= {"beta", "dataset_num_proc", "dataset_text_field", "padding_free", "attn_implementation", "eval_packing"}
    assert {*COUNTS, *NUMBERS, *FLAGS, *IDLE, *OPEN} - others <= theirs
