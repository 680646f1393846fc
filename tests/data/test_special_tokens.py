"""Text that spells a special token: refused by name, or kept as its id, or encoded as text. FAILURES B15."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from isograd.cli.main import main
from isograd.data import build
from isograd.data.manifest import read
from isograd.errors import DataError
from tests.data.test_tokenizer import train
from tests.data.toys import content, lines_file, whole

START, STOP = "<|im_start|>", "<|im_end|>"
CHATS = [
    [("user", "a fish, é?"), ("assistant", "yes 🐟")],
    [("system", "be brief"), ("user", "why"), ("assistant", "because")],
]


def render(chat: list[tuple[str, str]]) -> str:
    """As the template of such a model does."""
    return "".join(f"{START}{who}\n{said}{STOP}\n" for who, said in chat)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return train(tmp_path / "mine", START, STOP, "</s>")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Two plain texts, then two chats, as JSON lines."""
    file = tmp_path / "chats.jsonl"
    texts = ["plain text " * 4, "", "more of it " * 4, *map(render, CHATS)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def built(out: Path, source: Path, tokenizer: Path, **options: Any) -> Path:
    build(out, [source], tokenizer=str(tokenizer), validation=0, **options)
    return out


@pytest.mark.parametrize("workers", [1, 2])
def test_by_default_the_file_the_line_and_the_token_are_named(
    tmp_path: Path, mine: Path, chats: Path, workers: int
) -> None:
    with pytest.raises(DataError) as caught:
        built(tmp_path / "out", chats, mine, shard_bytes=60, workers=workers)
    assert caught.value.code == "IG929"
    # Two workers may meet either chat first.
    assert f"{chats}:4: the text spells the special token '{START}'" in str(caught.value) or (
        workers == 2 and f"{chats}:5: " in str(caught.value)
    )
    assert "--special-tokens keep" in str(caught.value) and "--special-tokens text" in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_kept_tokens_have_the_ids_that_the_tokenizer_itself_gives_and_text_has_none(
    tmp_path: Path, mine: Path, chats: Path
) -> None:
    theirs = Tokenizer.from_file(str(mine / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    texts = [json.loads(line)["text"] for line in chats.read_text().splitlines()]
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts if text]
    start, stop, end = map(theirs.token_to_id, (START, STOP, "</s>"))
    kept, _ = whole(built(tmp_path / "kept", chats, mine, special_tokens="keep"))
    assert kept == [token for ids in expected for token in (*ids, end)]
    assert (kept.count(start), kept.count(stop)) == (5, 5)
    text, _ = whole(built(tmp_path / "text", chats, mine, special_tokens="text"))
    assert not {start, stop} & set(text)
    assert theirs.decode(text, skip_special_tokens=False) == "</s>".join([t for t in texts if t] + [""])


@pytest.mark.parametrize("decision", ["keep", "text"])
def test_a_refused_build_is_resumed_with_a_decision_and_has_the_bytes_of_a_new_one(
    tmp_path: Path, mine: Path, chats: Path, decision: str
) -> None:
    cut: dict[str, Any] = {"shard_bytes": 60}  # the plain texts are shards of their own, finished before the refusal
    with pytest.raises(DataError, match="IG929"):
        built(tmp_path / "out", chats, mine, **cut)
    assert list((tmp_path / "out").glob("building-0*.json"))
    built(tmp_path / "out", chats, mine, special_tokens=decision, **cut)
    built(tmp_path / "new", chats, mine, special_tokens=decision, **cut)
    assert content(tmp_path / "out") == content(tmp_path / "new")
    for other in {"refuse", "keep", "text"} - {decision}:
        with pytest.raises(DataError, match=f"IG916.*\n.*special_tokens '{decision}'"):
            built(tmp_path / "out", chats, mine, special_tokens=other, **cut)


def test_text_that_spells_none_has_the_same_tokens_whatever_is_chosen(tmp_path: Path, mine: Path) -> None:
    source = lines_file(tmp_path / "source.txt")
    found = [
        whole(built(tmp_path / choice, source, mine, documents="line", special_tokens=choice))
        for choice in ("refuse", "keep", "text")
    ]
    assert found[0] == found[1] == found[2]


def test_a_tokenizer_without_special_tokens_reads_any_text(tmp_path: Path, chats: Path) -> None:
    for choice in ("refuse", "keep", "text"):
        build(tmp_path / choice, [chats], validation=0, special_tokens=choice)  # type: ignore[arg-type]
        assert read(tmp_path / choice).recipe.special_tokens == "text"
    assert content(tmp_path / "refuse") == content(tmp_path / "keep") == content(tmp_path / "text")


def test_a_manifest_without_the_field_was_built_with_special_tokens_as_text(tmp_path: Path, mine: Path) -> None:
    out = built(tmp_path / "out", lines_file(tmp_path / "s.txt"), mine, special_tokens="keep")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["recipe"].pop("special_tokens") == "keep"
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert read(out).recipe.special_tokens == "text"


def test_the_command_refuses_with_exit_2_and_takes_the_option(
    tmp_path: Path, mine: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "build", str(tmp_path / "out"), str(chats), "--tokenizer", str(mine), "--workers", "1"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("IG929: ")
    assert main([*words, "--special-tokens", "keep"]) == 0
    assert "tokens to train on" in capsys.readouterr().out
    assert main([*words, "--special-tokens", "drop"]) == 2
