"""Text to numbers and back, by bytes and by a tokenizer.json; no text can forge the end of a document."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from isograd.data import Mixture, Source, build, read_tokenizer, verify
from isograd.data.manifest import read
from isograd.data.tokenizer import find_tokenizer
from isograd.errors import DataError
from tests.data.toys import content, lines_file, whole, words

TEXTS = ["hello world", "é語🐟 <|endoftext|> x", "a\x00b"]


def train(folder: Path, *special: str) -> Path:
    """A byte-level tokenizer that adds, cuts and pads, as real ones may."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", *special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(words(50), trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(4)
    made.enable_padding(length=16)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_are_their_own_numbers_and_256_ends_a_document() -> None:
    tools = find_tokenizer("bytes")
    assert [ids.tolist() for ids in tools.encode(TEXTS)] == [list(text.encode()) for text in TEXTS]
    assert [tools.decode([*text.encode(), 256]) for text in TEXTS] == TEXTS
    assert (tools.vocabulary.size, tools.vocabulary.end_of_document) == (257, 256)
    assert tools.decode([0xE8, 0xAA]) == "�"  # half of a character, as at the edge of a window


def test_a_tokenizer_json_adds_cuts_and_pads_nothing_and_special_tokens_in_text_are_text(tmp_path: Path) -> None:
    tools = find_tokenizer(str(train(tmp_path / "mine", "<|endoftext|>")))
    end = tools.vocabulary.end_of_document
    assert end == 1
    assert tools.vocabulary.name == "mine"
    for text, ids in zip(TEXTS, tools.encode(TEXTS), strict=True):
        assert len(ids) > 1
        assert not {0, end} & set(ids.tolist())
        assert tools.decode(ids.tolist()) == text


def test_a_build_keeps_its_tokenizer_and_workers_with_it_make_the_same_bytes(tmp_path: Path) -> None:
    source, mine = lines_file(tmp_path / "source.txt"), train(tmp_path / "mine", "</s>")
    for workers in (1, 2):
        build(
            tmp_path / f"by{workers}", [source], tokenizer=str(mine), documents="line", validation=0, shard_bytes=900,
            workers=workers,
        )  # fmt: skip
    assert content(tmp_path / "by1") == content(tmp_path / "by2")
    tokens, numbers = whole(tmp_path / "by1")
    decode = read_tokenizer(Mixture([Source(tmp_path / "by1")], length=8, batch=1))
    first = [token for token, number in zip(tokens, numbers, strict=True) if not number]
    assert decode(first) == words(60)[0] + "</s>"
    assert verify(tmp_path / "by1").recipe.vocabulary.sha256 is not None


def test_a_tokenizer_that_was_changed_after_the_build_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    build(folder, [lines_file(tmp_path / "s.txt")], tokenizer=str(train(tmp_path / "mine", "</s>")), documents="line")
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(DataError) as caught:
        verify(folder)
    assert caught.value.code == "IG903"


def test_sources_of_different_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    source = lines_file(tmp_path / "s.txt")
    for name, tokenizer in {"one": "bytes", "two": str(train(tmp_path / "mine", "</s>"))}.items():
        build(tmp_path / name, [source], tokenizer=tokenizer, documents="line")
    with pytest.raises(DataError) as caught:
        Mixture([Source(tmp_path / "one"), Source(tmp_path / "two")], length=8, batch=1)
    assert caught.value.code == "IG908"
    assert "bytes, 257" in str(caught.value)


def test_the_end_that_tokenizer_config_names_comes_first(tmp_path: Path) -> None:
    mine = train(tmp_path / "mine", "</s>", "<stop>")
    assert find_tokenizer(str(mine)).vocabulary.end_of_document == 1
    for named in ("<stop>", {"content": "<stop>", "lstrip": False}):
        (mine / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert find_tokenizer(str(mine)).vocabulary.end_of_document == 2
        assert find_tokenizer(str(mine / "tokenizer.json")).vocabulary.name == "mine"


@pytest.mark.parametrize("end", ["257", "-1", "x", "9" * 30])
def test_an_end_of_document_outside_the_vocabulary_is_refused(end: str) -> None:
    with pytest.raises(DataError) as caught:
        find_tokenizer("bytes", end)
    assert caught.value.code == "IG915"


def test_a_tokenizer_without_an_end_asks_for_one(tmp_path: Path) -> None:
    mine = str(train(tmp_path / "mine"))
    with pytest.raises(DataError) as caught:
        find_tokenizer(mine)
    assert caught.value.code == "IG915"
    assert find_tokenizer(mine, "none").vocabulary.end_of_document is None
    assert find_tokenizer(mine, "7").vocabulary.end_of_document == 7


def test_a_tokenizer_that_is_not_there_or_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "binary.json").write_bytes(b"\xff\xff")
    for name in ("absent.json", "broken.json", "binary.json", "."):
        with pytest.raises(DataError) as caught:
            find_tokenizer(str(tmp_path / name))
        assert caught.value.code == "IG914", name
    mine = str(train(tmp_path / "mine", "</s>"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the tokenizers package"):
        find_tokenizer(mine)


def test_the_manifest_says_which_tokenizer_it_was(tmp_path: Path) -> None:
    build(tmp_path / "out", [lines_file(tmp_path / "s.txt")], documents="line")
    assert read(tmp_path / "out").recipe.vocabulary.name == "bytes"
