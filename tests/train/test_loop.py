"""Runs: what they leave, how they end, and that they go on under another layout as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isograd.checkpoint.folder import checkpoints
from isograd.core import rng
from isograd.core.loss_terms import Terms
from isograd.core.mesh import Mesh
from isograd.data import manifest
from isograd.errors import LaunchError, TrainError
from isograd.nn.loss import Head
from isograd.train import journal, loop
from isograd.train.config import Config
from isograd.train.language import LanguageTask
from isograd.train.loop import RunOptions, RunOutcome
from isograd.train.run.signals import STOPPED
from isograd.train.task import Evaluated

QUIET = RunOptions(show="none", signals=())


def config_of(folder: Path, text: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder),
        "model": {"preset": "tiny-llama", "options": {"vocab": 257}, "dtype": "fp64"},
        "data": {"sources": [{"path": str(text)}], "length": 12},
        "optimizer": {"lr": 1e-2, "warmup": 2},
        "steps": 6,
        "batch": 8,
        "micro_batches": 2,
        "log": {"sample": 0},
        "evaluate": {"batches": 1},
    }
    return Config.model_validate({**values, **changes})


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in journal.read(folder / "metrics.jsonl") if "event" not in line]


def close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) <= 1e-9 * abs(b) for a, b in zip(found, expected, strict=True)
    )


def test_a_run_leaves_its_config_its_numbers_a_checkpoint_and_pictures(worlds, text: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", text, layout="dp2", log={"sample": 5}, evaluate={"batches": 99})
    outcome: RunOutcome = worlds(2).run(loop.run, config, QUIET)[0]
    assert (outcome.code, outcome.step) == (0, 6)
    seed = torch.Generator().manual_seed(rng.key(0, "generators", 0).seed).initial_seed()
    assert worlds(2).run(torch.initial_seed) == [seed, seed]  # their state is part of checkpoints
    assert Config.model_validate(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())) == config
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["lr"] for line in steps[:2]] == [0.005, 0.01]
    events = {line["event"]: line for line in lines if "event" in line}
    assert set(events) == {"evaluation", "model", "picture"}
    held = manifest.read(text).of("validation")  # what ends a text has no label after it
    assert events["evaluation"]["weight"] == sum(shard.tokens - shard.documents for shard in held)
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "▮" in events["model"]["text"]
    again = worlds(2).run(loop.run, config, QUIET)[0]
    assert (again.code, again.losses) == (0, [])  # nothing to do


def test_a_stopped_run_goes_on_under_another_layout_as_if_never_stopped(worlds, text: Path, tmp_path: Path) -> None:
    whole = config_of(tmp_path / "whole", text)
    worlds(1).run(loop.run, whole, QUIET)
    expected = losses(tmp_path / "whole")
    cut = config_of(tmp_path / "cut", text, layout="dp2 zero3")
    stopped = worlds(2).run(loop.run, cut, replace(QUIET, until=2))[0]
    assert (stopped.code, stopped.step) == (STOPPED, 2)
    moved = config_of(tmp_path / "cut", text, layout="tp2 sp", checkpoint={"every": 2})
    assert worlds(2).run(loop.run, moved, replace(QUIET, until=4))[0].code == STOPPED
    piped = config_of(tmp_path / "cut", text, layout="pp2 zero1")
    assert worlds(2).run(loop.run, piped, QUIET)[0].code == 0
    assert close(losses(tmp_path / "cut"), expected)


def test_a_run_keeps_its_checkpoints_in_the_store_of_its_config_and_resumes(text: Path, tmp_path: Path) -> None:
    loop.run(config_of(tmp_path / "whole", text), QUIET)
    store = f"file://{tmp_path}/elsewhere"
    config = config_of(tmp_path / "cut", text, checkpoint={"store": store, "every": 2})
    assert loop.run(config, replace(QUIET, until=3)).code == STOPPED
    assert loop.run(config, QUIET).code == 0
    assert close(losses(tmp_path / "cut"), losses(tmp_path / "whole"))
    assert [step for step, _ in checkpoints(config.checkpoints)] == [4, 6]
    assert not (tmp_path / "cut" / "checkpoints").exists()
    with pytest.raises(TrainError, match=rf"IG985(.|\n)*{store}/step-00000006"):
        loop.run(config, replace(QUIET, resume="never"))
    with pytest.raises(ValueError, match=r"checkpoint\.store"):
        config_of(tmp_path / "other", text, checkpoint={"store": "s3://me:pass@bucket/run"})


def test_an_evaluation_that_a_stop_came_before_is_made_up_for_by_the_resume(text: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, text, evaluate={"every": 2})
    assert loop.run(config, replace(QUIET, until=2)).code == STOPPED
    assert loop.run(config, replace(QUIET, until=3)).code == STOPPED
    assert loop.run(config, QUIET).code == loop.run(config, QUIET).code == 0
    lines = journal.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("event") == "evaluation"] == [2, 4, 6]


def test_an_evaluation_made_up_for_counts_for_the_best_checkpoint_and_for_patience(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped before each evaluation ends where the run that goes on ends, with its best checkpoint."""
    held_out = {2: 1.0, 4: 2.0, 6: 3.0}
    for name, untils in (("whole", [None]), ("cut", [2, 4, 6, None, None])):
        coming = iter(held_out.values())
        monkeypatch.setattr(LanguageTask, "evaluate", lambda *_, coming=coming: Evaluated(next(coming), 1.0))
        config = config_of(
            tmp_path / name, text, evaluate={"every": 2, "patience": 2}, steps=8,
            checkpoint={"keep_last": 1, "keep_best": "eval_loss"},
        )  # fmt: skip
        for until in untils:
            done = loop.run(config, replace(QUIET, until=until))
        assert (done.code, done.step) == (0, 6)
        assert json.loads((config.checkpoints / "best").read_text()) == {"step": 2}
        assert [step for step, _ in checkpoints(config.checkpoints)] == [2, 6]


