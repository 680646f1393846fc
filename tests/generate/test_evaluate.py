"""How good a model is: perplexity against transformers' own loss, and lm-eval-harness, under every layout, by command
and during training."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from isograd.cli.main import main
from isograd.core.mesh import Mesh
from isograd.data.chats import Chats
from isograd.generate import open_writer
from isograd.generate.scoring import scorer_of
from isograd.generate.writer import words_of
from isograd.hf.force_fp64 import ForceFP64
from isograd.train import journal, loop

from ..train.conftest import text as text  # noqa: PLC0414
from ..train.test_loop import QUIET, config_of
from .test_generate import TEMPLATE
from .test_generate import folder as folder  # noqa: PLC0414

TEXTS = ["hello world how are you ?", "you are", "!", " ".join(["hello you world ! are"] * 9)]
TASKS = {
    "choose": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    },
    "write": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["you"], "max_gen_toks": 3}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def by_hand(place: Path, length: int) -> tuple[float, int]:
    """transformers' own logits of each window, in fp64 where it casts to fp32."""
    writer = open_writer(place)
    total, count = 0.0, 0
    for one in TEXTS:
        ids = writer.encode(one)
        for first in range(0, len(ids) - 1, length - 1):
            part = torch.tensor([ids[first : first + length]])
            with torch.no_grad(), ForceFP64():
                logits = writer.model(input_ids=part).logits[0, :-1]
            total += float(F.cross_entropy(logits, part[0, 1:], reduction="sum"))
            count += part.shape[1] - 1
    return total / count, count


def measured(place: str, layout: str) -> dict[str, float]:
    return scorer_of(place, words_of(place), Mesh(layout), 7, 2).perplexity(TEXTS)


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp1", "dp2", pytest.param("tp2 sp", marks=pytest.mark.medium), "cp2"])
def test_perplexity_is_that_of_transformers_under_every_layout(worlds, folder: Path, layout: str) -> None:
    loss, count = by_hand(folder, 7)
    for found in worlds(1 if layout == "dp1" else 2).run(measured, str(folder), layout):
        assert (found["tokens"], found["texts"]) == (count, 3)  # one token alone is not predicted
        assert found["loss"] == pytest.approx(loss, rel=1e-9)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-9)
        assert found["bits_per_byte"] > 0


