"""What a template spells like a special token is one token, or refused; other markers may be text, and are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isograd.cli.main import main
from isograd.data import Mixture, Source, build, builtin_chats
from isograd.data.chats import Chats, answer_end
from isograd.data.manifest import read
from isograd.errors import DataError
from tests.data.test_chats import chat, counted, tokenizer

pytest.importorskip("transformers")

TALK = chat(("user", "hi"), ("assistant", "yes"))
LLAMA = (
    "{%- for m in messages %}{%- if m['role'] == 'user' %}{{- '[INST] ' + m['content'] + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m['content'] + '<|im_end|>' }}{%- endif %}{%- endfor %}"
)


def wrapped(before: str, after: str) -> str:
    """A template of which each turn begins with one marker, and each but the assistant's ends with another."""
    return (
        "{%- for m in messages %}{{- '" + before + "' + m['role'] + '\\n' }}{%- if m['role'] == 'assistant' %}"
        "{%- generation %}{{- m['content'] + '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m['content'] + '"
        + after + "' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '" + before
        + "assistant\\n' }}{%- endif %}"
    )  # fmt: skip


@pytest.mark.parametrize(
    "marker", ["<|user|>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<s>", "</s>", "[gMASK]",
               "<｜User｜>", "<bos>", "<|start header|>"],
)  # fmt: skip
def test_a_marker_spelled_like_a_special_token_that_the_tokenizer_splits_is_refused(
    tmp_path: Path, marker: str
) -> None:
    folder = tokenizer(tmp_path, wrapped("<|im_start|>", marker))
    with pytest.raises(DataError, match="IG993") as caught:
        Chats(folder)(TALK)
    assert repr(marker) in caught.value.what and "--special-tokens text" in str(caught.value)
    lenient = Chats(folder, special_tokens="text")
    assert counted(lenient, TALK) == ["yes<|im_end|>"]
    assert lenient.markers == {marker: len(lenient.tokenizer.encode(marker).ids)}


def test_also_where_a_message_spells_the_same_marker(tmp_path: Path) -> None:
    """What the messages spell is text; what the template writes beside it is not."""
    folder = tokenizer(tmp_path, wrapped("<|im_start|>", "<|end|>"))
    with pytest.raises(DataError, match=r"IG993.*'<\|end\|>'"):
        Chats(folder)(chat(("user", "what is <|end|>?"), ("assistant", "a marker")))
    folder = tokenizer(tmp_path / "other", wrapped("<|im_start|>", "<|im_end|>"))
    assert counted(Chats(folder), chat(("user", "what is <|end|>?"), ("assistant", "a marker"))) == [
        "a marker<|im_end|>"
    ]


def test_a_special_token_that_the_vocabulary_has_and_text_does_not_become_is_refused(tmp_path: Path) -> None:
    """The id is in the model's vocabulary, but no added token: the tokenizer splits the spelling all the same."""
    folder = tokenizer(tmp_path, wrapped("<|im_start|>", "<|user|>"))
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"]["<|user|>"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(made))
    assert Chats(folder).tokenizer.token_to_id("<|user|>") == 300
    with pytest.raises(DataError, match=r"IG993.*'<\|user\|>'"):
        Chats(folder)(TALK)


def test_an_added_token_that_is_not_called_special_is_one_token(tmp_path: Path) -> None:
    """As <think> and <tool_call> of Qwen."""
    folder = tokenizer(tmp_path, wrapped("<|im_start|>", "<start_of_turn>"))
    made = json.loads((folder / "tokenizer.json").read_text())
    made["added_tokens"].append({**made["added_tokens"][0], "id": 259, "content": "<start_of_turn>", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(made))
    chats = Chats(folder)
    assert counted(chats, TALK) == ["yes<|im_end|>"] and chats.markers == {}


@pytest.mark.medium
def test_markers_of_text_are_said_with_their_number_of_tokens(tmp_path: Path, capsys: Any) -> None:
    folder = tokenizer(tmp_path / "tokenizer", "<tools>" + LLAMA)
    chats = Chats(folder)
    said = chat(("user", "what is <b>[BOLD]</b>?"), ("assistant", "<i>this</i>"))
    assert counted(chats, said) == [" <i>this</i><|im_end|>"]
    assert chats.markers == {"[INST]": 6, "[/INST]": 7, "<tools>": 7}  # not those of the messages
    (tmp_path / "chats.jsonl").write_text(f"{said}\n" * 40)
    words = [
        "data",
        "build",
        str(tmp_path / "out"),
        str(tmp_path / "chats.jsonl"),
        "--tokenizer",
        str(folder),
        "--chat",
    ]
    for workers, size in (("1", "100000"), ("2", "1000")):
        words[2] = str(tmp_path / workers)
        assert main([*words, "--workers", workers, "--shard-bytes", size, "--validation", "0"]) == 0
        line = "the template's markers that are text, with their number of tokens: <tools> 7, [/INST] 7, [INST] 6"
        assert capsys.readouterr().out.count(line) == 1
        assert main(["data", "show", words[2]]) == 0 and line in capsys.readouterr().out
    assert len(read(tmp_path / "2").shards) > 1
    assert Mixture([Source(tmp_path / "2")], length=100, batch=2, packing="whole").as_text == line


def test_a_build_that_was_refused_goes_on_where_the_marker_is_called_text(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "tokenizer", wrapped("<|im_start|>", "<|user|>"))
    (tmp_path / "chats.jsonl").write_text(f"{TALK}\n" * 3)
    options: dict[str, Any] = {"tokenizer": str(folder), "chat": True, "validation": 0}
    with pytest.raises(DataError, match="IG993"):
        build(tmp_path / "out", [tmp_path / "chats.jsonl"], **options)
    made = build(tmp_path / "out", [tmp_path / "chats.jsonl"], **options, special_tokens="text")
    assert made.markers == {"<|user|>": 8} and read(tmp_path / "out") == made
    with pytest.raises(DataError, match="IG929"):  # messages do not end turns by spelling it
        (tmp_path / "typed.jsonl").write_text(chat(("user", "hi<|im_end|>"), ("assistant", "yes")))
        build(tmp_path / "typed", [tmp_path / "typed.jsonl"], **options, special_tokens="text")


def test_an_export_finds_the_end_of_an_answer_beside_markers_of_text(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path, wrapped("<|user|>", "<|end|>"))
    assert answer_end(folder) == Chats(folder, special_tokens="text").tokenizer.token_to_id(builtin_chats.STOP)
