"""Two dead models are equal, and that proves nothing; the page on adding a check runs as it is written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from isograd_verify.compare.compare import compare
from isograd_verify.judge.analysis import Analysis
from isograd_verify.judge.checks.state import alive
from isograd_verify.record.events import Event, Loss
from isograd_verify.run.corpus import Bench, every_name
from isograd_verify.tell.findings import BUG, INCONCLUSIVE, Finding

from .recordings import Held, Step, numbers, write

PAGE = Path(__file__).parents[1] / "docs" / "verify-a-new-check.md"


def test_a_dead_model_beside_a_dead_reference_does_not_pass(bench: Bench) -> None:
    (what,) = every_name(["dead-model"])
    subject = compare(bench.watch(what, 1, True, 0), bench.watch(what, 2, True, 0))
    assert max(subject.errors.values()) < 1e-12
    assert [f.bug for f in subject.findings if f.verdict == BUG] == ["dead-model"]


def said(home: Path, gradients: list[list[float]], events: list[Event]) -> list[Finding]:
    """One rank: in each step the gradients of two matrices and a bias, which is never zero."""
    value = {"a": numbers(3, 2), "b": numbers(2, 2, seed=1), "bias": numbers(2, seed=2)}
    steps = []
    for a, b in gradients:
        size = {"a": a, "b": b, "bias": 1.0}
        steps.append(Step({n: Held(v, size[n] * v, parts={0: size[n] * v}) for n, v in value.items()}, events=events))
    recording = write(home, [steps])
    return [found for step in recording.steps for found in alive(Analysis(recording, step))]


CHANCE = Loss(reduction="mean", count=6, classes=8, value=2.0794)
DEAD = {
    "zero in all steps, and the loss of chance": ([[0, 0], [0, 0]], [CHANCE], BUG),
    "zero in all steps, and no loss that is known": ([[0, 0], [0, 0]], [], INCONCLUSIVE),
    "zero in all steps, and another loss": (
        [[0, 0]], [Loss(reduction="mean", count=6, classes=8, value=3.0)], INCONCLUSIVE,
    ),
    "zero, for there are no labels": ([[0, 0]], [Loss(reduction="mean", count=0, classes=8)], ""),
    "zero in the first step only: a head of zeros": ([[0, 0], [1, 1]], [CHANCE], ""),
    "one matrix has a gradient": ([[0, 1], [0, 1]], [CHANCE], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DEAD)
def test_a_model_is_dead_when_no_matrix_has_a_gradient_in_any_step(tmp_path: Path, name: str) -> None:
    gradients, events, verdict = DEAD[name]
    assert [f.verdict for f in said(tmp_path, gradients, list(events))] == ([verdict] if verdict else [])


def test_a_finding_has_an_id_of_the_catalogue() -> None:
    with pytest.raises(KeyError):
        Finding(BUG, "dead-modle", "a typing error")


def test_the_page_on_a_new_check_runs_as_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "moves.py"
    file.write_text("\n".join(text for language, text in blocks if language == "python"))
    state = torch.get_rng_state()
    runpy.run_path(str(file))
    torch.set_rng_state(state)
    (shown,) = [text for language, text in blocks if not language]
    assert capsys.readouterr().out == shown