def test_the_command_reads_texts_and_lines_and_says_what_it_found(folder: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS[1:]))
    files = ["--files", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--length", "7"]
    assert main(["evaluate", str(folder), *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(by_hand(folder, 7)[0], rel=1e-9)
    assert main(["evaluate", str(folder), *files]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["loss", f"{found['loss']:.4f}".rstrip("0")]
    (tmp_path / "c.jsonl").write_text('{"texts": 1}\n')
    for name, said in (("c.jsonl", "IG913"), ("d.txt", "IG910")):
        assert main(["evaluate", str(folder), "--files", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--files", str(tmp_path / "a.txt"), "--length", "100000"]) != 0
    assert "IG411" in capsys.readouterr().err
    assert main(["evaluate", str(folder)]) == 2
    assert "--files FILE ..., or --tasks" in capsys.readouterr().err


def test_of_conversations_the_answers_count_as_in_transformers(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Three forms of a conversation with two answers; beside transformers' loss over the tokens of the answers."""
    folder = shutil.copytree(folder, tmp_path / "model")
    ends = TEMPLATE.replace("{{ m.content }} ", "{{ m.content }} <|end|> ")
    (folder / "chat_template.jinja").write_text(ends)
    said = [("user", "hello world"), ("assistant", "how are you ?"), ("user", "you"), ("assistant", "world !")]
    messages = [{"role": role, "content": text} for role, text in said]
    turns = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in said]
    lines = [{"messages": messages}, {"conversations": turns}, {"conversations": messages}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["evaluate", str(folder), "--files", str(tmp_path / "a.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids, counted = (torch.tensor([part.astype("int64")]) for part in Chats(folder)(json.dumps(lines[0])))
    with torch.no_grad():
        logits = open_writer(folder).model(input_ids=ids).logits[0, :-1]
    learned = counted[0, 1:] == 1
    loss = float(F.cross_entropy(logits[learned], ids[0, 1:][learned]))
    assert (found["tokens"], found["texts"]) == (3 * int(learned.sum()), 3)
    assert found["loss"] == pytest.approx(loss, rel=1e-9)
    (tmp_path / "b.jsonl").write_text(json.dumps({"conversation": turns}) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": messages[:1]}) + "\n")
    for name, code in (("b.jsonl", "IG913"), ("c.jsonl", "IG990")):
        assert main(["evaluate", str(folder), "--files", str(tmp_path / name)]) == 2
        seen = capsys.readouterr().err
        assert code in seen and f"{name}, line 1" in seen


def write_tasks(place: Path, questions: list[str], choices: list[str]) -> None:
    lines = [{"question": q, "choices": choices, "answer": n % len(choices)} for n, q in enumerate(questions)]
    (place / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in TASKS.items():
        data = {"data_files": {"test": str(place / "lines.jsonl")}}
        values = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **task}
        (place / f"{name}.yaml").write_text(json.dumps(values))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval-harness, with everything that it keeps in a folder of the test."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    pytest.importorskip("lm_eval")


def test_tasks_have_the_answers_of_one_device(offline, folder: Path, tmp_path: Path, capsys: Any) -> None:
    write_tasks(tmp_path, ["hello world", "how are", "are you ? !", "world"], [" you", " world !", " how are you"])
    writer, right = open_writer(folder), 0
    for number, question in enumerate(("hello world", "how are", "are you ? !", "world")):
        scores = []
        for choice in (" you", " world !", " how are you"):
            ids, before = torch.tensor([writer.encode(question + choice)]), len(writer.encode(question))
            with torch.no_grad():
                logits = writer.model(input_ids=ids).logits[0, :-1]
            scores.append(-float(F.cross_entropy(logits[before - 1 :], ids[0, before:], reduction="sum")))
        right += scores.index(max(scores)) == number % 3
    words = ["evaluate", str(folder), "--tasks", "choose,write", "--task-folder", str(tmp_path), "--json"]
    found = []
    for layout in ("dp1", "dp2"):
        assert main([*words, "--layout", layout]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0] == found[1]
    assert found[0]["choose/acc"] == right / 4 and "write/exact_match" in found[0]
    assert main(["evaluate", str(folder), "--tasks", "no_such_task", "--task-folder", str(tmp_path)]) != 0
    assert "IG656" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["dp2 zero3", "tp2 sp"])
def test_a_run_asks_tasks_at_its_evaluations(offline, worlds, text: Path, tmp_path: Path, layout: str) -> None:
    """In the journal, and so in trackers; the steps are those of a run that asks nothing."""
    write_tasks(tmp_path, ["1 of", "2 of 4 and"], [" 9", " 16", "x"])
    asked = {"batches": 1, "every": 1, "tasks": ["choose"], "task_folder": str(tmp_path)}
    more: dict[str, Any] = {"layout": layout, "steps": 2}
    config = config_of(tmp_path / "run", text, evaluate=asked, **more)
    assert worlds(2).run(loop.run, config, QUIET)[0].code == 0
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    evaluations = [line for line in lines if line.get("event") == "evaluation"]
    assert [0 <= line["choose/acc"] <= 1 for line in evaluations] == [True, True]
    worlds(2).run(loop.run, config_of(tmp_path / "plain", text, **more), QUIET)
    plain = list(journal.read(tmp_path / "plain" / "metrics.jsonl"))
    assert [e["loss"] for e in lines if "event" not in e] == [e["loss"] for e in plain if "event" not in e]


def test_without_the_package_the_line_to_type_is_said(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(folder), "--tasks", "arc_easy"]) != 0
    assert "pip install lm_eval" in capsys.readouterr().err


def test_tasks_under_a_pipeline_are_refused_with_what_to_do(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="isograd evaluate takes its checkpoints"):
        config_of(tmp_path, text, layout="pp2", evaluate={"tasks": ["arc_easy"]})
