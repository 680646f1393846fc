"""Recipes of known models name the layouts that `isograd plan` finds, and the own one of each is rehearsed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.cli.plan import _search
from isograd.errors import PlanError
from isograd.plan import machine
from isograd.plan.memory import TIGHT
from isograd.train.reading import load
from isograd.train.resources import work_of
from tests.sizes import few

RECIPES = Path(__file__).parents[2] / "recipes"
PLANNED = ("qwen3-0.6b", "llama-1b", "qwen3-8b", "llama-8b", "llama-70b")
COUNTS = (1, 8, 64)


def lines(name: str) -> list[str]:
    """What a recipe says of each number of devices: the fastest layout that leaves a tenth of the memory."""
    work, device = work_of(load(RECIPES / f"{name}.yaml").config), machine.load("h100")
    room, said = (device.memory_gb - device.reserved_gb) * 1e9 * TIGHT, []
    for count in COUNTS:
        fits, what = [], "does not fit"
        with contextlib.suppress(PlanError):  # nothing fits
            fits = [one for one in _search(work, count, device).best if one.memory.total <= room]
        if fits:
            one = fits[0]
            recompute = {"none": "false", "full": "true"}.get(one.work.recompute, "selective")
            layout = "dp1" if count == 1 else one.layout
            what = f"{layout}, micro_batches {one.work.micro_batches}, recompute {recompute}"
            what += f", accumulate {one.work.accumulate}" * (one.work.reductions > 1)
            what += f": {one.memory.total / 1e9:.0f} GB"
        said.append(f"#   {count:>2} H100: {what}")
    return said


@pytest.mark.medium
@pytest.mark.parametrize("name", few(PLANNED, slow=["qwen3-8b", "llama-70b"]))
def test_the_layouts_of_a_recipe_are_those_that_plan_finds(name: str) -> None:
    text = (RECIPES / f"{name}.yaml").read_text()
    assert re.findall(r"^#   .. H100: .*$", text, re.M) == lines(name)


@pytest.mark.medium
@pytest.mark.parametrize("name", few(PLANNED[:4], slow=["llama-1b", "qwen3-8b"]))
def test_a_recipe_is_rehearsed_under_its_own_layout(name: str, capsys) -> None:
    assert main(["rehearse", str(RECIPES / f"{name}.yaml"), "--micro-batches", "1"]) == 0
    assert "all messages match" in capsys.readouterr().out
