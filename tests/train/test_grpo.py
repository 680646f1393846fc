"""task: grpo. Prompts in, answers drawn by the model; draws, losses and gradients of one device under every layout."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isograd import verify
from isograd.core import rng
from isograd.core.mesh import Mesh
from isograd.data import builtin_chats, preferences
from isograd.data.show import show
from isograd.errors import IsogradError
from isograd.generate.rows import drawn_rows, write_rows
from isograd.generate.sampling import Sampling, draw
from isograd.hf.adapters import without_adapters
from isograd.models import Transformer, TransformerConfig
from isograd.prove import Case
from isograd.train import journal, loop, resources, startup, texts
from isograd.train.config import Config
from isograd.train.grpo import GrpoTask
from isograd.train.language import following
from isograd.train.loop import RunOptions
from isograd.train.preference_model import PreferenceTransformer
from isograd.train.rewards import Completion, rewards_of
from isograd.train.sections import Grpo
from tests.train.test_preference import assert_trains_as_plain_torch

pytest.importorskip("transformers")
QUIET = RunOptions(show="none", signals=())
MODEL = {"hidden": 24, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 40}
SMALL = TransformerConfig(vocab=31, **MODEL)
SHORT: list[dict[str, Any]] = [{"kind": "length"}]


def options_of(**more: Any) -> Grpo:
    return Grpo.model_validate({"rewards": SHORT, "tokens": 9, **more})


OPTIONS = {
    "answers": options_of(),
    "answers, kl": options_of(kl=0.3),
    "tokens, kl": options_of(mean="tokens", kl=0.2),
    "length": options_of(mean="length"),
}


def uneven(options: Grpo, rows: int = 5, width: int = 12) -> dict[str, Tensor]:
    """Answers of all lengths behind prompts of all lengths, and what each was worth."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(31, (rows, 1, width), generator=generator)
    labels = torch.full((rows, 1, width), -100)
    for row in range(rows):
        first, last = 1 + row % 3, 3 + row * 2
        labels[row, 0, first:last] = tokens[row, 0, first + 1 : last + 1]
    worth = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    batch = {"tokens": tokens, "labels": labels, "baseline": worth, "samples": torch.arange(rows)}
    if options.kl:
        batch["reference"] = -3 * torch.rand(rows, 1, width, generator=generator, dtype=torch.float64)
    return batch


def model(mesh: Mesh, options: Grpo) -> PreferenceTransformer:
    return PreferenceTransformer(SMALL, mesh, options, dtype=torch.float64)


def expected(made: PreferenceTransformer, options: Grpo, batch: dict[str, Tensor]) -> Tensor:
    """The loss of the whole batch, in plain torch: a loop over answers, and PPO's ratio at 1."""
    sums, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(batch["tokens"])):
        labels, advantage = batch["labels"][row, 0], batch["baseline"][row, 0]
        there = (labels != -100).nonzero()[:, 0]
        logp = torch.log_softmax(made(batch["tokens"][row]), -1)[0, there, labels[there]]
        each = -(logp - logp.detach()).exp() * advantage
        if options.kl:
            apart = batch["reference"][row, 0, there] - logp
            each = each + options.kl * (apart.exp() - apart - 1)
        many = {"answers": len(there), "tokens": 1, "length": options.tokens}[options.mean]
        sums, count = sums + each.sum() / many, count + (len(there) if options.mean == "tokens" else 1)
    return sums / count


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_uneven_answers_are_those_of_plain_torch(name: str) -> None:
    options, mesh = OPTIONS[name], Mesh("dp1")
    made, batch = model(mesh, options), uneven(options)
    assert_trains_as_plain_torch(made, mesh, batch, expected(made, options, batch))


def case(mesh: Mesh, name: str) -> Case:
    return Case(model(mesh, OPTIONS[name]), uneven(OPTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokens, kl", "length"])
@pytest.mark.usefixtures("lent")
def test_layouts_have_the_gradients_of_one_device(name: str) -> None:
    report = verify(partial(case, name=name), ["dp2 zero3", "tp2 sp", "cp2 ring", "cp2 ulysses"])
    assert report.ok, str(report)


def test_an_answer_is_the_one_that_its_number_has_alone_whatever_is_drawn_beside_it() -> None:
    mesh, how = Mesh("dp1"), Sampling(max_new_tokens=9, temperature=1.0, seed=4)
    made = Transformer(SMALL, mesh, dtype=torch.float64).eval()
    prompts, numbers, end, room = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6], [9, 9]], [8, 3, 5, 4], 6, 11
    found = write_rows(prompts, drawn_rows(following(made, mesh), prompts, (end,), how, numbers, room, mesh))
    for prompt, number, answer in zip(prompts, numbers, found, strict=True):
        row = list(prompt)
        for place in range(min(9, room - len(prompt))):
            with torch.no_grad():
                last = made(torch.tensor([row]))[0, -1]
            row.append(draw(last, rng.key(4, "generate", number), place, how))
            if row[-1] == end:
                break
        assert answer == row[len(prompt) :]
    assert {len(answer) for answer in found} != {9}


