"""Data ranks that were given the same data are told; ranks that are to share their data are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks import check
from isograd_verify.judge.checks.copies import own_data
from isograd_verify.record.events import Collective, Draw, Event
from isograd_verify.record.recording import Recording
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding

from .recordings import Held, Step, numbers, write

SUMMED = Collective(n=0, op="all_reduce", group=(0, 1), dtype="float64", numel=12, phase="backward")
DRAWN = Draw(module="drop", forward=0, shape=(3,), into="x", out="x")


def data(rank: int, step: int) -> Tensor:
    return numbers(3, 5, seed=10 * rank + step)


def record(
    home: Path,
    given: Any = lambda rank, step: data(0, step),
    added: Any = lambda rank, step: numbers(4, 3, seed=step),
    held: Any = lambda rank: numbers(4, 3),
    events: Any = lambda rank: [SUMMED],
) -> Recording:
    """Two ranks, two steps: what each is given, what each adds, what each holds, what each does."""
    ranks: list[list[Step]] = [[], []]
    for rank, steps in enumerate(ranks):
        value = held(rank)
        for step in range(2):
            parts = [added(r, step) for r in range(2)]
            whole = parts[0] + parts[1]
            one = Held(value, whole, parts={0: parts[rank]})
            steps.append(Step({"w": one}, [given(rank, step)], events=events(rank)))
            value = value - 0.1 * whole
    return write(home, ranks, "dp2")


def said(recording: Recording) -> list[Finding]:
    return [f for step in recording.steps for f in own_data(Analysis(recording, step))]


def test_ranks_with_one_sampler_are_told_once_with_their_axis(tmp_path: Path) -> None:
    (found,) = said(record(tmp_path))
    assert (found.verdict, found.bug, found.axis) == (BUG, "same-data", "dp")
    assert found.sentence == (
        "ranks 0, 1 were given the same data in all 2 watched micro-batches, and their gradients are summed: "
        "they train as one rank would"
    )
    assert "DistributedSampler" in found.look


def test_one_batch_that_never_changes_may_be_there_to_measure_speed(tmp_path: Path) -> None:
    (found,) = said(record(tmp_path, given=lambda rank, step: data(0, 0)))
    assert found.verdict == INCONCLUSIVE
    assert "always the same batch: it is there to try something out, or by mistake" in found.sentence


def apart(rank: int, step: int) -> Tensor:
    return numbers(4, 3, seed=100 + 10 * rank + step)


def masks(rank: int) -> list[Event]:
    return [SUMMED, replace(DRAWN, into=f"{rank}", out=f"{rank}")]


def with_forward(op: str) -> Any:
    return lambda rank: [*masks(rank), replace(SUMMED, op=op, phase="forward")]


def test_other_random_masks_do_not_hide_that_the_data_are_one(tmp_path: Path) -> None:
    (found,) = said(record(tmp_path, added=apart, events=masks))
    assert (found.verdict, found.bug) == (BUG, "same-data")


def test_equal_draws_on_equal_data_are_no_second_bug(tmp_path: Path) -> None:
    draws = {0: {"into": "x", "out": "a"}, 1: {"into": "x", "out": "b"}}
    recording = record(tmp_path, added=apart, events=lambda rank: [SUMMED, replace(DRAWN, **draws[rank])])
    assert [f.bug for f in check(recording) if f.verdict == BUG] == ["same-data"]


RIGHT: dict[str, dict[str, Any]] = {
    "data of its own": {"given": data, "added": apart},
    "the same data in the first step only": {"given": lambda rank, step: data(rank * step, step), "added": apart},
    "tensor parallel: each has its own part of the weights": {"held": lambda rank: numbers(4, 3, seed=rank)},
    "context parallel: each computes its own part": {"added": apart},
    "context parallel with dropout": {"added": apart, "events": with_forward("all_to_all")},
    "nothing is summed": {"events": lambda rank: []},
    "a number for the log is summed": {"events": lambda rank: [replace(SUMMED, numel=1)]},
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of(tmp_path: Path, name: str) -> None:
    assert said(record(tmp_path, **RIGHT[name])) == []


def test_inputs_that_were_not_seen_prove_nothing(tmp_path: Path) -> None:
    assert said(record(tmp_path, given=lambda rank, step: {})) == []