def interrupt(step: int, job: LanguageTask, *, at: int, rank: int) -> None:
    if step == at and job.mesh.rank == rank:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_ends_early_when_the_held_out_loss_does_not_fall(worlds, text: Path, tmp_path: Path) -> None:
    """Patience is counted over a stop and a resume; the same command then has nothing to do but the picture."""
    evaluate = {"batches": 1, "every": 1, "first": True, "patience": 3}
    config = config_of(tmp_path / "run", text, layout="dp2", optimizer={"lr": 20.0, "warmup": 0}, evaluate=evaluate)
    assert worlds(2).run(loop.run, config, replace(QUIET, until=2))[0].code == STOPPED
    done = worlds(2).run(loop.run, config, QUIET)[0]
    assert (done.code, done.step) == (0, 3)
    again = worlds(2).run(loop.run, config, QUIET)[0]
    assert (again.code, again.step, again.losses) == (0, 3, [])
    lines = list(journal.read(tmp_path / "run" / "metrics.jsonl"))
    found = [line["loss"] for line in lines if line.get("event") == "evaluation"]
    assert len(found) == 4
    assert min(found) == found[0]
    said = [line["text"] for line in lines if line.get("event") == "stopped early"]
    assert said[0] == f"no held-out loss below {found[0]:.4f} in 3 evaluations"
    with pytest.raises(ValueError, match=r"evaluate\.patience needs evaluate\.every"):
        config_of(tmp_path / "other", text, evaluate={"patience": 2})


def test_a_signal_to_one_rank_stops_all_after_the_same_step(worlds, text: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, text, layout="dp2")
    orders = RunOptions(show="none", signals=(signal.SIGTERM,), before_step=partial(interrupt, at=2, rank=1))
    first, second = worlds(2).run(loop.run, config, orders)
    assert (first.code, first.step) == (second.code, second.step) == (STOPPED, 3)
    assert second.why == "SIGTERM"
    (tmp_path / "STOP").touch()
    again = worlds(2).run(loop.run, config, QUIET)[0]
    assert (again.code, again.losses, again.why) == (STOPPED, [], "a STOP file")
    assert not (tmp_path / "STOP").exists()
    assert worlds(2).run(loop.run, config, QUIET)[0].code == 0
    assert len(losses(tmp_path)) == 6


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan")

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def poison(step: int, job: LanguageTask, *, at: int, rank: int) -> None:
    """The forward of one rank gives NaN in one step."""
    handles = getattr(job, "handles", [])
    for handle in handles:
        handle.remove()
    if step == at and job.mesh.rank == rank:
        norm = job.model.norm
        assert norm is not None
        handles.append(norm.register_forward_hook(lambda *a: _Broken.apply(a[-1])))
    job.handles = handles  # type: ignore[attr-defined]


def test_a_nan_in_one_rank_stops_all_before_anyone_steps_and_is_named(worlds, text: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, text, layout="dp2", checkpoint={"every": 1})
    outcome = worlds(2).run(loop.run, config, replace(QUIET, before_step=partial(poison, at=3, rank=1)))[0]
    assert (outcome.code, outcome.step) == (loop.NOT_FINITE, 3)
    assert "step 4: not finite: the loss of rank 1; gradients of" in outcome.why
    # The step that was not taken is taken when the run goes on, from parameters that nobody spoiled.
    assert worlds(2).run(loop.run, config, QUIET)[0].code == 0
    whole = config_of(tmp_path / "whole", text, layout="dp2")
    worlds(2).run(loop.run, whole, QUIET)
    assert losses(tmp_path) == losses(tmp_path / "whole")


