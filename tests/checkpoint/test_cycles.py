"""A run that is cut and resumed five times ends as the undisturbed one: parameters, optimizer, counters, generators."""

from __future__ import annotations

from pathlib import Path

import pytest

from isograd.checkpoint import CheckpointManager
from isograd.checkpoint.read import Reader
from tests.checkpoint import cycles, toys

FAST = ("adamw", "loss scale", "contrastive")


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task in FAST else pytest.mark.medium) for task in cycles.TASKS]
)
def test_five_resumes_end_as_the_run_that_was_never_cut(worlds, tmp_path: Path, task: str) -> None:
    """FAILURES B1, for random layouts, stages and moments of saving; bits where one layout was kept, else 1e-9."""
    past = cycles.history(task, 0, 2)
    assert len(past.lives) == 6
    assert worlds(2).run(cycles.both, tmp_path, past) == [[], []]


def steps_counted(folder: Path, layout: str) -> set[float]:
    """Three lives of two steps each; Adam's step counts in the last checkpoint."""
    for life in range(3):
        engine = toys.engine_of(layout, seed=life)
        with CheckpointManager(folder, engine) as keeper:
            assert (keeper.load("auto") is None) == (life == 0)
            toys.train(engine, 2 * life, 2 * life + 2, gradients=False)
            keeper.save(2 * life + 2)
    counts = Reader(folder / "step-00000006").manifest.numbers["counts"]
    return {value for value, _ in counts["step"].values()}


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero3", "tp2 zero3"])
def test_the_second_resume_keeps_adams_step_count(worlds, tmp_path: Path, layout: str) -> None:
    """FAILURES B1: norms and biases, of which rank 0 owns no rows, had the step count of the first resume."""
    assert worlds(2).run(steps_counted, tmp_path, layout) == [{6.0}, {6.0}]
