"""The tokenizer of the data and that of the model: they are compared, and what a run was trained with stays with it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from isograd.cli.main import main
from isograd.data import build, builtin_chats
from isograd.data.tokenizer_training import train_tokenizer
from isograd.errors import IsogradError
from isograd.generate import open_writer
from isograd.generate.writer import tokenizer_of
from isograd.train import journal, loop
from isograd.train.config import Config
from isograd.train.startup import refuse_data

from .test_chat import MODEL, QUIET
from .test_library import LORA, base

pytest.importorskip("transformers")


def config_of(folder: Path, tokens: Path, model: dict[str, Any], **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder), "task": "chat", "model": model,
        "data": {"sources": [{"path": str(tokens)}], "length": 150}, "optimizer": {"lr": 1e-2, "warmup": 1},
        "steps": 1, "batch": 2, "log": {"sample": 0}, "evaluate": {"batches": 1},
    }  # fmt: skip
    return Config.model_validate({**values, **changes})


def test_tokens_of_another_tokenizer_than_that_of_the_models_folder_are_refused(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, chats, tokens = base(tmp_path, vocab_size=300), tmp_path / "sums.jsonl", tmp_path / "toks"
    builtin_chats.conversations(chats, "sums")
    train_tokenizer(tmp_path / "tok280", [chats], vocabulary=280, chat=True)
    build(tokens, [chats], tokenizer="tok280", chat=True)
    config = config_of(tmp_path / "run", tokens, {"path": str(model)}, adapter=LORA)
    for start in (refuse_data, lambda config: loop.run(config, QUIET)):
        with pytest.raises(IsogradError, match="IG908") as caught:
            start(config)
        assert "toks: tok280, 280 tokens" in str(caught.value) and str(model / "tokenizer.json") in str(caught.value)
    (typed,) = [line.split("fix:")[1] for line in str(caught.value).splitlines() if "fix:" in line]
    assert main(shlex.split(typed)[1:]) == 0
    refuse_data(config_of(tmp_path / "run", tmp_path / "toks-base", {"path": str(model)}, adapter=LORA))

    refuse_data(config_of(tmp_path / "run", tokens, {"path": str(model), "weights": False, "code": "isograd"}))
    (tmp_path / "a.txt").write_text("some words of a text " * 40)
    build(tmp_path / "bytes", [tmp_path / "a.txt"])
    of_bytes = config_of(tmp_path / "run", tmp_path / "bytes", {"path": str(model)}, adapter=LORA, task="language")
    with pytest.raises(IsogradError, match=r"IG908[\s\S]*bytes: bytes, 257 tokens[\s\S]*--tokenizer"):
        refuse_data(of_bytes)
    (model / "tokenizer.json").unlink()
    refuse_data(config)
    refuse_data(of_bytes)


def test_a_tokenizer_that_differs_in_its_template_or_in_added_tokens_is_the_models(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, chats = base(tmp_path, vocab_size=300), builtin_chats.conversations(tmp_path / "sums.jsonl", "sums")
    more: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    more.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    more.chat_template = "{# another #}" + more.chat_template
    more.save_pretrained(tmp_path / "more")
    assert (tmp_path / "more" / "chat_template.jinja").is_file()
    build(tmp_path / "toks", [chats], tokenizer=str(tmp_path / "more"), chat=True)
    refuse_data(config_of(tmp_path / "run", tmp_path / "toks", {"path": str(model)}, adapter=LORA))


@pytest.mark.parametrize(
    ("model", "advised"), [({"path": "base"}, False), ({"options": {"vocab": 270, **MODEL}}, True)]
)
def test_a_model_without_rows_for_the_tokens_is_given_an_advice_that_it_can_take(
    tmp_path: Path, monkeypatch, model: dict[str, Any], advised: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (base(tmp_path) / "tokenizer.json").unlink()
    chats = builtin_chats.conversations(tmp_path / "sums.jsonl", "sums")
    train_tokenizer(tmp_path / "tok280", [chats], vocabulary=280, chat=True)
    build(tmp_path / "toks", [chats], tokenizer="tok280", chat=True)
    with pytest.raises(IsogradError, match="IG635") as caught:
        refuse_data(config_of(tmp_path / "run", tmp_path / "toks", model, adapter=None if advised else LORA))
    assert ("--model.options.vocab 280" in str(caught.value)) is advised
    assert "data built with the model's tokenizer" in str(caught.value)


@pytest.mark.parametrize("jinja", [False, True])
def test_a_run_on_built_conversations_talks_and_is_evaluated_and_exported(tmp_path: Path, capsys, jinja: bool) -> None:
    chats, folder = builtin_chats.conversations(tmp_path / "sums.jsonl", "sums"), tmp_path / "tokenizer"
    config = json.loads((builtin_chats.tokenizer(folder) / "tokenizer_config.json").read_text())
    if jinja:
        (folder / "chat_template.jinja").write_text(config.pop("chat_template"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    build(tmp_path / "toks", [chats], tokenizer=str(folder), chat=True, validation=0.1)
    shutil.rmtree(folder)
    run, model = tmp_path / "run", {"options": {"vocab": 259, **MODEL}}
    share = {"sources": [{"path": str(tmp_path / "toks")}], "length": 150, "held_out": 0.4}
    assert loop.run(config_of(run, tmp_path / "toks", model, data=share), QUIET).code == 0
    told = [str(line.get("text")) for line in journal.read(run / "metrics.jsonl")]
    assert any(f"data.held_out 0.4 does not count: isograd data build made {tmp_path}/toks with --validation 0.1" in one
               for one in told)  # fmt: skip

    assert tokenizer_of(run, None) == str(tmp_path / "toks")
    assert open_writer(run, device="cpu").prompt_of([{"role": "user", "content": "What is 2 plus 3?"}])
    held = tmp_path / "held.jsonl"
    held.write_text("".join(chats.read_text().splitlines(keepends=True)[:3]))
    assert main(["evaluate", str(run), "--files", str(held), "--json"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "convert", str(run), str(tmp_path / "bare")]) == 0
    advice = capsys.readouterr().err.split(" by ")[1].replace(" OUT ", f" {tmp_path / 'out'} ")
    assert main(shlex.split(advice)[1:]) == 0
    from transformers import AutoTokenizer

    found: Any = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert found.chat_template == builtin_chats.TEMPLATE and found.eos_token == "<|im_end|>"
    ends = json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    assert ends == found.convert_tokens_to_ids("<|im_end|>")
