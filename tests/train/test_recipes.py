"""What `isograd new` writes trains as it stands, one recipe on what another has made, and what is made is of use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isograd.cli.main import main
from isograd.cli.recipes import recipes
from isograd.data import builtin_chats
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
    assert any("a sample of what the model writes" in text for text in said)
    assert losses("preference")[0] == pytest.approx(0.693147, rel=1e-5)
    assert main(["ckpt", "convert", "runs/preference/checkpoints", "models/preference"]) == 0
    assert main(["new", "grpo"]) == 0
    assert main(["train", "grpo.yaml", *FEW, "batch=8", "data.held_out=0.01", "log.sample=0"]) == 0
    assert len(losses("grpo")) == 2
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


CHATS = {
    "qwen3-chat": "qwen3", "qwen3-8b-lora": "qwen3", "llama-1b-lora": "llama",
    "llama-8b-dpo": "llama", "gemma-1b-chat": "gemma3_text", "smollm3-chat": "smollm3",
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", CHATS)
def test_a_recipe_of_a_known_model_trains_a_small_one_of_its_class(name: str, tmp_path: Path, monkeypatch) -> None:
    """Two steps on one device, of a model of the same class with random weights, in the place of the hub's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 4,
    }
    sizes |= {"num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 512, "pad_token_id": 0}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(CHATS[name], **sizes)).save_pretrained("base")
    builtin_chats.tokenizer(tmp_path / "base")
    make = builtin_chats.pairs if name == "llama-8b-dpo" else builtin_chats.conversations
    make(tmp_path / ("pairs.jsonl" if name == "llama-8b-dpo" else "chats.jsonl"), "sums")
    small = ["model.path=base", "model.dtype=fp32", "data.length=128", "batch=4", "micro_batches=2", "log.sample=0"]
    trains(name, *small, "data.held_out=0.02")


@pytest.mark.medium
def test_the_recipe_of_an_encoder_trains_a_small_modernbert(tmp_path: Path, encoder: Path, monkeypatch) -> None:
    import torch
    from transformers import AutoTokenizer, ModernBertConfig, ModernBertModel

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    ModernBertModel(ModernBertConfig(vocab_size=45, pad_token_id=0, **sizes)).save_pretrained("base")
    AutoTokenizer.from_pretrained(encoder).save_pretrained("base")
    lines = [json.loads(line) for line in (encoder / "pairs.jsonl").read_text().splitlines()]
    pairs = [json.dumps({"query": p["a"], "answer": p["b"]}) + "\n" for p in lines]
    (tmp_path / "pairs.jsonl").write_text("".join(pairs))
    trains("modernbert", "batch=12", "model.path=base", "pairs.length=12", "pairs.held_out=0.1")
