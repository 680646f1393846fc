"""Ranks that the others wait for are named in the journal."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from isograd.train import journal, loop
from isograd.train.language import LanguageTask
from isograd.train.run.stragglers import Stragglers
from tests.train.test_loop import QUIET, config_of


def test_a_rank_is_named_when_it_is_late_in_most_steps_and_then_ever_more_rarely() -> None:
    ranks = Stragglers(["a", "a", "b", "b"])
    said = [ranks.after(1.0, [0.8, 0.82, 0.78, 0.0 if step % 10 else 0.8]) for step in range(1, 81)]
    named = {step: words for step, words in enumerate(said, 1) if words}
    assert named[10] == ["straggler: rank 3 on b came 0.8 s after the median in 9 of the last 10 steps"]
    assert list(named) == [10, 30, 70]


@pytest.mark.parametrize("waited", [[0.0, 0.04], [0.5, 0.45], [0.3, 0.3]])
def test_what_is_small_is_not_late(waited: list[float]) -> None:
    ranks = Stragglers(["a", "a"])
    assert not any(ranks.after(0.3 if waited[0] < 0.5 else 5.0, waited) for _ in range(100))


def test_half_of_the_ranks_may_be_late() -> None:
    ranks = Stragglers(["a"] * 8)
    said = [words for _ in range(10) for words in ranks.after(1.0, [0.0] * 4 + [0.6] * 4)]
    assert [words.split()[2] for words in said] == ["0", "1", "2", "3"]


def sleeps(step: int, task: LanguageTask) -> None:
    if task.mesh.rank == 1:
        time.sleep(0.3)


@pytest.mark.medium
@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3", "tp2", "pp2"])
def test_a_rank_that_sleeps_in_each_step_is_named_in_the_journal(
    worlds, text: Path, tmp_path: Path, layout: str
) -> None:
    config = config_of(tmp_path / "run", text, layout=layout, steps=13, checkpoint={"every": None})
    assert worlds(2).run(loop.run, config, replace(QUIET, before_step=sleeps))[0].code == 0
    found = [line for line in journal.read(tmp_path / "run" / "metrics.jsonl") if line.get("event") == "straggler"]
    assert len(found) == 1, found
    assert 8 <= found[0]["step"] <= 12
    words = found[0]["text"].split()
    assert words[:3] == ["straggler:", "rank", "1"]
    assert 0.2 <= float(words[4]) <= 0.6
