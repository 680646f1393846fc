"""Switches of a run that change its speed or memory and none of its numbers, each beside the run without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isograd.core.layout import Layout
from isograd.errors import ConfigError
from isograd.io.safetensors_reader import SafetensorsReader
from isograd.train import journal, loop, reading
from isograd.train.loop import RunOptions
from isograd.train.run.signals import STOPPED

from .test_loop import QUIET, close, config_of, losses

LAYOUTS = ["dp2", "dp2 zero3", "tp2 sp", "pp2"]
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
    (tmp_path / "run.yaml").write_text(
        f"{line}\nrun: x\nsteps: 2\nbatch: 2\noptimizer: {{lr: 0.1}}\n"
        "data: {sources: [{builtin: stdlib}], length: 8}\n"
    )
    with pytest.raises(ConfigError) as caught:
        reading.load(tmp_path / "run.yaml")
    assert said in str(caught.value)
