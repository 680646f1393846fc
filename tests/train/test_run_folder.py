"""A run whose launcher is killed: comm/test_launch.py has the ranks' side, tests/faults.py a whole run."""

from __future__ import annotations

from pathlib import Path

from isograd.train.run_folder import launcher_killed


def test_ranks_without_a_launcher_say_what_they_did_and_how_the_run_goes_on(tmp_path: Path) -> None:
    said = launcher_killed(tmp_path / "checkpoints", lambda: "in step 4, forward and backward")
    assert said.startswith("IG260: the command that started the ranks was killed")
    assert "seen:     in step 4, forward and backward" in said
    assert "the same command resumes from the first step" in said
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert "the same command resumes from the checkpoint of step 10" in launcher_killed(tmp_path / "checkpoints", str)