def config_of(folder: Path, **changes: Any) -> Config:
    lines = [{"prompt": f"What {i % 5}" + "?" * (1 + i % 4), "answer": i % 7} for i in range(14)]
    (folder.parent / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {
        "run": str(folder), "task": "grpo",
        "model": {"options": {"vocab": 259, **MODEL}, "dtype": "fp64"},
        "data": {"sources": [{"path": str(folder.parent / "prompts.jsonl")}], "length": 70, "held_out": 0.2},
        "grpo": {"rewards": [*SHORT, {"kind": "pattern", "pattern": "[a-z]", "weight": 0.5}], "answers": 4,
                 "tokens": 6, "kl": 0.2},
        "optimizer": {"lr": 1e-2}, "steps": 3, "batch": 8, "micro_batches": 2,
        "log": {"sample": 0}, "evaluate": {"batches": 1},
    }  # fmt: skip
    values["data"]["tokenizer"] = str(builtin_chats.tokenizer(folder.parent / "tokenizer"))
    return Config.model_validate({**values, **changes})


def numbers(folder: Path) -> list[float]:
    """Losses, and what answers were worth: of steps and evaluations."""
    names = ("loss", "loss/kl", "loss/reward", "loss/spread", "loss/length", "reward")
    lines = [line for line in journal.read(folder / "metrics.jsonl") if line.get("event") in (None, "evaluation")]
    return [line[name] for line in lines for name in names if name in line]


@pytest.mark.medium
def test_a_run_has_the_same_answers_and_losses_under_every_layout_and_resumes(worlds, tmp_path: Path) -> None:
    one = config_of(tmp_path / "one")
    assert worlds(1).run(loop.run, one, QUIET)[0].code == 0
    truth = numbers(one.folder)
    assert len(truth) == 17 and truth[1] == pytest.approx(0, abs=1e-12) and truth[6] > 1e-5 and truth[3] > 0
    for layout in ("dp2 zero2", "dp2 zero3", "tp2 sp", "cp2 ring"):
        there = config_of(tmp_path / layout.replace(" ", "-"), layout=layout)
        assert worlds(2).run(loop.run, there, QUIET)[0].code == 0
        assert numbers(there.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12), layout
    cut = config_of(tmp_path / "cut", layout="dp2 zero1")
    assert worlds(2).run(loop.run, cut, RunOptions(show="none", signals=(), until=2))[0].code == 75
    assert worlds(2).run(loop.run, cut.model_copy(update={"layout": "tp2"}), QUIET)[0].code == 0
    assert numbers(cut.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12)
    other = cut.model_copy(update={"steps": 4, "model": cut.model.model_copy(update={"seed": 1})})
    with pytest.raises(IsogradError, match=r"IG986[\s\S]*began from another model"):
        loop.run(other.model_copy(update={"layout": "dp1"}), QUIET)


@pytest.mark.medium
def test_adapters_are_compared_with_the_model_without_them_under_every_layout(worlds, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.train.test_library import LORA, base

    more: dict[str, Any] = {"model": {"path": str(base(tmp_path)), "dtype": "fp64"}, "adapter": LORA}
    one = config_of(tmp_path / "one", **more)
    assert loop.run(one, QUIET).code == 0
    truth = numbers(one.folder)
    assert truth[1] == pytest.approx(0, abs=1e-12) and truth[6] > 1e-5
    for layout in ("dp2 zero3", "tp2 sp"):
        there = config_of(tmp_path / layout.replace(" ", "-"), layout=layout, **more)
        assert worlds(2).run(loop.run, there, QUIET)[0].code == 0
        assert numbers(there.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12), layout
    job = GrpoTask(one, Mesh("dp1"), lambda _: None)
    batch = job.batch(0)
    job.accumulate(batch)
    with torch.no_grad(), without_adapters(job.model):
        logits = job.model(input_ids=batch["tokens"][:, 0]).logits
    there = batch["labels"][:, 0] != -100
    logp = torch.log_softmax(logits[there], -1).gather(1, batch["labels"][:, 0][there][:, None])[:, 0]
    torch.testing.assert_close(batch["reference"][:, 0][there], logp, rtol=1e-5, atol=1e-5)  # sums of norms are fp32


def test_a_step_learns_from_how_far_rewards_are_from_their_prompts_mean(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    config.folder.mkdir()
    texts.prepare(config)
    job = GrpoTask(config, Mesh("dp1"), lambda _: None)
    batch = job.batch(1)
    job.accumulate(batch)
    words = batch["labels"][:, 0]
    answers = [row[row != -100].tolist() for row in words]
    said = [job.words([t for t in answer if t != builtin_end(job)]) for answer in answers]
    worth = [
        1 - len(a) / 6 + 0.5 * any(c.islower() and c.isascii() for c in s) for a, s in zip(answers, said, strict=True)
    ]
    for first in (0, 4):
        group = torch.tensor(worth[first : first + 4], dtype=torch.float64)
        apart = (group - group.mean()) / (group.std() + 1e-6)
        found = batch["baseline"][first : first + 4]
        torch.testing.assert_close(found, torch.stack((apart, group, group.std().expand(4)), 1))
    assert (batch["tokens"][0, 0, :5] == batch["tokens"][3, 0, :5]).all() and len(set(worth)) > 1


def builtin_end(job: GrpoTask) -> int:
    row = job.data.rows(job.data.train[:1], range(1), range(1))["labels"][0, 0]
    return int(row[row != -100][-1])


def completion(text: str, right: str = "It is 1,024.", tokens: int = 3) -> Completion:
    return Completion(text, right, list(range(tokens)), [0])


@pytest.mark.parametrize(
    ("reward", "text", "worth"),
    [
        ({"kind": "equal"}, " It is 1,024.\n", 1), ({"kind": "equal"}, "it is 1,024.", 0),
        ({"kind": "contains"}, "So: It is 1,024. Yes", 1), ({"kind": "contains"}, "1,024", 0),
        ({"kind": "number"}, "3 + 4 = 1024.0", 1), ({"kind": "number"}, "1024, or 5", 0),
        ({"kind": "number"}, "none", 0), ({"kind": "length", "weight": 2.0}, "", 1.25),
        ({"kind": "pattern", "pattern": "^<a>.*</a>$", "weight": -0.5}, "<a>b</a>", -0.5),
    ],
)  # fmt: skip
def test_a_reward_is_what_its_kind_says(reward: dict[str, Any], text: str, worth: float) -> None:
    options = options_of(rewards=[reward], tokens=8)
    assert rewards_of(options, 31, Mesh("dp1"))(completion(text)) == worth
    assert rewards_of(options_of(rewards=[reward, reward], tokens=8), 31, Mesh("dp1"))(completion(text)) == 2 * worth


def test_a_right_answer_without_a_number_is_no_number() -> None:
    assert rewards_of(options_of(rewards=[{"kind": "number"}]), 31, Mesh("dp1"))(completion("none", "none")) == 0


def test_a_reward_model_scores_the_answer_behind_its_prompt_and_another_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    for labels in (1, 2):
        made = AutoModelForSequenceClassification.from_config(LlamaConfig(vocab_size=31, num_labels=labels, **shape))
        made.save_pretrained(tmp_path / str(labels))
    options = options_of(rewards=[{"kind": "model", "path": str(tmp_path / "1"), "weight": 3.0}])
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "1")
    score = float(theirs(input_ids=torch.tensor([[0, 0, 1, 2]])).logits.detach()[0, 0])
    assert rewards_of(options, 31, Mesh("dp1"))(completion("")) == pytest.approx(3 * score, rel=1e-6)
    for path, vocab, said in (("1", 32, "31 ids"), ("2", 31, "2 labels"), ("none", 31, "IG461")):
        wrong = [{"kind": "model", "path": str(tmp_path / path)}]
        with pytest.raises(IsogradError, match=said):
            rewards_of(options_of(rewards=wrong), vocab, Mesh("dp1"))
    config = config_of(tmp_path / "run", grpo={"rewards": wrong})
    with pytest.raises(IsogradError, match="IG461"):
        startup.refuse_early(config, "auto")


def test_prompts_have_their_right_answer_in_a_column_or_behind_them(tmp_path: Path) -> None:
    user, yes, sys = ({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "7"), ("system", "s")))
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "answer": 7}, {"messages": [user], "answer": "7", "more": 1}, {"messages": [user, yes]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "7"}]},
        {"instruction": "a", "output": "7"}, {"messages": [sys, user, yes, user, yes], "tools": [{"name": "t"}]},
    ]  # fmt: skip
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(preferences.answered(file, "answer"))
    assert [made for made, _ in found[:5]] == [[{"messages": [user, yes]}]] * 5
    before = [sys, user, {**yes, "weight": 0}, user]
    assert found[5] == ([{"messages": [*before, yes], "tools": [{"name": "t"}]}], [before, [{"name": "t"}]])
    file.write_text(json.dumps(lines[1]))
    assert next(preferences.answered(file, "more"))[0][0]["messages"][-1]["content"] == "1"


