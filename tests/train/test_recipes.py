"""What `isograd new` writes trains as it stands, one recipe on what another has made, and what is made is of use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isograd.cli.main import main
from isograd.cli.recipes import recipes
from isograd.train import journal
from tests.train.test_loop import encoder

pytest.importorskip("transformers")
__all__ = ["encoder"]
FEW = ["layout=dp1", "steps=2", "optimizer.warmup=1", "evaluate.every=2", "evaluate.batches=1", "checkpoint.every=2"]


def losses(name: str) -> list[float]:
    run = yaml.safe_load(recipes()[name])["run"]
    return [line["loss"] for line in journal.read(Path(run) / "metrics.jsonl") if "event" not in line]


def trains(name: str, *words: str) -> None:
    assert main(["new", name]) == 0
    assert main(["train", f"{name}.yaml", *FEW, *words]) == 0
    found = losses(name)
    assert len(found) == 2 and all(loss > 0 for loss in found), name


@pytest.mark.slow
def test_conversations_pairs_of_answers_and_adapters_go_on_from_one_another(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trains("chat", "batch=4", "log.sample=3")
    made = ["--tokenizer", "runs/chat/tokenizer"]
    assert main(["ckpt", "convert", "runs/chat/checkpoints", "models/chat", *made]) == 0
    trains("preference", "batch=4", "data.held_out=0.01", "log.sample=3")
    said = [str(line.get("text")) for line in journal.read(tmp_path / "runs/preference/metrics.jsonl")]
    assert any("a sample of what the model answers" in text for text in said)
    assert losses("preference")[0] == pytest.approx(0.693147, rel=1e-5)
    assert main(["ckpt", "convert", "runs/preference/checkpoints", "models/preference"]) == 0
    trains("lora", "batch=4", "log.sample=0")
    assert main(["ckpt", "convert", "runs/lora/checkpoints", "models/lora", "--adapters"]) == 0
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("models/chat", local_files_only=True)
    adapted = PeftModel.from_pretrained(base, "models/lora")
    assert any("lora" in name and values.abs().max() > 0 for name, values in adapted.named_parameters())


@pytest.mark.slow
def test_experts_text_and_pairs_of_texts_train(tmp_path: Path, encoder: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trains("moe", "batch=4", "log.sample=0")
    trains("quickstart", "batch=4", "micro_batches=1", "log.sample=0")
    lines = [json.loads(line) for line in (encoder / "pairs.jsonl").read_text().splitlines()]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"kjv": p["a"], "web": p["b"]}) + "\n" for p in lines))
    trains("pairs", "batch=12", f"model.path={encoder}", "pairs.path=pairs.jsonl", "pairs.length=12")
