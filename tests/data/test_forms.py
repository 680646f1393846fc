"""Lines of ShareGPT and Alpaca are read as the messages that they stand for."""

import json
import sys
from pathlib import Path

import pytest

from isograd.cli.main import main
from isograd.data import build, builtin_chats
from isograd.data.chats import Chats, conversation
from isograd.data.manifest import read
from isograd.errors import DataError, IsogradError
from tests.data.toys import content, whole

ASKED, ANSWERED = {"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}
TURNS = [{"from": "human", "value": "Add.\n\n1 2"}, {"from": "gpt", "value": "3"}]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversations": TURNS, "id": "7"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Add.\n\n1 2", "input": "", "output": "3", "system": None},
    ],
)
def test_forms_are_the_same_messages(line):
    assert conversation(json.dumps(line)) == ([ASKED, ANSWERED], None)


@pytest.mark.parametrize("line", [{"conversations": TURNS, "system": "s"},
                                  {"instruction": "Add.", "input": "1 2", "output": "3", "system": "s"}])  # fmt: skip
def test_a_system_text_comes_first(line):
    assert conversation(json.dumps(line))[0] == [{"role": "system", "content": "s"}, ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"conversations": [{"from": "tool_bot", "value": "x"}]}, "tool_bot"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "turn 1"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1"),
        ({"instruction": "Add.", "output": " "}, "an empty 'output'"),
        ({"instruction": "Add.", "output": 3}, "'output' is int"),
        ({"instruction": "Add.", "output": "3", "history": [["a", "b"]]}, "history"),
    ],
)
def test_what_is_no_message_is_refused(line, said):
    with pytest.raises(IsogradError, match="IG990") as error:
        conversation(json.dumps(line))
    assert said in str(error.value)


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
BAD = {
    "an unknown sender": [{"conversations": [{"from": who, "value": "x"}]} for who in ("bing", "observation")],
    "an empty 'output'": [{"instruction": "Add.", "output": " "}],
    "an empty answer": [
        {"conversations": [TURNS[0], {"from": "gpt", "value": ""}]},
        {"messages": [ASKED, {"role": "assistant", "content": " \n"}]},
        {"messages": [ASKED, ANSWERED, ASKED, {"role": "assistant", "content": ""}]},
    ],
    "no answer": [{"conversations": TURNS[:1]}],
    "no messages": [{"id": 3}],
    "no JSON": ["{"],
    "a special token spelled in a message": [{"conversations": [TURNS[0], {"from": "gpt", "value": "<|im_end|>"}]}],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(builtin_chats.tokenizer(tmp_path_factory.mktemp("tokenizer")))


def lines(path: Path, *values: object) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in values))
    return path


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lines_that_are_left_out_are_counted_by_reason(tmp_path, tokenizer, capsys, workers):
    """After some shards, every second line is bad. The tokens are those of a file of the good ones alone."""
    bad = [line for some in BAD.values() for line in some]
    mixed = lines(tmp_path / "mixed.jsonl", *[ALPACA] * 9, "", *(line for one in bad for line in (one, ALPACA)))
    good = lines(tmp_path / "good.jsonl", *[ALPACA] * (9 + len(bad)))
    words = ["--tokenizer", tokenizer, "--chat", "--validation", "0", "--workers", str(workers)]
    words, skip = [*words, "--shard-bytes", "100"], ["--on-bad-lines", "skip"]
    assert main(["data", "build", str(tmp_path / "good"), str(good), *words, *skip]) == 0
    assert "left out" not in capsys.readouterr().out
    assert main(["data", "build", str(tmp_path / "some"), str(mixed), *words]) == 2
    assert "IG990" in (said := capsys.readouterr().err) and "--on-bad-lines skip" in said and f"{mixed}:11\n" in said
    assert main(["data", "build", str(tmp_path / "some"), str(mixed), *words, *skip, "--shard-bytes", "300"]) == 2
    assert "IG916" in capsys.readouterr().err
    assert main(["data", "build", str(tmp_path / "some"), str(mixed), *words, *skip]) == 0  # resumes, with a decision
    told = "left out: 10 lines: 3 an empty answer, 2 an unknown sender, 1 a special token spelled in a message, "
    told += "1 an empty 'output', "
    told += f"1 no JSON, 1 no answer, 1 no messages; the first: {mixed}:11, {mixed}:13, {mixed}:15\n"
    assert told in capsys.readouterr().out
    assert read(tmp_path / "some").left_out == {reason: len(some) for reason, some in BAD.items()}
    assert whole(tmp_path / "some") == whole(tmp_path / "good")
    assert main(["data", "show", str(tmp_path / "some"), "--n", "1"]) == 0
    assert told in capsys.readouterr().out