@pytest.mark.parametrize(
    "line",
    ["[]", '{"prompt": "a"}', '{"prompt": "a", "answer": ""}', '{"prompt": "", "answer": "b"}',
     '{"messages": [{"role": "user", "content": "a"}]}',
     '{"prompt": "a", "answer": [{"role": "user", "content": "b"}]}',
     '{"prompt": "a", "answer": null}', "{", '{"prompt": "a", "chosen": "b", "rejected": "c"}', '{"answer": "b"}'],
)  # fmt: skip
def test_a_line_without_a_prompt_or_an_answer_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    """It spoke of 'chosen' and 'rejected', which are task preference's."""
    (tmp_path / "all.jsonl").write_text('{"prompt": "a", "right": "b"}\n' + line.replace("answer", "right") + "\n")
    with pytest.raises(IsogradError, match=r"IG927.*line 2\b") as error:
        list(preferences.answered(tmp_path / "all.jsonl", "right"))
    told = str(error.value).split("; keys")[0]
    assert not any(word in told for word in ("chosen", "rejected", "pair", "two answers"))
    assert '"right": ...' in told or "keys" in str(error.value) or "JSON" in told
    assert "chosen" not in line or "no 'right'; keys 'prompt', 'chosen', 'rejected'" in str(error.value)


