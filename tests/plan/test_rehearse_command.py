"""`isograd rehearse` as somebody meets it who has only a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.cli.rehearse import _build
from isograd.core.layout import Layout
from isograd.core.mesh import Mesh
from isograd.train.reading import load

CONFIG = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def test_a_config_is_rehearsed(capsys) -> None:
    assert main(["rehearse", str(CONFIG), "--layout", "dp2 pp2 zero1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("dp2 pp2 zero1: 4 ranks\n\nkind 1: rank 0 (pp0 dp0)")
    assert "all messages match: 4 of 4 ranks were simulated" in said
    assert "between steps: parameters" in said and "gradients 0 B" in said and "once, at the start: " in said


def test_a_shorter_step_has_micro_batches_of_the_same_size() -> None:
    layout = Layout.parse("dp2 pp2")
    config = load(str(CONFIG), ["--layout", str(layout), "--micro_batches", "4"]).config
    for micro_batches, rows in ((4, 8), (1, 2), (3, 6)):
        _, batch, count = _build(config, layout, micro_batches)(Mesh.imagine(layout, 0))
        assert (len(batch["tokens"]), count) == (rows, micro_batches)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "dp2 tp3"], "cannot be dealt out over tp3"),
        (["--layout", " "], "--layout is empty"),
        (["--micro-batches", "100000000"], "from 1 to 10000"),
        (["--micro-batches", "0"], "not a whole number from 1 to 10000"),
    ],
)
def test_what_cannot_be_rehearsed_is_said(capsys, words: list[str], said: str) -> None:
    assert main(["rehearse", str(CONFIG), *words]) == 2
    assert said in capsys.readouterr().err
