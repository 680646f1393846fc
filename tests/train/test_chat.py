"""task: chat. Conversations in, a model that transformers can talk to out; the same losses under every layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isograd import verify
from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.data import Mixture, Source, build, builtin_chats
from isograd.errors import IsogradError
from isograd.models import Transformer, TransformerConfig
from isograd.prove import Case
from isograd.train import journal, loop, texts
from isograd.train.config import Config
from isograd.train.language import first_answer
from isograd.train.loop import RunOptions

pytest.importorskip("transformers")
QUIET = RunOptions(show="none", signals=())
MODEL = {"hidden": 24, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 40}


def config_of(folder: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder),
        "task": "chat",
        "model": {"options": {"vocab": 259, **MODEL}, "dtype": "fp64"},
        "data": {"sources": [{"builtin": "sums"}], "length": 150},
        "optimizer": {"lr": 1e-2, "warmup": 1},
        "steps": 3,
        "batch": 4,
        "micro_batches": 2,
        "log": {"sample": 0},
        "evaluate": {"batches": 1},
    }
    return Config.model_validate({**values, **changes})


def losses(folder: Path) -> list[float]:
    return [
        line["loss"] for line in journal.read(folder / "metrics.jsonl") if line.get("event") in (None, "evaluation")
    ]


def test_layouts_train_alike_and_the_export_answers_in_transformers(worlds, tmp_path: Path) -> None:
    one = config_of(tmp_path / "one", log={"sample": 5})
    assert worlds(1).run(loop.run, one, QUIET)[0].code == 0
    expected = losses(tmp_path / "one")
    assert len(expected) == 4 and expected[2] < expected[0]
    written = next(
        line["text"] for line in journal.read(tmp_path / "one" / "metrics.jsonl") if "▮" in str(line.get("text"))
    )
    assert written.rpartition("▮")[0].endswith("?<|im_end|>\n<|im_start|>assistant\n")
    weights = [line["weight"] for line in journal.read(tmp_path / "one" / "metrics.jsonl") if "event" not in line]
    data = texts.mixture(one, "train")
    assert data is not None
    assert weights == [int((data.rows(step, range(4))["labels"] != -100).sum()) for step in range(3)]
    for layout in ("dp2 zero2", "tp2 sp", "cp2 ring", "pp2"):
        folder = tmp_path / layout.replace(" ", "-")
        assert worlds(2).run(loop.run, config_of(folder, layout=layout), QUIET)[0].code == 0
        assert losses(folder) == pytest.approx(expected, rel=1e-9, abs=0), layout

    tokenizer = tmp_path / "one" / "tokenizer"
    words = [
        "ckpt",
        "convert",
        str(tmp_path / "one" / "checkpoints"),
        str(tmp_path / "hf"),
        "--tokenizer",
        str(tokenizer),
    ]
    assert main(words) == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    talks: Any = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    question = [{"role": "user", "content": "What is 2 plus 3?"}]
    asked = talks.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = theirs.generate(**asked, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] == asked["input_ids"].shape[1] + 4 or int(answer[0, -1]) == talks.eos_token_id
    ends = talks.convert_tokens_to_ids("<|im_end|>")
    assert (theirs.generation_config.eos_token_id, theirs.config.eos_token_id) == (ends, ends)
    rows = data.rows(0, range(2))
    ours = theirs(rows["tokens"][:1, :40]).logits
    assert ours.dtype == torch.float64 and ours.isfinite().all()


def conversations(mesh: Mesh, folder: Path) -> Case:
    """Rows of packed conversations, of which one has few answers and one has none."""
    rows = Mixture([Source(folder)], length=150, batch=9, packing="whole").rows(0, range(9))
    rows["labels"][2, 30:] = -100
    rows["labels"][5] = -100
    config = TransformerConfig(**{"vocab": 259, **MODEL})
    return Case(Transformer(config, mesh), {name: rows[name] for name in ("tokens", "labels", "documents")})


@pytest.mark.medium
@pytest.mark.usefixtures("lent")
def test_gradients_of_packed_conversations_are_those_of_one_device(tmp_path: Path) -> None:
    source, folder = (
        builtin_chats.conversations(tmp_path / "sums.jsonl", "sums"),
        builtin_chats.tokenizer(tmp_path / "tokenizer"),
    )
    build(tmp_path / "tokens", [source], tokenizer=str(folder), chat=True, validation=0)
    layouts = ["dp2 zero3", "tp2 sp", "cp2 ring", "pp2"]
    report = verify(partial(conversations, folder=tmp_path / "tokens"), layouts)
    assert report.ok, str(report)


def test_a_sample_begins_after_the_first_question_and_ends_with_the_answer() -> None:
    assert first_answer(torch.tensor([-100, -100, 7, 8, 9, -100, 5])) == (3, 9)
    assert first_answer(torch.tensor([-100, 7, 8])) == (2, 8)


def prepares(config: Config) -> str:
    try:
        loop.run(config, QUIET)
    except IsogradError as error:
        return f"{error.code} {error.where}"
    return "trained"


@pytest.mark.medium
def test_that_nothing_is_held_out_is_said_where_something_was_to_be(tmp_path: Path) -> None:
    few, folder = (
        builtin_chats.conversations(tmp_path / "sums.jsonl", "sums"),
        builtin_chats.tokenizer(tmp_path / "tokenizer"),
    )
    few.write_text("".join(few.read_text().splitlines(keepends=True)[:60]))

    def said(name: str, share: float, **evaluate: int) -> bool:
        data = {"sources": [{"path": str(few)}], "length": 150, "held_out": share, "tokenizer": str(folder)}
        assert loop.run(config_of(tmp_path / name, data=data, steps=1, evaluate=evaluate), QUIET).code == 0
        return any("no evaluation" in str(line.get("text")) for line in journal.read(tmp_path / name / "metrics.jsonl"))

    assert [said("none", 0.0), said("few", 1e-9), said("every", 0.0, every=1), said("some", 0.05)] == [0, 1, 1, 0]


def test_all_ranks_refuse_a_conversation_that_one_process_reads(worlds, tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(line) + "\n")
    sources = {"sources": [{"path": str(tmp_path / "chats.jsonl")}], "length": 50}
    with pytest.raises(IsogradError, match="IG642"):
        texts.prepare(config_of(tmp_path / "bare", data=sources))
    sources["tokenizer"] = str(builtin_chats.tokenizer(tmp_path / "tokenizer"))
    said = worlds(2).run(prepares, config_of(tmp_path / "run", data=sources, layout="dp2"))
    assert said == [f"IG990 {tmp_path}/chats.jsonl:1"] * 2


def test_the_command_refuses_before_any_rank_starts(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("isograd.launcher.launch.World.__enter__", lambda self: pytest.fail("a rank was started"))
    (tmp_path / "chats.jsonl").write_text('{"text": "no conversation"}\n')
    builtin_chats.tokenizer(tmp_path / "tokenizer")
    values = config_of(
        tmp_path / "run",
        data={
            "sources": [{"path": str(tmp_path / "chats.jsonl")}],
            "length": 50,
            "tokenizer": str(tmp_path / "tokenizer"),
        },
    ).model_dump(mode="json")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert "IG990" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"sources": [{"builtin": "stdlib"}], "length": 9}}, "builtin stdlib is text"),
        ({"task": "language"}, "builtin sums and docstrings are conversations"),
        ({"data": {"sources": [{"builtin": "sums"}], "length": 9, "packing": "stream"}}, "packing whole or documents"),
    ],
)
def test_a_config_that_mixes_texts_and_conversations_is_refused(tmp_path: Path, changes: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_of(tmp_path, **changes)