def test_skipping_goes_on(worlds, text: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, text, layout="dp2", safety={"not_finite": "skip"})
    outcome = worlds(2).run(loop.run, config, replace(QUIET, before_step=partial(poison, at=3, rank=0)))[0]
    assert (outcome.code, outcome.step, outcome.skipped) == (0, 6, 1)
    skipped = [line["step"] for line in journal.read(tmp_path / "metrics.jsonl") if line.get("event") == "skipped"]
    assert skipped == [4]


def flip(step: int, job: LanguageTask, *, at: int) -> None:
    """What a broken card does: one bit of one copy."""
    if step == at and job.mesh.rank == 1:
        job.engine.local_shard("blocks.0.norm1.weight")[0] += 1e-12


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero1", "tp2", "tp2 zero3"])
def test_a_copy_that_drifts_is_named(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    config = config_of(tmp_path, text, layout=layout, safety={"replicas_every": 1, "state_every": 0})
    with pytest.raises(LaunchError, match="IG984") as caught:
        worlds(2).run(loop.run, config, replace(QUIET, before_step=partial(flip, at=2)))
    assert "copies of parameters are no longer equal in step 3" in str(caught.value)
    assert "blocks.0.norm1.weight" in str(caught.value)


def unlike(folder: Path, text: Path) -> None:
    mesh = Mesh("dp2")
    config = config_of(folder, text, layout="dp2", steps=6 + mesh.rank)
    loop.run(config, QUIET)


def test_ranks_with_different_configs_are_refused_with_the_lines_that_differ(
    worlds, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match="IG983") as caught:
        worlds(2).run(unlike, tmp_path, text)
    assert "-steps: 6" in str(caught.value)
    assert "+steps: 7" in str(caught.value)


def test_other_data_and_old_checkpoints_are_refused(worlds, text: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, text, layout="dp2")
    worlds(2).run(loop.run, config, replace(QUIET, until=2))
    with pytest.raises(LaunchError, match="IG986") as caught:
        assert config.data is not None
        data = config.data.model_copy(update={"length": 13})
        worlds(2).run(loop.run, config.model_copy(update={"batch": 4, "data": data}), QUIET)
    assert f"batch was {config.batch} and is 4" in str(caught.value)
    assert "data.length was 12 and is 13" in str(caught.value)
    with pytest.raises(LaunchError, match="IG937") as caught:
        model = config.model.model_copy(update={"options": {**config.model.options, "rope_theta": 500.0}})
        worlds(2).run(loop.run, config.model_copy(update={"model": model}), QUIET)
    assert "rope_theta is 10000.0 there and 500.0 here" in str(caught.value)
    model = config.model.model_copy(update={"options": {**config.model.options, "dropout": 0.1}})
    worlds(2).run(loop.run, config.model_copy(update={"model": model}), replace(QUIET, until=3))
    (told,) = [line["text"] for line in journal.read(tmp_path / "metrics.jsonl") if line.get("event") == "resumed"]
    assert told.endswith("model.options was {'vocab': 257} and is {'vocab': 257, 'dropout': 0.1}")
    with pytest.raises(LaunchError, match="IG985"):
        worlds(2).run(loop.run, config, replace(QUIET, resume="never"))
    narrow = config_of(tmp_path / "narrow", text, model={"preset": "tiny-llama"})
    with pytest.raises(LaunchError, match="IG635"):
        worlds(1).run(loop.run, narrow, QUIET)


def batches_of(layout: str, folder: Path, text: Path) -> list[tuple[int, list[int]]]:
    """(sample, its tokens) of this data rank in steps 0 and 5, cut into micro-batches as the run cuts them."""
    mesh = Mesh(layout)
    job = LanguageTask(config_of(folder, text, layout=layout), mesh)
    found = []
    for step in (0, 5):
        batch = job.batch(step)
        found += list(zip(batch["samples"].tolist(), batch["tokens"].tolist(), strict=True))
    return found


def test_every_layout_sees_the_same_samples(worlds, text: Path, tmp_path: Path) -> None:
    expected = sorted(worlds(1).run(batches_of, "dp1", tmp_path, text)[0])
    assert len(expected) == 16
    for layout, holders in (("dp2", 1), ("tp2 sp", 2), ("cp2", 2), ("pp2", 2), ("dp2 zero3", 1)):
        found = worlds(2).run(batches_of, layout, tmp_path, text)
        assert sorted(sample for rank in found for sample in rank) == sorted(expected * holders), layout


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with its tokenizer, and pairs to train it on."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = [f"w{i}" for i in range(40)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=45, max_position_embeddings=16, **sizes)).save_pretrained(folder)
    pairs = [{"a": f"w{i} w{(3 * i) % 40}", "b": f"w{(i + 7) % 40} w{i}"} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def pairs_of(folder: Path, encoder: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "run": str(folder),
        "model": {"path": str(encoder), "dtype": "fp64"},
        "pairs": {"path": str(encoder / "pairs.jsonl"), "keys": ["a", "b"], "chunk": 3, "learn_scale": True},
        "optimizer": {"lr": 1e-2},
        "steps": 3,
        "batch": 12,
        "evaluate": {"first": True},
    }
    return Config.model_validate({**values, **changes})


def evaluations(folder: Path) -> list[tuple[float, float]]:
    lines = journal.read(folder / "metrics.jsonl")
    return [(line["loss"], line["accuracy"]) for line in lines if line.get("event") == "evaluation"]


def test_pairs_train_alike_under_every_layout_and_leave_an_encoder(worlds, encoder: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    found = {}
    for ranks, layout, chunk in ((1, "dp1", 12), (2, "dp2", 3), (2, "dp2 zero3", 2)):
        folder = tmp_path / layout
        pairs = {**pairs_of(folder, encoder).pairs.model_dump(), "chunk": chunk}  # type: ignore[union-attr]
        worlds(ranks).run(loop.run, pairs_of(folder, encoder, layout=layout, pairs=pairs), QUIET)
        found[layout] = losses(folder) + [value for pair in evaluations(folder) for value in pair]
    whole = found["dp1"]
    assert whole[2] < whole[0]
    assert all(close(values, whole) for values in found.values())
    trained = AutoModel.from_pretrained(tmp_path / "dp1" / "model", dtype=torch.float64)
    first = AutoModel.from_pretrained(encoder, dtype=torch.float64)
    assert not torch.equal(trained.embeddings.word_embeddings.weight, first.embeddings.word_embeddings.weight)


def test_pairs_go_on_under_another_layout(worlds, encoder: Path, tmp_path: Path) -> None:
    worlds(1).run(loop.run, pairs_of(tmp_path / "whole", encoder), QUIET)
    worlds(2).run(loop.run, pairs_of(tmp_path / "cut", encoder, layout="dp2 zero1"), replace(QUIET, until=1))
    worlds(1).run(loop.run, pairs_of(tmp_path / "cut", encoder), QUIET)
    assert close(losses(tmp_path / "cut"), losses(tmp_path / "whole"))


def test_pairs_on_a_layout_that_cuts_the_model_are_refused(worlds, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="IG640"):
        worlds(2).run(loop.run, pairs_of(tmp_path, encoder, layout="tp2"), QUIET)


class TwoMeans(Head):
    """The loss of all labels, and that of the even ones."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, chunk: int | None = None) -> Terms:  # type: ignore[override]
        even = torch.where(labels % 2 == 0, labels, self.ignore_index)
        return Terms(lm=super().forward(x, labels, chunk), even=(*super().forward(x, even, chunk), 0.5))


def with_two_means(config: Config) -> None:
    def before(step: int, job: Any) -> None:
        job.model.head.__class__ = TwoMeans

    loop.run(config, replace(QUIET, before_step=before))


def test_the_log_shows_every_term_of_a_loss(worlds, text: Path, tmp_path: Path) -> None:
    quick = {"steps": 2, "evaluate": {"batches": 2, "first": False}}
    worlds(1).run(with_two_means, config_of(tmp_path / "one", text, **quick))
    worlds(2).run(with_two_means, config_of(tmp_path / "two", text, layout="dp2 zero1", **quick))
    one, two = (list(journal.read(tmp_path / name / "metrics.jsonl")) for name in ("one", "two"))
    compared = 0
    for ours, theirs in zip(two, one, strict=True):
        for name in ("loss", "loss/lm", "loss/even", "weight/even", "weight"):
            if name in theirs:
                assert abs(ours[name] - theirs[name]) <= 1e-9 * theirs[name], (name, ours, theirs)
                compared += 1
    assert compared == 2 * 5 + 4  # two steps, and one evaluation without the weight of `even`
    steps = [line for line in two if "event" not in line]
    assert abs(steps[0]["loss"] - steps[0]["loss/lm"] - 0.5 * steps[0]["loss/even"]) < 1e-9
    assert f"lm {steps[0]['loss/lm']:.4f}  even {steps[0]['loss/even']:.4f}" in journal.sentence(steps[0])
    assert "loss/even" in journal.sentence(next(line for line in two if line.get("event") == "evaluation"))
