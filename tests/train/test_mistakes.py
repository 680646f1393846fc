"""Users' mistakes: each is one short message that says what is wrong, where, and what to do; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.launcher.launch import World
from isograd.train import run_folder
from isograd.train.resources import LocalMachine

RUN = """version: 1
run: out
layout: dp2 zero1
model: {preset: tiny-llama, options: {vocab: 257}}
data:
  sources: [{builtin: stdlib}]
  length: 12
optimizer:
  lr: 1e-2
steps: 4
batch: 4
"""

# (what the user does, edit of the config, words of the command) -> what the message must hold
MISTAKES = {
    "a command misspelled": ("", "", ["tran", "run.yaml"], ["'tran'", "did you mean 'train'", "isograd --help"]),
    "an option misspelled": ("", "", ["train", "run.yaml", "--dryrun", "1"], ["'dryrun'", "did you mean 'dry-run'"]),
    "no such file": ("", "", ["train", "rum.yaml"], ["IG631", "rum.yaml", "isograd new quickstart"]),
    "a recipe's name for a file": ("", "", ["train", "pretrain"], ["the name of a recipe", "isograd new pretrain"]),
    "one number of two": ("", "", ["train", "run.yaml", "--optimizer.betas", "[0.9]"],
                          ["optimizer.betas: a value is missing, 1 given: AdamW's decay rates"]),
    "a key misspelled": (
        "  lr: 1e-2", "  lrr: 1e-2", ["train", "run.yaml"], ["run.yaml:9", "did you mean 'lr'", "'optimizer.lr' is"],
    ),
    "a value of another type": ("steps: 4", "steps: four", ["train", "run.yaml"], ["run.yaml:10: steps", "'four'"]),
    "a layout that is none": (
        "", "", ["train", "run.yaml", "--layout", "dp2 tp"], ["command line: --layout: ", "'tp' needs a number", "tp2"],
    ),
    "a batch that cannot be cut": (
        "batch: 4", "batch: 5", ["train", "run.yaml"], ["run.yaml", "batch 5 over dp 2", "multiple of dp"],
    ),
    "heads that tp does not divide": (
        "", "", ["train", "run.yaml", "--layout", "tp3"], ["IG406", "tp3", "nearest that works is tp2"],
    ),
    "a data folder that is missing": (
        "{builtin: stdlib}", "{path: tokens}", ["train", "run.yaml"], ["IG900", "tokens", "isograd data build tokens"],
    ),
    "more ranks than the machine has": (
        "", "", ["train", "run.yaml", "--layout", "dp64", "--batch", "64"],
        ["IG652", "64 ranks", "2 CPU cores", "--force"],
    ),
    "a model beyond the machine": (
        "", "", ["train", "run.yaml", "--model.options.hidden", "65536"], ["IG653", "GB", "--batch", "--force"],
    ),
    "the wrong number of ranks": (
        "", "", ["train", "run.yaml", "--nproc", "3"], ["IG637", "needs 2 ranks", "--nproc 3", "--layout"],
    ),
    "the wrong number of ranks for a dry run": (
        "", "", ["train", "run.yaml", "--nproc", "5", "--dry-run"], ["IG637", "needs 2 ranks", "--nproc 5"],
    ),
    "a last step before the first": ("", "", ["train", "run.yaml", "--until", "0"], ["IG600", "--until", "'0'"]),
    "an option given twice": (
        "", "", ["train", "run.yaml", "--until", "3", "--until=4"], ["IG600", "--until is given twice"],
    ),
    "no path of a run": ("", "", ["train", "run.yaml", "--run", ""], ["IG630", "command line: --run: give the path"]),
    "a run in a file": ("", "", ["train", "run.yaml", "--run", "run.yaml"], ["IG988", "File exists", "--run FOLDER"]),
    "a run below a file": ("", "", ["train", "run.yaml", "--run", "run.yaml/x"], ["IG988", "Not a directory"]),
    "a run where no folder can be made": ("", "", ["train", "run.yaml", "--run", "/proc/x"], ["IG988", "/proc/x"]),
    "pairs without an encoder": (
        "data:\n  sources: [{builtin: stdlib}]\n  length: 12", "pairs: {path: x.jsonl, keys: [a, b]}",
        ["train", "run.yaml"], ["IG641", "no model.path", "--model.path FOLDER"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_anything_starts(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, words, parts = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isograd.train.resources.this_machine", lambda *_: LocalMachine(None, 2, 16e9))
    monkeypatch.setattr(World, "run", lambda *_: pytest.fail("ranks were started"))
    assert old in RUN
    Path("run.yaml").write_text(RUN.replace(old, new) if old else RUN)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in parts), said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 6
    assert not Path("out").exists()


@pytest.mark.parametrize("words", [["--run", "."], ["--run", ".", "--dry-run"]])
def test_a_config_of_the_users_own_in_the_runs_folder_is_kept(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(World, "run", lambda *_: pytest.fail("ranks were started"))
    Path("config.yaml").write_text(f"# mine\n{RUN}")
    assert main(["train", "config.yaml", *words]) == 2
    said = capsys.readouterr().err
    assert "IG989" in said and "config.yaml" in said
    assert Path("config.yaml").read_text() == f"# mine\n{RUN}"


def test_a_config_that_a_run_has_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"{run_folder.WRITTEN}\nsteps: 1\n")
    run_folder.make_folder(tmp_path)


def test_a_folder_in_which_an_older_version_has_run_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    run_folder.make_folder(tmp_path)