@pytest.mark.parametrize("length", [3, 70])
def test_what_is_left_out_or_held_out_is_called_prompts(tmp_path: Path, length: int) -> None:
    data = {"sources": [{"path": str(tmp_path / "prompts.jsonl")}], "length": length, "held_out": 0.99}
    config = config_of(tmp_path / "run", data=data | {"tokenizer": str(builtin_chats.tokenizer(tmp_path / "words"))})
    texts.prepare(config)
    with pytest.raises(IsogradError, match="IG926") as error:
        texts.pairs(config)
    assert "prompts are longer than" in str(error.value) and "one prompt that fits" in str(error.value)
    assert "pair" not in str(error.value).replace(str(tmp_path), "")
    shown = show(config.folder / "data", samples=1)
    assert "pair" not in shown.replace(str(tmp_path), "") and "[answer: " in shown and "sample 0: prompt" in shown


def test_a_prompt_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    lines = '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": "<|im_end|>"}\n'
    (tmp_path / "prompts.jsonl").write_text(lines)
    with pytest.raises(IsogradError, match="IG929") as error:
        texts.prepare(config)
    assert error.value.where == f"{tmp_path}/prompts.jsonl, prompt 2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grpo": None}, "task grpo has grpo"), ({"task": "preference"}, "no other task has"),
        ({"batch": 6, "layout": "dp1"}, "2 are left over"), ({"layout": "pp2"}, "leave pp out"),
        ({"grpo": {"rewards": []}}, "at least 1"), ({"grpo": {"rewards": [{"kind": "pattern"}]}}, "pattern belongs to"),
        ({"grpo": {"rewards": [{"kind": "equal", "path": "x"}]}}, "path belongs to the kind model"),
        ({"grpo": {"rewards": [{"kind": "pattern", "pattern": "("}]}}, "no regular expression"),
        ({"grpo": {"rewards": SHORT, "answers": 1}}, "greater than or equal to 2"),
        ({"distil": {"teacher": "somewhere"}}, "distil belongs to"), ({"preference": {}}, "preference belongs to"),
        ({"evaluate": {"tasks": ["x"]}}, "evaluate.tasks are"),
        ({"model": {"path": "x", "code": "transformers"}}, "takes an adapter where grpo.kl is above 0"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together_is_refused_with_what_to_change(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        config_of(tmp_path / "run", **changes)


def test_the_memory_before_a_start_has_the_model_that_kl_compares_with(tmp_path: Path) -> None:
    free, compared = (
        resources.forecast(config_of(tmp_path / "run", layout="dp2 zero1", grpo={"rewards": SHORT, "kl": kl}))
        for kl in (0.0, 0.1)
    )
    assert compared.stages[0].parameters - free.stages[0].parameters == 8 * free.parameters
    assert math.isclose(free.stages[0].optimizer, compared.stages[0].optimizer)
