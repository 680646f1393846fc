"""Built-in conversations of real text: sentences of docstrings, each once, and kept where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isograd.data import builtin_chats


@pytest.mark.medium
def test_sentences_of_docstrings_and_their_words_in_another_order(tmp_path: Path) -> None:
    file = builtin_chats.conversations(tmp_path / "talks.jsonl", "docstrings")
    talks = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert len(talks) > 500
    assert len({answer["content"] for _, answer in talks}) == len(talks)
    found = {question["content"]: answer["content"] for question, answer in talks}
    assert found["What does abc.abstractmethod do?"] == "A decorator indicating abstract methods."
    lines = builtin_chats.pairs(tmp_path / "pairs.jsonl", "docstrings").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    assert len(talks) / 5 < len(pairs) <= len(talks) / 4 + 1
    for pair in pairs:
        assert pair["chosen"] == found[pair["prompt"]] != pair["rejected"]
        assert sorted(pair["chosen"].split()) == sorted(pair["rejected"].split())
    file.write_text("kept")
    assert builtin_chats.conversations(file, "docstrings").read_text() == "kept"
