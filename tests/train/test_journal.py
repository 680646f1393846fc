"""The journal survives kills and resumes, and says in one line what a step did."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from isograd.checkpoint.folder import checkpoints
from isograd.errors import TrainError
from isograd.io import atomic, plots
from isograd.train import journal, run_folder
from isograd.train.journal import Journal
from isograd.train.optimizers import rate
from isograd.train.sections import Optimizer

LINE = {
    "step": 7, "steps": 9, "loss": 1.25, "grad_norm": 0.5, "lr": 1e-3, "unit": "tokens", "per_s": 12345.0,
    "per_s_rank": 3086.0, "mfu": 0.42, "memory_gb": 1.5, "data_wait": 0.01, "eta_s": 3725.0, "skipped": False,
}  # fmt: skip


def entries(file: Path) -> list[dict[str, object]]:
    return list(journal.read(file))


def test_a_resumed_run_has_one_value_at_each_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first = Journal(file, 0, [])
    for step in range(1, 6):
        first.write(step=step, loss=float(step))
    first.close()
    with file.open("a") as cut:
        cut.write('{"step": 6, "lo')  # what a kill leaves
    again = Journal(file, 3, [])
    again.write(step=4, loss=40.0)
    again.close()
    assert [(e["step"], e["loss"]) for e in entries(file)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    Journal(file, 0, []).close()
    assert not entries(file)


def test_what_is_not_finite_stays_readable_json(tmp_path: Path) -> None:
    shown: list[dict[str, object]] = []
    log = Journal(tmp_path / "m.jsonl", 0, [shown.append])
    log.write(step=1, loss=float("nan"), grad_norm=float("inf"))
    log.close()
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1, "loss": None, "grad_norm": None,
    }  # fmt: skip
    assert len(shown) == 1
    assert journal.curve(tmp_path / "m.jsonl") == plots.Curve([])


def test_a_step_is_one_line_with_everything_in_it() -> None:
    assert journal.sentence(LINE) == (
        "step     7/9  loss 1.2500  grad norm 0.500  lr 1.00e-03  12.3k tokens/s (3.09k per rank)  mfu 42.0%  "
        "mem 1.50 GB  data 1%  ETA 1:02:05"
    )
    assert "mfu" not in journal.sentence({**LINE, "mfu": None})
    assert journal.sentence({**LINE, "skipped": True}).endswith("SKIPPED")
    assert "nan" in journal.sentence({**LINE, "loss": float("nan")})


def test_a_step_fits_the_terminal() -> None:
    """FAILURES D: lines were wider than the terminal. What is left out is in metrics.jsonl."""
    far = {**LINE, "step": 100_000, "steps": 100_000, "grad_norm": 1234.5, "loss": 10.5, "skipped": True}
    for columns in (80, 100, 120):
        for line in (LINE, far, {**LINE, "mfu": None}):
            assert len(journal.sentence(line, columns)) <= columns
    assert journal.sentence({**LINE, "mfu": None}, 80) == (
        "step     7/9  loss 1.2500  norm 0.500  lr 1.00e-03  12.3k tokens/s  ETA 1:02:05"
    )


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="IG981"):
        Journal(tmp_path / "no" / "such" / "m.jsonl", 0, [])
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match="IG988"):
        run_folder.make_folder(tmp_path / "file" / "run")
    with pytest.raises(TrainError, match="IG988"):
        run_folder.make_folder(tmp_path / ("x" * 300))
    assert checkpoints(tmp_path / ("x" * 300)) == []


def test_lines_wait_for_room_where_checkpoints_do(tmp_path: Path) -> None:
    """The first write is cut short, and the next ones find no room: the run ended, whatever `on_error` said."""
    file = tmp_path / "m.jsonl"
    log = Journal(file, 0, [], patient=True)
    real, answers = log._file, [5, OSError(errno.ENOSPC, "no room"), OSError(errno.ENOSPC, "no room")]

    class Full:
        def write(self, data: bytes) -> int:
            answer = answers.pop(0) if answers else len(data)
            if isinstance(answer, OSError):
                raise answer
            return real.write(data[:answer])

    log._file = Full()
    for step in range(1, 4):
        log.write(step=step, loss=1.0 / step)
    log._file = real
    log.close()
    assert [e["step"] for e in entries(file)] == [1, 2, 3]


def test_the_curve_is_high_where_the_loss_is() -> None:
    assert journal.sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert journal.sparkline([1.0, 1.0]) == "▁▁"
    assert journal.sparkline([float("nan")]) == ""
    assert len(journal.sparkline([float(i) for i in range(1000)])) <= 60


@pytest.mark.parametrize(
    ("schedule", "middle"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55), ("wsd", 1.0)]
)  # half way from 1 to 0.1
def test_the_rate_rises_and_falls_as_its_schedule_says(schedule: str, middle: float) -> None:
    config = Optimizer(lr=1e-2, min_lr=1e-3, warmup=4, schedule=schedule)
    assert [rate(config, step, 104) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(config, 4, 104) == pytest.approx(1.0)
    assert rate(config, 54, 104) == pytest.approx(middle)
    assert rate(config, 104, 104) == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_a_picture_shows_losses_distances_and_accuracies(tmp_path: Path) -> None:
    runs = {}
    for name, factor in (("dp1", 1.0), ("tp2", 1 + 1e-9)):
        runs[name] = tmp_path / f"{name}.jsonl"
        log = Journal(runs[name], 0, [])
        for step in range(1, 4):
            log.write(step=step, loss=factor * 4.0 / step)
        log.write(step=3, event="evaluation", loss=1.5, weight=10, unit="pairs", accuracy=0.75)
        log.close()
    drawn = {name: journal.curve(file) for name, file in runs.items()}
    assert drawn["dp1"].measures == {"accuracy": [(3, 0.75)]}
    apart = plots.differences(drawn)
    assert list(apart) == ["tp2"]
    assert [gap for _, gap in apart["tp2"]] == pytest.approx([1e-9] * 3, rel=1e-3)
    assert plots.curves(drawn, tmp_path / "x.png", "two runs")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial*"))


def test_the_live_picture_shows_any_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    live = journal.Live()
    live(LINE)
    live({"step": 7, "event": "model", "text": "a sample: x[/red] [bold]"})  # no markup of ours
    live.close()
    shown = capsys.readouterr().out
    assert "x[/red] [bold]" in shown
    assert "78%" in shown


def test_a_text_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    """A run that was killed as it wrote its first config.yaml left it empty, and its next start was refused (IG989)."""
    file = tmp_path / "config.yaml"
    atomic.replace_text(file, "before")
    with pytest.raises(UnicodeEncodeError):
        atomic.replace_text(file, "after" * 10_000 + "\udc80")
    assert file.read_text() == "before"


def test_wsd_is_constant_and_falls_in_the_last_part_of_the_run() -> None:
    config = Optimizer(lr=1e-2, min_lr=1e-3, warmup=10, schedule="wsd", decay=0.25)
    found = [rate(config, step, 100) for step in range(101)]
    assert found[4] == 0.5
    assert found[10:76] == [1.0] * 66
    assert found[76] == pytest.approx(1 - 0.9 / 25)
    assert found[88] == pytest.approx(1 - 0.9 * 13 / 25)
    assert found[100] == pytest.approx(0.1)
