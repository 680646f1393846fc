"""Switches of a run that change its speed or memory and none of its numbers, each beside the run without them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isograd.cli.main import main
from isograd.core.layout import Layout
from isograd.errors import ConfigError
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.train import journal, loop, reading
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selective_recompute_changes_no_bit_of_a_run(worlds, text: Path, tmp_path: Path, layout: str) -> None:
    train(worlds, tmp_path / "plain", text, layout)
    train(worlds, tmp_path / "less", text, layout, model={**MODEL, "recompute": "selective"})
    assert losses(tmp_path / "less") == losses(tmp_path / "plain")


@pytest.mark.parametrize("layout", [pytest.param(e, marks=[pytest.mark.medium, pytest.mark.slow][e != "dp2"]) for e in LAYOUTS])
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


def test_a_profile_has_our_phases_as_ranges_on_every_rank(worlds, text: Path, tmp_path: Path) -> None:
    for layout, ours in (
        ("dp2 zero1", {"isograd: forward", "isograd: backward", "isograd: reduce gradients", "isograd: gather parameters"}),
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
