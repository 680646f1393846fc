"""What comparisons show: no curve hides another, one colour for a layout, tables that fit the terminal (FAILURES D)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from isograd.io import plots
from isograd.train import journal
from isograd.train.compare import ComparedRun, table
from isograd_verify.tell.findings import Subject
from isograd_verify.tell.report import Report, render

NAMES = ["dp4", "tp2 sp dp2", "cp2 ulysses dp2", "pp2 dp2 zero1"]


def pixels(file: Path, color: str, part: slice) -> int:
    picture = np.asarray(Image.open(file).convert("RGB"))
    picture = picture[int(part.start * len(picture)) : int(part.stop * len(picture))]
    return int((picture == ImageColor.getrgb(color)).all(-1).sum())


@pytest.mark.parametrize("count", [2, 4])
def test_equal_curves_are_all_seen_each_in_its_own_colour(tmp_path: Path, count: int) -> None:
    """A layout's curve was hidden where another had the same losses, which is what a comparison should show."""
    runs = {}
    for name in NAMES[:count]:
        runs[name] = tmp_path / f"{name}.jsonl"
        lines = [{"step": step, "loss": 3.0 + 10 / step} for step in range(1, 31)]
        held = [{"step": s, "event": "evaluation", "loss": 3.5, "weight": 1, "accuracy": s / 30} for s in (10, 20)]
        runs[name].write_text("".join(json.dumps(line) + "\n" for line in lines + held))
    drawn = {name: journal.curve(file) for name, file in runs.items()}
    assert plots.curves(drawn, tmp_path / "equal.png", "equal")
    for pen in plots.pens(list(runs)):
        top = pixels(tmp_path / "equal.png", pen.color, slice(0.0, 0.5))
        assert top > 150, f"{pen.name} is hidden: {top} pixels"
        assert pixels(tmp_path / "equal.png", pen.color, slice(0.5, 1.0)) > 100  # the same colour in the other plot


def test_layouts_have_different_colours() -> None:
    assert len({pen.color for pen in plots.pens([str(i) for i in range(10)])}) == 10


@pytest.mark.parametrize("columns", [80, 120])
def test_a_comparison_fits_the_terminal(columns: int) -> None:
    layouts = [*NAMES, "dp2 cp4 ulysses2 tp2 sp pp2 vpp2 zero1"]
    rows = [ComparedRun(layout, 32, 2.71828, 1.2e-12, 2.81828, 1234567.0, 12.34, 1234.5) for layout in layouts]
    lines = table(rows, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].split() == ["last", "largest", "held-out", "memory", "sent"]
    assert lines[1].split() == ["layout", "ranks", "loss", "difference", "loss", "tokens/s", "GB", "MB/step"]
    words = " ".join(lines).split()
    assert all(word in words for layout in layouts for word in layout.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_a_report_of_many_layouts_fits_the_terminal_and_shows_each(columns: int) -> None:
    layouts = ["dp2 zero2", "dp8", "tp2 sp", "dp2 tp2 sp zero1", "cp4 ulysses2 tp2", "pp2 vpp2 dp2 zero1", "dp4 zero3"]
    errors = {"blocks.0.attention.q_norm.weight": 1.2e-16, "embed.weight": 3e-17, "blocks.0.mlp.gate.weight": 2e-16}
    report = Report("isograd's own models against one device, float64")
    report.subjects = [Subject(f"llama {name}", 8, compared=True, errors=errors) for name in layouts]
    text = render(report, width=columns)
    assert max(map(len, text.splitlines())) <= columns
    assert text.count("blocks.*.attention.q_norm.weight") == text.count("blocks.*.mlp.gate.weight") >= 1
    assert text.count("1.2e-16") == len(layouts)
