"""Folders and files that somebody else made, and mistakes that are found before ranks are started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isograd.cli.main import main
from isograd.data import build
from isograd.errors import DataError, IsogradError, TrainError
from isograd.train import journal, loop, run_folder, startup
from isograd.train.config import Config
from isograd.train.loop import RunOptions
from tests.train.test_command import SMALL
from tests.train.test_loop import QUIET, config_of, encoder, evaluations, pairs_of

__all__ = ["encoder"]


@pytest.fixture
def config(tmp_path: Path, text: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL.format(folder=tmp_path, text=text))
    return file


@pytest.mark.parametrize(
    "name", ["checkpoints/lock", "config.yaml", "metrics.jsonl.partial", "metrics.jsonl", "exit-code"]
)
def test_a_run_writes_through_no_link_in_its_folder(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """FAILURES B5: the files that links in a run's folder point to were overwritten."""
    victim, link = tmp_path / "victim", tmp_path / "run" / name
    victim.write_text("precious")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    assert main(["train", str(config)]) == 2
    said = capsys.readouterr().err
    assert "IG666" in said and str(link) in said
    assert said.count("\n") <= 6
    assert victim.read_text() == "precious"


def test_links_that_wandb_makes_in_its_own_folder_do_not_stop_a_resume(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-1")
    run_folder.make_folder(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wandb").symlink_to(tmp_path)
    with pytest.raises(IsogradError, match=r"IG666.*data/wandb"):
        run_folder.make_folder(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "wandb").symlink_to(tmp_path)
    with pytest.raises(IsogradError, match=r"IG666.*other/wandb"):
        run_folder.make_folder(tmp_path / "other")


def test_writers_of_a_journal_follow_no_link_that_is_planted_later(tmp_path: Path) -> None:
    """FAILURES B5: the check at the start is not the only one."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("metrics.jsonl.partial", "exit-code.partial"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(IsogradError, match="IG666"):
        journal.Journal(tmp_path / "metrics.jsonl", 0, [])
    with pytest.raises(IsogradError, match="IG666"):
        run_folder.write_exit_code(tmp_path, 0)
    assert victim.read_text() == "precious"


def test_an_earlier_run_a_lost_checkpoint_and_a_damaged_one_are_refused_before_ranks_are_started(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAILURES B12: IG935, 936 and 985 ended with exit code 1 behind worker frames."""
    monkeypatch.setattr("isograd.launcher.launch.World", None)  # nothing may be started
    damaged = tmp_path / "run" / "checkpoints" / "step-00000001"
    damaged.mkdir(parents=True)
    for words, code in ((["never"], "IG985"), ([str(tmp_path / "no")], "IG935"), ([str(damaged)], "IG936")):
        assert main(["train", str(config), "--resume", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith(code) and "Traceback" not in said


def test_a_full_disk_is_the_last_thing_on_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FAILURES B10: the last words were a bare OSError out of closing the journal."""
    log = journal.Journal(tmp_path / "metrics.jsonl", 0, [])
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(TrainError, match="IG981") as caught:
        log.write(step=1, loss=1.0)
    log.close()
    assert "make room" in str(caught.value)
    assert caught.value.exit_code == 1


def test_data_whose_tokenizer_cannot_be_loaded_is_refused_before_ranks_are_started(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAILURES B13: all steps were taken, then a traceback at the sample of text."""

    def missing(_: object) -> None:
        raise DataError("IG914", "tokenizer.json needs the tokenizers package")

    monkeypatch.setattr(startup, "read_tokenizer", missing)
    startup.refuse_early(config_of(tmp_path / "run", text, log={"sample": 0}), "auto")
    with pytest.raises(DataError, match="IG914"):
        startup.refuse_early(config_of(tmp_path / "run", text, log={"sample": 5}), "auto")


def noted(folder: Path) -> list[Any]:
    return [line["text"] for line in journal.read(folder / "metrics.jsonl") if line.get("event") == "note"]


@pytest.mark.medium
def test_data_without_validation_is_said_at_the_start_and_a_run_leaves_its_exit_code(worlds, tmp_path: Path) -> None:
    """FAILURES B13: no line at all. FAILURES B12: torchrun's exit code is its own, so the run's is in a file."""
    (tmp_path / "in.txt").write_text("some text that is long enough for a window or two of tokens")
    build(tmp_path / "tokens", [tmp_path / "in.txt"], validation=0)
    run: Config = config_of(tmp_path / "run", tmp_path / "tokens", steps=2, micro_batches=1, batch=2)
    worlds(1).run(loop.run, run, RunOptions(show="none", signals=(), until=1))
    assert (tmp_path / "run" / "exit-code").read_text() == "75\n"
    worlds(1).run(loop.run, run, QUIET)
    assert (tmp_path / "run" / "exit-code").read_text() == "0\n"
    [note] = noted(tmp_path / "run")[:1]
    assert "no document of the data was assigned to validation" in note


def test_an_encoder_without_a_pooling_layer_trains(worlds, tmp_path: Path, encoder: Path) -> None:
    """FAILURES B17: TypeError add_pooling_layer, with a plain DistilBERT."""
    from transformers import AutoTokenizer, DistilBertConfig, DistilBertModel

    folder = tmp_path / "distilbert"
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)
    DistilBertModel(DistilBertConfig(vocab_size=45, dim=16, n_layers=1, n_heads=2, hidden_dim=24)).save_pretrained(
        folder
    )
    (folder / "pairs.jsonl").write_bytes((encoder / "pairs.jsonl").read_bytes())
    [outcome] = worlds(1).run(loop.run, pairs_of(tmp_path / "run", folder, steps=1), QUIET)
    assert outcome.code == 0


def test_fewer_held_out_pairs_than_ranks_are_evaluated_as_on_one_rank(worlds, tmp_path: Path, encoder: Path) -> None:
    """FAILURES B17: at ZeRO 3 ranks without a held-out pair called other collectives than those with one."""
    found = {}
    for ranks, layout in ((1, "dp1"), (2, "dp2 zero3")):
        run = pairs_of(tmp_path / layout, encoder, layout=layout, steps=1)
        assert run.pairs is not None
        one = run.model_copy(update={"pairs": run.pairs.model_copy(update={"evaluate": 1})})
        worlds(ranks).run(loop.run, one, QUIET)
        found[layout] = evaluations(tmp_path / layout)
    assert found["dp1"] == found["dp2 zero3"] == [(0.0, 1.0), (0.0, 1.0)]  # one pair: no negatives


def test_lines_that_are_no_entries_of_a_journal_are_left_out(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": "1"},
        {"loss": 3.0},
        [1],
        {"step": 2, "loss": "x"},
        {"step": 3, "event": 4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    assert list(journal.read(tmp_path / "metrics.jsonl")) == [{"step": 1, "loss": 2.0}]
