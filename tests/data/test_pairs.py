"""Pairs by number: an epoch has each once, no held-out pair is trained on, and bad lines are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isograd.data.pairs import Pairs
from isograd.errors import DataError


def write(folder: Path, count: int = 40) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps({"a": f"question {i}", "b": f"answer {i}"}) + "\n" for i in range(count)))
    return file


def test_an_epoch_has_every_pair_once_and_each_epoch_its_order(tmp_path: Path) -> None:
    pairs = Pairs(write(tmp_path), keys=("a", "b"), batch=5, held_out=0.25)
    size = len(pairs)
    assert size + pairs.held_out == 40
    assert pairs.held_out
    stream = [pair for step in range(2 * size) for pair in pairs.rows(step, range(5))]
    first, second = stream[:size], stream[size : 2 * size]
    assert len(set(first)) == size
    assert set(first) == set(second)
    assert first != second
    assert not set(first) & set(pairs.held_out_pairs(range(pairs.held_out)))
    assert all(a.removeprefix("question") == b.removeprefix("answer") for a, b in stream)


def test_ranks_share_a_step_as_they_like_and_added_lines_hold_out_the_same(tmp_path: Path) -> None:
    file = write(tmp_path)
    pairs = Pairs(file, keys=("a", "b"), batch=8, seed=3)
    assert pairs.rows(7, range(3)) + pairs.rows(7, range(3, 8)) == pairs.rows(7, range(8))
    held = set(pairs.held_out_pairs(range(pairs.held_out)))
    other = Pairs(file, keys=("a", "b"), batch=8, seed=4)
    assert other.fingerprint != pairs.fingerprint
    assert other.rows(0, range(8)) != pairs.rows(0, range(8))
    more = Pairs(write(tmp_path, 60), keys=("a", "b"), batch=8, seed=3)
    assert held <= set(more.held_out_pairs(range(more.held_out)))
    assert more.fingerprint != pairs.fingerprint


@pytest.mark.parametrize(
    ("line", "code"), [("{", "IG927"), ('{"a": "x"}', "IG927"), ('{"a": "x", "b": 3}', "IG927"), ("[1]", "IG927"),
                       ('{"a": "x", "b": " "}', "IG927")],
)  # fmt: skip
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, line: str, code: str) -> None:
    file = write(tmp_path, 2)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(DataError, match=f"{code}.*line 3") as caught:
        Pairs(file, keys=("a", "b"), batch=2)
    assert caught.value.code == code


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="IG926"):
        Pairs(tmp_path / "none.jsonl", keys=("a", "b"), batch=2)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="IG926"):
        Pairs(tmp_path / "empty.jsonl", keys=("a", "b"), batch=2)
    with pytest.raises(DataError, match="IG925"):
        Pairs(write(tmp_path), keys=("a",), batch=2)
