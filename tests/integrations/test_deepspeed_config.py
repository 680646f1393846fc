"""Every key of a DeepSpeed config has a fate; what is written is a config that `isograd train` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import isograd as ig
from isograd.cli.main import main
from isograd.errors import IntegrationError
from isograd.integrations.deepspeed.config import convert
from isograd.integrations.deepspeed.keys import IDLE, OFF
from isograd.train.reading import load

USUAL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.98], "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 2000, "warmup_type": "linear", "cos_min_ratio": 0.1},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "overlap_comm": True},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "gradient_clipping": 0.5,
    "wandb": {"enabled": True, "project": "mine"},
}


def fates(values: dict[str, Any], ranks: int | None = None) -> dict[str, str]:
    return {row.key: row.fate for row in convert(values, ranks)[1]}


def test_a_usual_config_becomes_one_that_a_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, file = tmp_path / "ds.json", tmp_path / "run.yaml"
    source.write_text(json.dumps(USUAL))
    assert main(["config", "from", str(source), str(file)]) == 0
    config = load(file).config
    assert (config.layout, config.batch, config.micro_batches, config.steps) == ("dp8 zero3", 64, 2, 2000)
    assert config.accumulate == "sharded"
    assert (config.model.dtype, config.log.wandb) == ("bf16", "mine")
    made = config.optimizer
    assert (made.lr, made.min_lr, made.warmup, made.schedule) == (3e-5, pytest.approx(3e-6), 100, "cosine")
    assert (made.betas, made.eps, made.weight_decay, made.clip) == ((0.9, 0.98), 1e-8, 0.0, 0.5)
    shown = capsys.readouterr().out
    leaves = [key for part in USUAL.values() if isinstance(part, dict) for key in part if key != "params"]
    assert all(name in shown for name in [*leaves, "weight_decay", "open"])
    assert main(["config", "from", str(source), str(file)]) == 2  # never overwritten


def test_what_the_file_leaves_out_is_as_deepspeed_has_it() -> None:
    config, rows = convert({"train_micro_batch_size_per_gpu": 2}, 4)
    assert (config["layout"], config["batch"], config["micro_batches"]) == ("dp4", 8, 1)
    assert config["accumulate"] == "local"
    assert config["optimizer"]["betas"] == [0.9, 0.999]
    assert (config["optimizer"]["clip"], config["optimizer"]["schedule"]) == (None, "constant")
    assert [row.key for row in rows if row.fate == "open"] == ["optimizer"]
    assert convert({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, 4)[0]["layout"] == "dp2 tp2"
    assert convert({"train_batch_size": 8, "sequence_parallel_size": 2}, 4)[0]["layout"] == "dp2 cp2 ulysses"


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_an_optimizer_of_torchs_own_has_torchs_weight_decay(kind: str) -> None:
    """DeepSpeed gives its own none."""
    for more, decay in (({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.1}, 0.1)):
        given = {"type": kind, "params": more}
        assert convert({"train_batch_size": 1, "optimizer": given}, 1)[0]["optimizer"]["weight_decay"] == decay
        values = {"train_batch_size": 1, "optimizer": given}
        engine, *_ = ig.integrations.deepspeed.initialize(model=torch.nn.Linear(1, 1), config=values)
        assert engine.engine.optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(
    "change",
    [
        {"fp16": {"enabled": True}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"zero_hpz_partition_size": 8}},
        {"zero_optimization": True},
        {"optimizer": {"type": "Lamb"}},
        {"optimizer": {"params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        {"optimizer": {"params": {"lr": "fast"}}},
        {"optimizer": {"params": {"betas": [0.9]}}},
        {"scheduler": {"type": "WarmupLR", "params": {}}},  # its warmup is logarithmic
        {"scheduler": {"type": "OneCycle"}},
        {"sparse_attention": {"mode": "fixed"}},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"train_batch_size": -8},
        {"gradient_clipping": True},
    ],
)
def test_what_would_train_otherwise_is_refused_and_nothing_is_written(change: dict[str, Any], tmp_path: Path) -> None:
    assert "refused" in fates(change, 1).values()
    source, file = tmp_path / "ds.json", tmp_path / "run.yaml"
    source.write_text(json.dumps(change))
    assert main(["config", "from", str(source), str(file), "--ranks", "1"]) == 2
    assert not file.exists()


def test_every_known_key_is_meaningless_where_it_is_off_and_an_unknown_one_has_its_nearest_name() -> None:
    for key in (*IDLE, *OFF):
        value: Any = False
        for name in reversed(key.split(".")):
            value = {name: value}
        assert fates(value, 1)[key] == "meaningless", key
    found = convert({"gradient_cliping": 1.0, "zero_optimization": {"overlap_com": True}}, 1)[1]
    assert {row.why for row in found if row.fate == "refused"} == {
        "unknown (did you mean 'gradient_clipping'?)",
        "unknown (did you mean 'overlap_comm'?)",
    }


def test_files_and_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(IntegrationError, match="IG863"):
        convert([], 1)
    with pytest.raises(IntegrationError, match="IG864"):
        convert({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 50,
                                                            "warmup_type": "linear"}}}, "warmup 100 is longer"),
        ({"optimizer": {"params": {"lr": 0}}}, "optimizer.lr: Input should be greater than 0"),
    ],
)  # fmt: skip
def test_what_a_run_would_refuse_is_not_written(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, file = tmp_path / "ds.json", tmp_path / "run.yaml"
    source.write_text(json.dumps({"train_batch_size": 8, **change}))
    assert main(["config", "from", str(source), str(file)]) == 2
    found = capsys.readouterr().err
    assert "IG630" in found and says in found and not file.exists()


def test_a_key_cannot_write_to_the_terminal_and_the_first_spelling_of_bf16_counts() -> None:
    rows = convert({"train_batch_size": 8, "\x1b[31mred": 1, "": 2}, 1)[1]
    assert {row.key for row in rows if row.fate == "refused"} == {"'\\x1b[31mred'", "''"}
    config, rows = convert({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, 1)
    assert config["model"]["dtype"] == "fp32"
    assert ("bfloat16", "meaningless") in {(row.key, row.fate) for row in rows}
    assert fates({"scheduler": "auto", "optimizer": "auto"}, 1) == {"scheduler": "open", "optimizer": "open"}
