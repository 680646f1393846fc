"""Tokenizers that isograd trains: every text back again, the same twice, and data built with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.data import builtin_chats
from isograd.data.manifest import read
from isograd.data.tokenizer import find_tokenizer
from tests.data.toys import lines_file, words


def test_a_trained_tokenizer_gives_every_text_back_in_fewer_tokens(tmp_path: Path, capsys) -> None:
    text = lines_file(tmp_path / "text.txt", 400)
    for name in ("a", "b"):
        options = ["--vocabulary", "400", "--documents", "line"]
        assert main(["data", "tokenizer", str(tmp_path / name), str(text), *options]) == 0
        assert "of 400 tokens" in capsys.readouterr().out
        assert main(["data", "build", str(tmp_path / f"{name}-tokens"), str(text), "--tokenizer", str(tmp_path / name),
                     "--documents", "line", "--validation", "0", "--workers", "1"]) == 0  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    found = find_tokenizer(str(tmp_path / "a"))
    seen, unseen = words(400), ["Zoë\n\t 12 ﷽ \U0001f680", "never seen: xyz", " "]
    assert [found.decode(ids.tolist()) for ids in found.encode([*seen, *unseen])] == [*seen, *unseen]
    shorter = sum(len(ids) for ids in found.encode(seen)) / sum(len(one.encode()) for one in seen)
    assert shorter < 0.75
    vocabulary = read(tmp_path / "a-tokens").recipe.vocabulary
    assert vocabulary.size == 400 and vocabulary.end_of_document == 0  # <|endoftext|>


def test_a_tokenizer_of_conversations_renders_them(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    chats, out = str(builtin_chats.conversations(tmp_path / "sums.jsonl", "sums")), str(tmp_path / "tokenizer")
    assert main(["data", "tokenizer", out, chats, "--chat", "--vocabulary", "300"]) == 0
    words = ["--tokenizer", out, "--chat", "--workers", "1"]
    assert main(["data", "build", str(tmp_path / "tokens"), chats, *words]) == 0
    assert main(["data", "show", str(tmp_path / "tokens"), "--n", "1"]) == 0
    assert "<|im_end|>◀" in capsys.readouterr().out
    merges = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())["model"]["merges"]
    assert ["p", "lus"] in merges or any("".join(pair).endswith("plus") for pair in merges)


@pytest.mark.parametrize(
    ("more", "code"),
    [(["--vocabulary", "100"], "IG924"), (["--chat"], "IG910"), (["--vocabulary", "0"], "IG600")],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, capsys, more: list[str], code: str) -> None:
    text = str(lines_file(tmp_path / "text.txt"))
    assert main(["data", "tokenizer", str(tmp_path / "out"), text, *more]) == 2
    assert capsys.readouterr().err.startswith(code) and not (tmp_path / "out").exists()
    assert main(["data", "tokenizer", str(tmp_path), text]) == 2
    assert capsys.readouterr().err.startswith("IG916")


def test_lines_that_are_no_conversation_are_counted_and_alone_make_no_tokenizer(tmp_path: Path, capsys) -> None:
    chats, junk = builtin_chats.conversations(tmp_path / "sums.jsonl", "sums"), tmp_path / "junk.jsonl"
    junk.write_text('this is not json\n{"conversations": 5}\n{"foo": "bar"}\n')
    told = "left out: 3 lines: 2 no messages, 1 no JSON"
    words = ["--chat", "--vocabulary", "300"]
    assert main(["data", "tokenizer", str(tmp_path / "out"), str(junk), *words]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("IG923") and told in said and "hold conversations" in said and not (tmp_path / "out").exists()
    )
    assert main(["data", "tokenizer", str(tmp_path / "out"), str(junk), str(chats), *words]) == 0
    assert told in capsys.readouterr().out
    assert main(["data", "tokenizer", str(tmp_path / "good"), str(chats), *words]) == 0
    assert "left out" not in capsys.readouterr().out
    both = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("out", "good")]
    assert both[0] == both[1]
