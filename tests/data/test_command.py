"""isograd data, as its user meets it: what is printed, and each error on one exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.data import Mixture, Source, builtin_chats, preferences
from tests.data.toys import lines_file, toy


def test_build_show_and_verify_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(lines_file(tmp_path / "source.txt")), str(tmp_path / "out")
    build = ["data", "build", out, source, "--documents", "line", "--validation", "0.2", "--workers", "1"]
    assert main(build) == 0
    said = capsys.readouterr()
    assert "tokens to train on" in said.out
    assert "data build: 100% of" in said.err
    assert main(["data", "show", out, "--length", "64", "--n", "2"]) == 0
    said = capsys.readouterr()
    assert "tokenizer bytes, vocabulary 257, end of document 256" in said.out
    assert said.out.count("sample ") == 2
    assert "  [1] " in said.out
    assert main(["data", "verify", out]) == 0
    assert "all as they were built" in capsys.readouterr().out


def test_on_a_terminal_progress_is_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    source = str(lines_file(tmp_path / "source.txt"))
    assert main(["data", "build", str(tmp_path / "out"), source, "--documents", "line", "--workers", "1"]) == 0
    said = capsys.readouterr().err
    assert "━" in said
    assert "tokens" in said
    assert "data build:" not in said


def test_show_spells_out_what_a_terminal_would_act_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil.txt").write_text("red \x1b[31m alert\x07")
    assert main(["data", "build", str(tmp_path / "out"), str(tmp_path / "evil.txt"), "--validation", "0"]) == 0
    assert main(["data", "show", str(tmp_path / "out"), "--n", "1", "--length", "64"]) == 0
    said = capsys.readouterr().out
    assert "red \\x1b[31m alert\\x07" in said
    assert "\x1b" not in said


def test_conversations_are_shown_as_training_sees_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    source, out = builtin_chats.conversations(tmp_path / "sums.jsonl", "sums"), str(tmp_path / "out")
    words = ["--tokenizer", str(builtin_chats.tokenizer(tmp_path / "tokenizer")), "--chat", "--workers", "1"]
    assert main(["data", "build", out, str(source), *words]) == 0
    capsys.readouterr()
    assert main(["data", "show", out, "--length", "200", "--n", "2"]) == 0
    said = capsys.readouterr().out
    assert "packing whole, length 200" in said
    assert "<|im_start|>assistant\n      ▶" in said and "<|im_end|>◀" in said and "tokens of filling" in said
    rows = Mixture([Source(out)], length=200, batch=2, packing="whole").rows(0, range(2))
    for row in range(2):
        assert f"sample {row} of train: 200 tokens, {int((rows['labels'][row] != -100).sum())} labels" in said
    assert main(["data", "show", out, "--n", "1"]) == 0
    assert "packing whole, length 119\n" in capsys.readouterr().out  # the longest conversation
    assert main(["data", "show", out, "--n", "1", "--packing", "stream"]) == 0
    assert "plain stream" in capsys.readouterr().out


def test_pairs_of_answers_are_shown_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    tokenizer, run = str(builtin_chats.tokenizer(tmp_path / "tokenizer")), tmp_path / "data"
    file = builtin_chats.pairs(tmp_path / "sums.jsonl", "sums")
    preferences.prepare(run, file, tokenizer, preferences.conversations(file, strangers=True), answers=3)
    assert main(["data", "show", str(run), "--n", "1", "--length", "56"]) == 0
    said = capsys.readouterr().out
    assert "pairs, rows of at most 56 tokens, with strangers (KTO)" in said and "pairs have an answer" in said
    found = preferences.Preferences(run, length=56, batch=1, seed=0, held_out=0.0, answers=3)
    (pair,) = found.numbers(0)
    for answer, name in enumerate(("chosen", "rejected", "stranger")):
        rows = found.rows([pair], range(1), range(answer, answer + 1))
        counted, width = int((rows["labels"] != -100).sum()), rows["labels"].shape[2]
        assert f"[{name}: {width} tokens, {counted} labels] <|im_start|>user" in said
    assert said.count("▶") == 4 and "◀" in said
    for more in (["--split", "validation"], ["--packing", "whole"]):
        assert main(["data", "show", str(run), *more]) == 2
        assert capsys.readouterr().err.startswith("IG906")


def test_no_document_for_validation_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("one")
    assert main(["data", "build", str(tmp_path / "out"), str(tmp_path / "one.txt"), "--validation", "0.001"]) == 0
    assert "no document was assigned to validation" in capsys.readouterr().err
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n\n")
    words = ["data", "build", str(tmp_path / "lines"), str(tmp_path / "lines.txt"), "--documents", "line"]
    assert main([*words, "--validation", "0"]) == 0
    said = capsys.readouterr()
    assert "left out: 2 documents without text" in said.out
    assert "validation" not in said.err


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "absent"], "IG900"),
        (["verify", "absent"], "IG900"),
        (["build", "out", "absent.txt"], "IG910"),
        (["build", "out"], "IG600"),
        (["build", "out", "toy.txt", "--tokenizer", "absent"], "IG914"),
        (["build", "toy", "toy.txt"], "IG916"),
        (["build", "out", "toy.txt", "--workers", "0"], "IG600"),
        (["build", "out", "toy.txt", "--validation", "1"], "IG924"),
        (["show", "toy", "--split", "test"], "IG600"),
        (["show", "toy", "--lenght", "3"], "IG600"),
        (["show", "toy", "--n", "101"], "IG600"),
        (["show", "toy", "--length", str(10**12)], "IG600"),
        (["biuld"], "IG600"),
        ([], "IG600"),
    ],
)
def test_what_cannot_be_done_is_one_error_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    toy(tmp_path / "toy")
    assert main(["data", *words]) == 2
    assert capsys.readouterr().err.startswith(code)


def test_damage_has_the_exit_codes_that_the_page_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is cut is known by its size; an id beyond the vocabulary only when it is read."""
    toy(tmp_path / "toy")
    file = tmp_path / "toy" / "train-00000.bin"
    whole = file.read_bytes()
    for content, code, name in ((whole[:-2], 2, "IG902"), (b"\xff" * len(whole), 1, "IG928")):
        file.write_bytes(content)
        assert main(["data", "show", str(tmp_path / "toy"), "--n", "1"]) == code
        assert capsys.readouterr().err.startswith(name)


def test_an_option_that_is_nearly_right_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "toy", "--lenght", "3"]) == 2
    assert "did you mean '--length'?" in capsys.readouterr().err


def test_help_and_builds_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one")
    script = (
        "import sys, isograd.cli.main\n"
        "try: isograd.cli.main.main(['data', 'build', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'numpy' not in sys.modules\n"
        "isograd.cli.main.main(['data', 'build', 'out', 'one.txt', '--validation', '0', '--workers', '1'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=tmp_path)
