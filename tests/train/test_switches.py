"""Switches of a run that change its speed or memory and none of its numbers, each beside the run without them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isograd.checkpoint import CheckpointManager
from isograd.checkpoint.read import open_whole
from isograd.cli.main import main
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.errors import ConfigError
from isograd.models import Transformer
from isograd.train import journal, loop, reading
from isograd.train.config import Config
from isograd.train.language import LanguageTask, model_config
from isograd.train.loop import RunOptions
from isograd.train.run.signals import STOPPED

from .test_loop import QUIET, close, config_of, losses

LAYOUTS = ["dp2", "dp2 zero3", "tp2 sp", "pp2"]
PLAIN = """run: x
steps: 2
batch: 2
optimizer: {lr: 0.1}
data: {sources: [{builtin: stdlib}], length: 8}
"""
MODEL = {"preset": "tiny-llama", "options": {"vocab": 257}, "dtype": "fp64"}


def train(worlds: Any, folder: Path, text: Path, layout: str, options: RunOptions = QUIET, **changes: Any) -> Any:
    config = config_of(folder, text, layout=layout, steps=3, **changes)
    outcome = worlds(Layout.parse(layout).world_size).run(loop.run, config, options)[0]
    assert outcome.code in (0, STOPPED)
    return config


@pytest.mark.medium
@pytest.mark.parametrize("layout", LAYOUTS)
def test_selective_recompute_changes_no_bit_of_a_run(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    train(worlds, tmp_path / "plain", text, layout)
    train(worlds, tmp_path / "less", text, layout, model={**MODEL, "recompute": "selective"})
    assert losses(tmp_path / "less") == losses(tmp_path / "plain")


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3"])
def test_offloaded_states_change_no_bit_of_a_run(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    """On CPUs, where nothing moves; tests/imagined_cuda says where states lie on cards."""
    lr = {"lr": 1e-2, "warmup": 2}
    train(worlds, tmp_path / "plain", text, layout, optimizer=lr)
    train(worlds, tmp_path / "less", text, layout, optimizer={**lr, "offload": True})
    assert losses(tmp_path / "less") == losses(tmp_path / "plain")
    (tmp_path / "run.yaml").write_text(f"layout: dp2\nmodel: {{preset: quickstart}}\n{PLAIN}")
    with pytest.raises(ConfigError, match=r"optimizer.offload needs row shards"):
        reading.load(tmp_path / "run.yaml", ["--optimizer.offload", "true"])


@pytest.mark.medium
def test_fp16_trains_with_a_loss_scale_that_finds_its_place(worlds, text: Path, tmp_path: Path) -> None:
    """Steps that overflow are skipped while the scale falls, and are no failure; the rest trains as fp32 does."""
    for dtype in ("fp32", "fp16"):
        config = config_of(tmp_path / dtype, text, layout="dp2 zero1", steps=30, model={**MODEL, "dtype": dtype})
        assert worlds(2).run(loop.run, config, QUIET)[0].code == 0
    narrow, wide = (losses(tmp_path / dtype) for dtype in ("fp16", "fp32"))
    reader = open_whole(tmp_path / "fp16" / "checkpoints" / "step-00000030")
    assert {saved.dtype for key, saved in reader.manifest.tensors.items() if key.startswith("model/")} == {"F16"}
    assert narrow[0] == pytest.approx(wide[0], rel=1e-3)
    assert narrow[-1] < narrow[0] and narrow[-1] == pytest.approx(wide[-1], rel=0.05)


@pytest.mark.parametrize(
    "layout", [pytest.param(e, marks=[pytest.mark.medium, pytest.mark.slow][e != "dp2"]) for e in LAYOUTS]
)
def test_compiled_blocks_train_as_eager_ones_do(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    """By inductor, in fp64: sums in another order, and nothing else."""
    train(worlds, tmp_path / "plain", text, layout)
    train(worlds, tmp_path / "fast", text, layout, model={**MODEL, "compile": True})
    assert close(losses(tmp_path / "fast"), losses(tmp_path / "plain"))


def test_what_cannot_be_compiled_is_in_the_log(worlds, text: Path, tmp_path: Path) -> None:
    model = {**MODEL, "compile": True, "options": {"vocab": 257, "sliding_window": 4}}
    train(worlds, tmp_path, text, "dp1", model=model)
    notes = [line["text"] for line in journal.read(tmp_path / "metrics.jsonl") if line.get("event") == "note"]
    assert notes == ["not compiled: blocks.0, blocks.1: a window: its attention is computed block by block"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model: {preset: quickstart, compile: true, recompute: selective}", "run.yaml:1: model: compile goes with"),
        ("model: {preset: quickstart, recompute: some}", "run.yaml:1: model.recompute: "),
    ],
)
def test_switches_that_contradict_each_other_are_refused_with_their_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "run.yaml").write_text(f"{line}\n{PLAIN}")
    with pytest.raises(ConfigError) as caught:
        reading.load(tmp_path / "run.yaml")
    assert said in str(caught.value)


@pytest.mark.medium
def test_a_profile_has_our_phases_as_ranges_on_every_rank(worlds, text: Path, tmp_path: Path) -> None:
    for layout, ours in (
        (
            "dp2 zero1",
            {"isograd: forward", "isograd: backward", "isograd: reduce gradients", "isograd: gather parameters"},
        ),
        ("pp2", {"isograd: pipeline", "isograd: reduce gradients"}),
    ):
        train(worlds, tmp_path / layout, text, layout, replace(QUIET, profile=(1, 2)))
        for rank in (0, 1):
            file = tmp_path / layout / "profile" / "steps-1-2" / f"rank-{rank:05d}.json.gz"
            events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
            steps = {"in step 1, forward and backward", "in step 1, optimizer", "in step 2, forward and backward"}
            assert steps | ours <= set(ranges)
            assert not any(name.startswith("in step 3,") for name in ranges)
            assert ranges.count("isograd: reduce gradients") == 2
            stages = [name for name in ranges if name.startswith(f"isograd: F of stage {rank}, micro-batch")]
            assert len(stages) == (4 if layout == "pp2" else 0)  # two micro-batches in each of two steps
        assert losses(tmp_path / layout) == pytest.approx(losses(tmp_path / "dp2 zero1"), rel=1e-12)
    said = [line for line in journal.read(tmp_path / "pp2" / "metrics.jsonl") if line.get("event") == "profile"]
    assert [(line["step"], "ui.perfetto.dev" in line["text"]) for line in said] == [(2, True)]


@pytest.mark.parametrize("steps", ["0", "3-2", "two", "9"])
def test_a_profile_of_no_steps_is_refused(steps: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.yaml").write_text(PLAIN + "model: {preset: quickstart}\n")
    assert main(["train", str(tmp_path / "run.yaml"), "--profile", steps]) == 2
    assert "--profile" in capsys.readouterr().err


# -- averages of the weights -------------------------------------------------------------------------------------------


def tensors(run: Path, step: int, kind: str) -> dict[str, Tensor]:
    reader = open_whole(run / "checkpoints" / f"step-{step:08d}")
    keys = [key for key in reader.manifest.tensors if key.startswith(f"{kind}/")]
    return {key.partition("/")[2]: reader.read(key) for key in keys}


@pytest.mark.medium
@pytest.mark.parametrize("layout", [*LAYOUTS, "dp2 zero1"])
def test_an_average_of_the_weights_is_that_of_its_definition(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    every = {"every": 1, "keep_last": 9}
    config = train(worlds, tmp_path, text, layout, ema=0.8, checkpoint=every)
    mean = dict(Transformer(model_config(config), Mesh.unbound("1"), dtype=torch.float64).state_dict())
    for step in (1, 2, 3):
        for name, weight in tensors(tmp_path, step, "model").items():
            mean[name] = 0.8 * mean[name] + 0.2 * weight
        found = tensors(tmp_path, step, "ema")
        assert found.keys() == mean.keys()
        for name, average in found.items():
            assert float((average - mean[name]).abs().max()) <= 1e-14, name
            assert not torch.equal(average, tensors(tmp_path, step, "model")[name])


@pytest.mark.medium
@pytest.mark.parametrize(("first", "then"), [("dp2 zero3", "tp2 sp"), ("tp2", "pp2 zero1"), ("pp2", "dp2 zero3")])
def test_averages_are_the_same_bits_under_another_layout(
    worlds, text: Path, tmp_path: Path, first: str, then: str
) -> None:
    """The second run loads, and saves the same step at once: it is asked to stop before its first step."""
    model = {**MODEL, "dtype": "bf16"}
    train(worlds, tmp_path, text, first, replace(QUIET, until=2), ema=0.8, model=model)
    before = tensors(tmp_path, 2, "ema")
    assert {average.dtype for average in before.values()} == {torch.float32}
    config = config_of(tmp_path / "moved", text, layout=then, steps=3, ema=0.8, model=model)
    saved = worlds(2).run(loaded_and_saved, config, tmp_path / "checkpoints")
    assert saved == [2, 2]
    after = tensors(tmp_path / "moved", 2, "ema")
    assert before.keys() == after.keys()
    assert all(torch.equal(average, after[name]) for name, average in before.items())


def loaded_and_saved(config: Config, source: Path) -> int:
    task = LanguageTask(config, Mesh(config.layout))
    with CheckpointManager(config.folder / "checkpoints", task.engine) as keeper:
        found = keeper.load(source)
        assert found is not None
        keeper.save(found.step)
    return found.step


@pytest.mark.medium
def test_averages_begin_with_the_weights_of_a_checkpoint_that_has_none_and_are_exported(
    worlds, text: Path, tmp_path: Path, capsys: Any
) -> None:
    train(worlds, tmp_path / "run", text, "dp2", replace(QUIET, until=2))
    assert main(["ckpt", "convert", str(tmp_path / "run"), str(tmp_path / "no"), "--ema"]) == 2
    assert "IG950" in capsys.readouterr().err
    train(worlds, tmp_path / "run", text, "tp2 sp", ema=0.75)
    start, end = (tensors(tmp_path / "run", step, "model") for step in (2, 3))
    for name, average in tensors(tmp_path / "run", 3, "ema").items():
        assert float((average - (0.75 * start[name] + 0.25 * end[name])).abs().max()) <= 1e-14, name
    assert main(["ckpt", "convert", str(tmp_path / "run"), str(tmp_path / "mean"), "--ema"]) == 0
    assert main(["ckpt", "convert", str(tmp_path / "run"), str(tmp_path / "last")]) == 0
    mean, last = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "last"))
    assert torch.equal(mean["model.embed_tokens.weight"], tensors(tmp_path / "run", 3, "ema")["embed.weight"])
    assert torch.equal(last["model.embed_tokens.weight"], end["embed.weight"])
    train(worlds, tmp_path / "run", text, "dp1")  # a run without averages leaves them behind


# -- the best checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_the_best_checkpoint_is_written_and_stays(worlds, text: Path, tmp_path: Path) -> None:
    """The learning rate is too high from step 4 on: the lowest held-out loss is that of step 3, or before."""
    options: dict[str, Any] = {
        "optimizer": {"lr": 3.0, "warmup": 6, "schedule": "constant"}, "steps": 6,
        "evaluate": {"batches": 1, "every": 1}, "checkpoint": {"every": 2, "keep_last": 1, "keep_best": "eval_loss"},
    }  # fmt: skip
    folder = tmp_path / "checkpoints"
    for layout, until in (("dp2", 4), ("tp2 sp", None)):
        config = config_of(tmp_path, text, layout=layout, **options)
        assert worlds(2).run(loop.run, config, replace(QUIET, until=until))[0].code in (0, STOPPED)
    lines = [line for line in journal.read(tmp_path / "metrics.jsonl") if line.get("event") == "evaluation"]
    best = min(lines, key=lambda line: line["loss"])["step"]
    assert 1 <= best < 6
    assert json.loads((folder / "best").read_text()) == {"step": best}
    assert sorted(place.name for place in folder.glob("step-*")) == [f"step-{step:08d}" for step in (best, 6)]


def test_keep_best_without_evaluations_is_refused_with_its_line(tmp_path: Path) -> None:
    more = "model: {preset: quickstart}\ncheckpoint: {keep_best: eval_loss}\n"
    (tmp_path / "run.yaml").write_text(PLAIN + more)
    with pytest.raises(ConfigError, match=r"run.yaml:7: .*keep_best needs evaluate.every"):
        reading.load(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text(PLAIN + "model: {preset: quickstart}\nema: 1.5\n")
    with pytest.raises(ConfigError, match=r"run.yaml:7: ema: .*less than 1"):
        reading.load(tmp_path / "run.yaml")