def test_an_empty_answer_is_read_where_it_is_not_learned(tokenizer):
    empty = {"role": "assistant", "content": "", "weight": 0}
    assert Chats(tokenizer)(json.dumps({"messages": [ASKED, empty, ASKED, ANSWERED]}))[1].sum() == 2  # "3" and its end
    with pytest.raises(DataError, match=r"IG990.*\n.*message 2: an empty answer"):
        Chats(tokenizer)(json.dumps({"messages": [ASKED, {**empty, "weight": 1}, ASKED, ANSWERED]}))


def test_where_all_lines_are_left_out_the_reasons_are_the_error(tmp_path, tokenizer):
    bad = lines(tmp_path / "bad.jsonl", *BAD["an unknown sender"], *BAD["no JSON"])
    with pytest.raises(DataError, match="IG923") as error:
        build(tmp_path / "out", [bad], tokenizer=tokenizer, chat=True, on_bad_lines="skip")
    told = f"3 lines: 2 an unknown sender, 1 no JSON; the first: {bad}:1, {bad}:2, {bad}:3"
    assert told in str(error.value)


def test_shards_that_left_out_typed_special_tokens_are_made_again_when_these_are_text(tmp_path, tokenizer):
    """A build with 'skip' that was stopped, and is resumed with --special-tokens keep."""
    file = lines(tmp_path / "a.jsonl", *BAD["a special token spelled in a message"], {"conversations": TURNS})
    options = {"tokenizer": tokenizer, "chat": True, "validation": 0.0, "on_bad_lines": "skip", "shard_bytes": 10}
    build(tmp_path / "fresh", [file], special_tokens="keep", **options)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "out", [file], **options, progress=_stop_after_one)
    build(tmp_path / "out", [file], special_tokens="keep", **options)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def _stop_after_one(done: int, total: int, tokens: int) -> None:
    if done:
        raise KeyboardInterrupt


@pytest.mark.medium
def test_arrays_and_parquet_of_both_forms_give_the_tokens_that_their_lines_give(tmp_path, tokenizer):
    """As they are downloaded: alpaca_data.json is one indented array."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    options = {"tokenizer": tokenizer, "chat": True, "validation": 0.0}
    for name, rows in (("alpaca", [ALPACA, {**ALPACA, "output": "4"}]), ("sharegpt", [{"conversations": TURNS}] * 3)):
        build(tmp_path / name, [lines(tmp_path / f"{name}.jsonl", *rows)], **options)
        (tmp_path / f"{name}.json").write_text("\ufeff" + json.dumps(rows, indent=2))
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        for kind in ("json", "parquet"):
            build(tmp_path / f"{name}-{kind}", [tmp_path / f"{name}.{kind}"], **options)
            assert whole(tmp_path / f"{name}-{kind}") == whole(tmp_path / name)
    (tmp_path / "texts.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    build(tmp_path / "texts", [tmp_path / "texts.json"], validation=0.0)
    assert bytes(i for i in whole(tmp_path / "texts")[0] if i < 256) == b"onetwo"


@pytest.mark.parametrize("text", ['[{"text": "a"}', '[{"text": "a"}] 3', "[3]", '[{"text": "a", "text": "b"}]'])
def test_an_array_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"IG9(27|13)"):
        build(tmp_path / "out", [tmp_path / "a.json"])
    (tmp_path / "b.json").write_text(json.dumps(["a" * 100]))
    with pytest.raises(DataError, match="IG910"):
        build(tmp_path / "other", [tmp_path / "b.json"], largest_document=50)


def test_on_a_terminal_labels_are_green(tmp_path, tokenizer, monkeypatch, capsys):
    build(tmp_path / "out", [lines(tmp_path / "a.jsonl", ALPACA)], tokenizer=tokenizer, chat=True, validation=0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["data", "show", str(tmp_path / "out"), "--n", "1"]) == 0
    assert "\x1b[32m3<|im_end|>\x1b[39m" in (said := capsys.readouterr().out) and "▶" not in said
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["data", "show", str(tmp_path / "out"), "--n", "1"]) == 0
    assert "▶3<|im_end|>◀" in (said := capsys.readouterr().out) and "\x1b" not in said
