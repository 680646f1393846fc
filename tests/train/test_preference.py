"""task: preference. Pairs of answers in; losses and gradients of one device under every layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isograd import verify
from isograd.checkpoint import CheckpointManager
from isograd.core.mesh import Mesh
from isograd.data import builtin_chats, preferences
from isograd.engine import Engine
from isograd.errors import IsogradError
from isograd.generate.writer import hugging_folder
from isograd.hf import export
from isograd.losses import naive
from isograd.models import TransformerConfig
from isograd.prove import Case
from isograd.train import journal, loop, texts
from isograd.train.config import Config
from isograd.train.loop import RunOptions
from isograd.train.preference import PreferenceTask
from isograd.train.preference_model import PreferenceTransformer
from isograd.train.sections import Preference

pytest.importorskip("transformers")
QUIET = RunOptions(show="none", signals=())
MODEL = {"hidden": 24, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 40}
OPTIONS = {
    "dpo": Preference(loss="dpo", smoothing=0.1, beta=0.7, answers=0.5),
    "ipo": Preference(loss="ipo", beta=0.3),
    "simpo": Preference(loss="simpo", margin=0.6),
    "orpo": Preference(loss="orpo", beta=0.4),
    "kto": Preference(loss="kto", weights=(1.0, 1.5)),
    "reward": Preference(loss="reward"),
}
PLAIN = Preference(loss="dpo")


def uneven(pairs: int = 5, width: int = 13, vocab: int = 31) -> dict[str, Tensor]:
    """Pairs of answers of all lengths, behind prompts of all lengths; the last pair is none."""
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab, (pairs, 2, width), generator=draw)
    labels = torch.full((pairs, 2, width), -100)
    for pair in range(pairs - 1):
        for answer, stop in enumerate((width - pair, 6 + 2 * pair)):
            labels[pair, answer, 2 + pair // 2 : stop] = tokens[pair, answer, 3 + pair // 2 : stop + 1].new_tensor(
                torch.randint(vocab, (stop - 2 - pair // 2,), generator=draw).tolist()
            )
    reference = -20 - 10 * torch.rand(pairs, 2, generator=draw, dtype=torch.float64)
    return {"tokens": tokens, "labels": labels, "reference": reference, "samples": torch.arange(pairs)}


def model(mesh: Mesh, loss: str) -> PreferenceTransformer:
    config = TransformerConfig(**{"vocab": 31, "score": loss == "reward", **MODEL})
    return PreferenceTransformer(config, mesh, OPTIONS[loss], dtype=torch.float64)


def batch_of(loss: str) -> dict[str, Tensor]:
    batch = uneven()
    if loss == "reward":  # the token that ends an answer is in its row
        more = {"tokens": 5, "labels": -100}
        batch |= {name: F.pad(batch[name], (0, 1), value=value) for name, value in more.items()}
    return batch | ({"baseline": torch.full((len(batch["tokens"]),), 0.3)} if loss == "kto" else {})


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    """The log probabilities of the labels of one answer."""
    counts = labels != -100
    return torch.log_softmax(logits, -1)[counts, labels[counts]]


def expected(made: PreferenceTransformer, loss: str, batch: dict[str, Tensor]) -> Tensor:
    """The loss of the whole batch, in plain torch."""
    options, found, answers = OPTIONS[loss], [], []
    for pair in range(len(batch["tokens"]) - 1):
        logits = made(batch["tokens"][pair])
        if loss == "reward":
            ends = [int((row != -100).nonzero()[-1]) + 1 for row in batch["labels"][pair]]
            chosen, rejected = (logits[a, end, 0] for a, end in enumerate(ends))
            found.append(-torch.log(torch.sigmoid(chosen - rejected)))
            answers.append(torch.zeros(1, dtype=torch.float64))
            continue
        chosen, rejected = (plain(logits[a], batch["labels"][pair, a]) for a in (0, 1))
        ref = batch["reference"][pair].unbind()
        beta = options.strength
        answers.append(-chosen)
        if loss == "dpo":
            ways = [naive.dpo(chosen, rejected, *ref, beta), naive.dpo(rejected, chosen, *reversed(ref), beta)]
            found.append(0.9 * ways[0] + 0.1 * ways[1])
        elif loss == "ipo":
            found.append(naive.ipo(chosen, rejected, *ref, beta))
        elif loss == "simpo":
            found.append(naive.simpo(chosen, rejected, beta, options.margin))
        elif loss == "orpo":
            found.append(beta * naive.orpo(chosen, rejected))
        else:
            liked = naive.kto(chosen, ref[0], True, 0.3, beta) * options.weights[0]
            found.append((liked + naive.kto(rejected, ref[1], False, 0.3, beta) * options.weights[1]) / 2)
    weight = {"dpo": 0.5, "orpo": 1.0}.get(loss, 0.0)
    return torch.stack(found).mean() + weight * torch.cat(answers).mean()


def assert_trains_as_plain_torch(made: torch.nn.Module, mesh: Mesh, batch: Any, truth: Tensor) -> None:
    """Two micro-batches of an engine have the gradients and the loss of `truth`, by name."""
    truth.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in made.named_parameters()}
    made.zero_grad()
    engine = Engine(made, mesh, lambda ps: torch.optim.SGD(ps, lr=0.1))
    engine.accumulate(batch, 2)
    found = dict(engine.grads().items())
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    assert engine.step().loss == pytest.approx(truth.item(), rel=1e-9)


@pytest.mark.parametrize("loss", OPTIONS)
def test_gradients_of_uneven_pairs_are_those_of_plain_torch(loss: str) -> None:
    batch, mesh = batch_of(loss), Mesh("dp1")
    made = model(mesh, loss)
    assert_trains_as_plain_torch(made, mesh, batch, expected(made, loss, batch))


def case(mesh: Mesh, loss: str) -> Case:
    return Case(model(mesh, loss), batch_of(loss))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "layouts"),
    [
        ("dpo", ["dp2 zero3", "tp2 sp", "cp2 ring", "cp2 ulysses", "pp2"]),
        ("orpo", ["cp2 ring"]),
        ("kto", ["pp2"]),
        ("reward", ["dp2 zero3", "tp2 sp", "cp2 ring", "cp2 ulysses", "pp2"]),
    ],
)
@pytest.mark.usefixtures("lent")
def test_layouts_have_the_gradients_of_one_device(loss: str, layouts: list[str]) -> None:
    report = verify(partial(case, loss=loss), layouts)
    assert report.ok, str(report)


def config_of(folder: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder),
        "task": "preference",
        "model": {"options": {"vocab": 259, **MODEL}, "dtype": "fp64"},
        "data": {"sources": [{"path": str(folder.parent / "pairs.jsonl")}], "length": 70, "held_out": 0.2},
        "optimizer": {"lr": 1e-2, "warmup": 1},
        "steps": 3,
        "batch": 4,
        "micro_batches": 2,
        "log": {"sample": 0},
        "evaluate": {"batches": 2},
    }
    values["data"]["tokenizer"] = str(builtin_chats.tokenizer(folder.parent / "tokenizer"))
    return Config.model_validate({**values, **changes})


def pairs(folder: Path, number: int = 14) -> None:
    lines = []
    for i in range(number):
        answers = {"chosen": f"It is {i}." + " Yes." * (i % 3), "rejected": "No" + "o" * (i % 5)}
        lines.append({"prompt": f"What {i % 7}" + "?" * (1 + i % 4), **answers})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def numbers(folder: Path) -> list[float]:
    """Losses of steps; losses, accuracies and margins of evaluations."""
    found = []
    for line in journal.read(folder / "metrics.jsonl"):
        if line.get("event") in (None, "evaluation"):
            found += [line[name] for name in ("loss", "accuracy", "margin") if name in line]
    return found


@pytest.mark.medium
def test_a_run_has_the_same_losses_under_every_layout_and_resumes(worlds, tmp_path: Path) -> None:
    pairs(tmp_path)
    for loss in ("dpo", "kto"):
        options = {"preference": {"loss": loss, "beta": 0.5}}
        one = config_of(tmp_path / f"{loss}-one", **options)
        assert worlds(1).run(loop.run, one, QUIET)[0].code == 0
        truth = numbers(one.folder)
        assert truth[0] == pytest.approx({"dpo": 0.6931471805599453, "kto": 0.5}[loss], rel=1e-12)
        assert len(truth) == 6 and truth[2] < truth[0] and truth[-1] > 0
        for layout in ("dp2 zero2", "tp2 sp", "cp2 ring", "pp2") if loss == "dpo" else ("pp2",):
            there = config_of(tmp_path / f"{loss}-{layout.replace(' ', '-')}", layout=layout, **options)
            assert worlds(2).run(loop.run, there, QUIET)[0].code == 0
            assert numbers(there.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12), layout
    cut = config_of(tmp_path / "cut", layout="dp2 zero1", **options)
    assert worlds(2).run(loop.run, cut, RunOptions(show="none", signals=(), until=2))[0].code == 75
    kept = (cut.folder / "references").read_bytes()
    assert worlds(2).run(loop.run, cut.model_copy(update={"layout": "tp2"}), QUIET)[0].code == 0
    assert (cut.folder / "references").read_bytes() == kept
    assert numbers(cut.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12)


@pytest.mark.medium
def test_a_reward_model_trains_alike_under_every_layout_resumes_and_scores_in_transformers(
    worlds, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    pairs(tmp_path)
    options = {"preference": {"loss": "reward"}, "batch": 2, "micro_batches": 1}
    one = config_of(tmp_path / "one", **options)
    assert loop.run(one, QUIET).code == 0
    truth = numbers(one.folder)
    assert len(truth) == 6 and truth[2] < truth[0] and len(set(truth)) > 4
    for layout in ("tp2 sp", "cp2 ring", "pp2"):
        there = config_of(tmp_path / layout.replace(" ", "-"), layout=layout, **options)
        assert worlds(2).run(loop.run, there, QUIET)[0].code == 0
        assert numbers(there.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12), layout
    cut = config_of(tmp_path / "cut", layout="dp2 zero2", **options)
    assert worlds(2).run(loop.run, cut, RunOptions(show="none", signals=(), until=2))[0].code == 75
    assert worlds(2).run(loop.run, cut.model_copy(update={"layout": "tp2"}), QUIET)[0].code == 0
    assert numbers(cut.folder) == pytest.approx(truth, rel=1e-9, abs=1e-12)

    folder = export.convert(cut.checkpoints, tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    theirs = AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float64)
    texts.prepare(one)
    data = texts.pairs(one)
    row = data.rows(data.held[:1], range(1), range(2))
    ends = (row["labels"][0] != -100).long().cumsum(1).argmax(1) + 1
    found = [theirs(input_ids=row["tokens"][0, a, None, : end + 1]).logits.item() for a, end in enumerate(ends)]
    job = PreferenceTask(one.model_copy(update={"run": str(cut.folder)}), Mesh("dp1"), lambda _: None)
    keeper = CheckpointManager(cut.checkpoints, job.engine)
    assert keeper.load("auto") is not None
    job.model.eval()
    ours = job.model(row["tokens"][0])[torch.arange(2), ends, 0]
    assert found == pytest.approx(ours.tolist(), rel=1e-6)
    for place in (folder, cut.folder):
        with pytest.raises(IsogradError, match=r"IG645[\s\S]*ForSequenceClassification"):
            hugging_folder(place, str(tmp_path / "tokenizer")).__enter__()


@pytest.mark.medium
def test_references_are_made_again_for_another_model_and_where_the_file_is_damaged(tmp_path: Path) -> None:
    pairs(tmp_path, 8)
    config = config_of(tmp_path / "run", steps=1)
    loop.run(config, QUIET)
    file = config.folder / "references"
    kept = file.read_bytes()
    for damaged in (kept[:-1], kept[:-1] + bytes([kept[-1] ^ 1]), b"", b"[" * 900, kept + b"more", b"{}\n"):
        file.write_bytes(damaged)
        loop.run(config, RunOptions(show="none", signals=()))
        assert file.read_bytes() == kept
    other = {"options": {"vocab": 259, **MODEL}, "dtype": "fp64", "seed": 1}
    loop.run(config_of(tmp_path / "other", steps=1, model=other), QUIET)
    assert (tmp_path / "other" / "references").read_bytes() != kept


def test_a_longer_length_makes_references_of_the_pairs_that_were_left_out(tmp_path: Path) -> None:
    pairs(tmp_path, 12)
    short = config_of(tmp_path / "run")
    assert short.data is not None
    losses = []
    for length in (46, 70):
        config = short.model_copy(update={"data": short.data.model_copy(update={"length": length})})
        config.folder.mkdir(exist_ok=True)
        texts.prepare(config)
        job = PreferenceTask(config, Mesh("dp1"), lambda _: None)
        left = sorted(set(range(12)) - {*job.data.train, *job.data.held})
        assert job.reference is not None
        assert job.reference.isnan().all(1).nonzero()[:, 0].tolist() == left and bool(left) == (length == 46)
        job.accumulate(job.batch(0))
        losses.append(job.engine.step().loss)
        numbers = [preferences.NOBODY, job.data.train[0]]
        assert job._references(numbers)[0].tolist() == [0, 0]
        if left:
            with pytest.raises(IsogradError, match=rf"IG425[\s\S]*NaN for pair {left[0]} "):
                job._references([*numbers, left[0]])
    assert losses == pytest.approx([0.6931471805599453] * 2, rel=1e-12)


@pytest.mark.medium
def test_a_resume_from_another_first_model_is_refused(tmp_path: Path) -> None:
    pairs(tmp_path, 8)
    config = config_of(tmp_path / "run", steps=2)
    assert loop.run(config, RunOptions(show="none", signals=(), until=1)).code == 75
    other = config.model_copy(update={"model": config.model.model_copy(update={"seed": 1})})
    with pytest.raises(IsogradError, match=r"IG986[\s\S]*began from another model"):
        loop.run(other, QUIET)
    assert loop.run(config, QUIET).code == 0


def test_prompts_are_texts_messages_or_what_two_conversations_share(tmp_path: Path) -> None:
    user, yes, no = ({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("assistant", "c")))
    before = [{"role": "system", "content": "s"}, user, yes, user]
    lines = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"messages": [user], "chosen": yes, "rejected": [no]},
        {"chosen": [user, yes], "rejected": [user, no]},
        {"prompt": "a", "chosen": [user, yes], "rejected": [user, no]},
        {"messages": before, "tools": [{"name": "t"}], "chosen": "b", "rejected": "c"},
        {"chosen": [user, yes], "rejected": [user, yes]},
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [made for made, _ in preferences.conversations(tmp_path / "all.jsonl", strangers=True)]
    simple = [{"messages": [user, yes]}, {"messages": [user, no]}]
    assert [made[:2] for made in found[:4]] == [simple] * 4
    asked = [*before[:2], {**yes, "weight": 0}, user]
    assert found[4][1] == {"messages": [*asked, no], "tools": [{"name": "t"}]}
    assert found[4][2] == {"messages": [*asked, yes], "tools": [{"name": "t"}]}
    assert found[5][:2] == [simple[0]] * 2
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(
        pyarrow.Table.from_pylist([{**lines[1], "rejected": no}, lines[1] | {"rejected": yes}]), tmp_path / "a.parquet"
    )
    assert next(preferences.conversations(tmp_path / "a.parquet", strangers=False))[0] == simple


@pytest.mark.parametrize(
    "line",
    [
        "[]", '{"chosen": "a"}', '{"prompt": "a", "chosen": "b", "rejected": ""}', '{"chosen": "a", "rejected": "b"}',
        '{"prompt": "a", "messages": [], "chosen": "b", "rejected": "c"}',
        '{"prompt": 1, "chosen": "b", "rejected": "c"}',
        '{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}', "{", "[" * 100_000,
        '{"prompt": "a", "prompt": "b", "chosen": "b", "rejected": "c"}',
        '{"prompt": "a", "chosen": "\\ud83d", "rejected": "c"}',
        '{"prompt": "\\ude00", "chosen": "b", "rejected": "c"}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_pair_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "pairs.jsonl").write_text('\n{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + line + "\n")
    with pytest.raises(IsogradError, match=r"IG927.*line 3 "):
        list(preferences.conversations(tmp_path / "pairs.jsonl", strangers=False))


def test_a_file_in_which_all_answers_are_equal_is_refused(tmp_path: Path) -> None:
    equal = '{"prompt": "a", "chosen": "b", "rejected": "b"}\n'
    (tmp_path / "pairs.jsonl").write_text(equal * 2)
    with pytest.raises(IsogradError, match=r"IG926[\s\S]*the two answers are equal"):
        texts.prepare(config_of(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "bad", "says"),
    [
        ("cut", b'{"prompt": "a", "chosen": "b", "rej\n', "IG927.*line 3 is no JSON\n.*is it cut off"),
        ("byte", b'{"prompt": "\xff", "chosen": "b", "rejected": "c"}\n', "IG912.*line 3: not UTF-8"),
    ],
)
def test_a_broken_line_is_named_by_its_number_in_the_file_alone(
    tmp_path: Path, name: str, bad: bytes, says: str
) -> None:
    good = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (tmp_path / "pairs.jsonl").write_bytes(good * 2 + bad + good)
    with pytest.raises(IsogradError, match=says) as caught:
        list(preferences.conversations(tmp_path / "pairs.jsonl", strangers=False))
    assert "line 1" not in str(caught.value) and "line 2" not in str(caught.value), name


def test_a_pair_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    good = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n'
    (tmp_path / "pairs.jsonl").write_text(good + good.replace('"c"', '"<|im_end|>"'))
    with pytest.raises(IsogradError, match="IG929") as caught:
        texts.prepare(config_of(tmp_path / "run"))
    assert caught.value.where == f"{tmp_path}/pairs.jsonl, pair 2"


def test_pairs_that_are_too_long_are_left_out_and_pairs_of_a_prompt_are_held_out_together(tmp_path: Path) -> None:
    pairs(tmp_path, 40)
    config = config_of(tmp_path / "run", data={
        "sources": [{"path": str(tmp_path / "pairs.jsonl")}], "length": 46, "held_out": 0.5,
        "tokenizer": str(builtin_chats.tokenizer(tmp_path / "tokenizer")),
    })  # fmt: skip
    texts.prepare(config)
    found = texts.pairs(config)
    left = 40 - len(found.train) - len(found.held)
    assert 0 < left < 40
    assert found.left_out.startswith(f"{left} of 40 pairs have an answer that ends behind token 46"), found.left_out
    assert found.held and {i % 28 for i in found.held}.isdisjoint(i % 28 for i in found.train)
    rows = found.rows([*found.train[:3], preferences.NOBODY], range(1, 4), range(2))
    assert rows["tokens"].shape == rows["labels"].shape and (rows["labels"][2] == -100).all()
    assert found.numbers(0) != found.numbers(1) and found.numbers(1) == texts.pairs(config).numbers(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"preference": {"loss": "ipo", "smoothing": 0.1}}, {"preference": {"margin": 2.0}},
        {"task": "chat", "preference": {}}, {"preference": {"loss": "orpo", "weights": [1, 2]}},
        {"preference": {"loss": "reward", "beta": 0.1}},
    ],
)  # fmt: skip
def test_options_of_another_loss_or_task_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"belongs to"):
        config_of(tmp_path / "run", **changes)
