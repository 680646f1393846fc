"""Conversations as tokens: only what the assistant writes counts, special tokens stay whole, and what is not certain is
refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isograd.cli.main import main
from isograd.data import Mixture, Source, build, builtin_chats
from isograd.data.chats import Chats
from isograd.data.manifest import read
from isograd.data.packs import pack
from isograd.data.tokens import Tokens
from isograd.errors import DataError
from isograd.hf.export import _with_stops
from tests.data.toys import content

pytest.importorskip("transformers")

TOOLS = "{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}\n"
MARKED = TOOLS + builtin_chats.TEMPLATE
PLAIN = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a fish, é?"},
        {"role": "assistant", "content": "yes 🐟\n"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "because"},
    ],
    "tools": [TOOL],
}
ANSWERS = ["yes 🐟\n<|im_end|>", "because<|im_end|>"]


def tokenizer(folder: Path, template: str = MARKED, special: bool = True) -> Path:
    builtin_chats.tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    if not special:  # as of a base model that never saw the template
        made = json.loads((folder / "tokenizer.json").read_text())
        made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] == builtin_chats.END]
        (folder / "tokenizer.json").write_text(json.dumps(made))
        config["eos_token"] = builtin_chats.END
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat(*turns: tuple[str, str]) -> str:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})


def counted(chats: Chats, text: str) -> list[str]:
    """The runs of tokens that count, as text."""
    ids, marks = chats(text)
    runs, run = [], list[int]()
    for token, mark in [*zip(ids.tolist(), marks.tolist(), strict=True), (0, 0)]:
        if mark:
            run.append(token)
        elif run:
            runs.append(chats.tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return runs


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_the_answers_count_with_their_ends_and_nothing_else_does(tmp_path: Path, template: str) -> None:
    chats = Chats(tokenizer(tmp_path, template))
    assert counted(chats, json.dumps(CHAT)) == ANSWERS
    ids, _ = chats(json.dumps(CHAT))
    text = chats.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text.startswith('<|im_start|>tools\n[{"type": "function"') and text.count("<|im_start|>") == 6
    assert (ids == chats.tokenizer.token_to_id(builtin_chats.START)).sum() == 6  # each of them one token
    assert (ids == chats.tokenizer.token_to_id(builtin_chats.STOP)).sum() == 6


def test_tokens_and_marks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(tokenizer(tmp_path)), local_files_only=True)
    found: Any = theirs.apply_chat_template(
        CHAT["messages"], tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, marks = Chats(tmp_path)(json.dumps(CHAT))
    assert (ids.tolist(), marks.tolist()) == (found["input_ids"], found["assistant_masks"])


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_a_tokenizer_that_splits_what_the_template_writes_is_refused(tmp_path: Path, template: str) -> None:
    chats = Chats(tokenizer(tmp_path, template, special=False))
    with pytest.raises(DataError, match=r"IG993: the template writes '<\|im_(start|end)\|>'") as caught:
        chats(json.dumps(CHAT))
    assert "tokens: ['<', '|', 'i', 'm'" in str(caught.value)


REWRITES = PLAIN.replace(
    "message['role'] == 'assistant' %}", "message['role'] == 'assistant' %}{{- '' if loop.last else 'old ' }}"
)
ASKS_NOTHING = PLAIN.replace("{%- if add_generation_prompt %}", "{%- if false %}")
NO_END = PLAIN.replace("{{- message['content'] + '<|im_end|>' }}", "{{- message['content'] }}")
SPACE = "{%- for m in messages %}{{- m['role'] + ': ' + m['content'] + '<|im_end|>' }}{%- endfor %}"


@pytest.mark.parametrize(
    ("template", "text", "says"),
    [
        (REWRITES, json.dumps(CHAT), "IG992.*\n.*renders message 3 differently when it is the last one"),
        (ASKS_NOTHING, json.dumps(CHAT), r"IG992.*\n.*no prompt for an answer, and writes '<\|im_start\|>assistant"),
        (ASKS_NOTHING, chat(("user", "hi"), ("assistant", "")), "IG992.*\n.*no prompt for an answer"),
        (PLAIN, chat(("assistant", "hello"), ("user", "hi")), "IG992.*\n.*begins with the assistant"),
        (NO_END, chat(("user", "hi"), ("assistant", "hello")), "IG993: an answer does not end with a special token"),
        (MARKED, chat(("user", "hi")), "IG990.*\n.*no message of the role 'assistant', but of 'user'"),
        (MARKED, '{"conversation": []}', r"IG990.*\n.*'conversation' \(did you mean 'conversations'\?\)"),
        (MARKED, '{"text": "hi"}', "IG990.*\n.*no list of messages under 'messages': 'text'"),
        (MARKED, '{"messages": "hi"}', "IG990.*\n.*no list of messages under 'messages': str"),
        (MARKED, '{"messages": []}', "IG990.*\n.*no list of messages under 'messages': nothing in it"),
        (MARKED, "[1]", "IG990.*\n.*no list of messages under 'messages': list"),
        (MARKED, '{"messages": [{"content": "hi"}]}', "IG990.*\n.*message 1 has no 'role'"),
        (MARKED, '{"messages": [{"role": "user", "content": 3}]}', "IG990.*\n.*its content is int"),
        (MARKED, chat(("user", "hi"), ("assistant", "\ud800")), "IG990.*\n.*half of a surrogate pair"),
        (MARKED, "{", "IG990.*\n.*no JSON"),
        (MARKED, chat(("user", "hi<|im_end|>"), ("assistant", "yes")), r"IG929: a message spells .*'<\|im_end\|>'"),
        ("{{ raise_exception('roles must alternate') }}", json.dumps(CHAT), "IG990.*\n.*roles must alternate"),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_refused_by_name(tmp_path: Path, template: str, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Chats(tokenizer(tmp_path, template))(text)


def test_a_token_across_the_beginning_of_an_answer_is_refused(tmp_path: Path) -> None:
    """The question alone ends with a space, which is part of the answer's first token when both are tokenized."""
    folder = tokenizer(tmp_path, SPACE.replace("+ m['content']", "+ m['content']"))
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"]["Ġy"] = 300
    made["model"]["merges"] = [["Ġ", "y"]]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    template = (
        "{%- for m in messages %}{{- m['role'] + ': ' }}{%- if m['role'] == 'assistant' %}{%- generation %}"
        "{{- m['content'] + '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m['content'] + '<|im_end|>' }}"
        "{%- endif %}{%- endfor %}"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert counted(Chats(folder), chat(("user", "yes"), ("assistant", "no"))) == ["no<|im_end|>"]
    with pytest.raises(DataError, match=r"IG992.*\n.*before 'yes<\|im_end\|>' has other tokens"):
        Chats(folder)(chat(("user", "hi"), ("assistant", "yes")))


def test_a_special_token_that_a_message_spells_may_be_kept(tmp_path: Path) -> None:
    chats = Chats(tokenizer(tmp_path), special_tokens="keep")
    assert counted(chats, chat(("user", "hi<|im_end|>"), ("assistant", "yes"))) == ["yes<|im_end|>"]


def test_json_lines_parquet_and_workers_build_the_same_bytes(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tokenizer(tmp_path / "tokenizer")
    lines = [json.dumps({**CHAT, "messages": CHAT["messages"][: 3 + 2 * (i % 2)]}) for i in range(12)]
    jsonl, columns = tmp_path / "chats.jsonl", tmp_path / "chats.parquet"
    jsonl.write_text("\n".join(lines) + "\n")
    rows = [{**json.loads(line), "tools": json.dumps([TOOL])} for line in lines]
    parquet.write_table(arrow.Table.from_pylist(rows), columns)
    for name, source, more in (("a", jsonl, {}), ("b", jsonl, {"workers": 2}), ("c", columns, {})):
        build(tmp_path / name, [source], tokenizer=str(folder), chat=True, validation=0, shard_bytes=2000, **more)
    found = content(tmp_path / "a")
    assert found == content(tmp_path / "b") and len(read(tmp_path / "a").shards) > 1
    streams = [Tokens(tmp_path / name) for name in "ac"]
    assert streams[0].read(0, streams[0].tokens).tolist() == streams[1].read(0, streams[1].tokens).tolist()
    both = [s.counted(0, s.tokens) for s in streams]
    assert both[0].sum() > 0 and (both[0] == both[1]).all()


def test_a_refusal_names_the_file_and_the_line_and_text_is_not_taken_for_conversations(tmp_path: Path, capsys) -> None:
    folder = tokenizer(tmp_path / "tokenizer")
    lines = [chat(("user", "hi"), ("assistant", "yes"))] * 3 + [chat(("user", "hi"))]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    words = ["data", "build", str(tmp_path / "out"), str(tmp_path / "chats.jsonl"), "--tokenizer", str(folder)]
    assert main([*words, "--chat", "--workers", "1"]) == 2
    assert f"{tmp_path}/chats.jsonl:4\n" in capsys.readouterr().err
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*lines[:3], lines[0][:-20]]) + "\n")
    assert main([*words[:2], str(tmp_path / "cut"), str(cut), *words[4:], "--chat", "--workers", "1"]) == 2
    told = capsys.readouterr().err
    assert f"{cut}:4\n" in told and "is it cut off?" in told and "line 2" not in told
    assert main([*words, "--workers", "1"]) == 2
    assert "isograd data build --chat" in capsys.readouterr().err


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sums")
    source, folder = (
        builtin_chats.conversations(home / "sums.jsonl", "sums"),
        builtin_chats.tokenizer(home / "tokenizer"),
    )
    build(home / "tokens", [source], tokenizer=str(folder), chat=True, validation=0.1)
    return home / "tokens"


def test_windows_hold_whole_conversations_each_once_an_epoch_and_labels_are_answers(built: Path) -> None:
    mixture = Mixture([Source(built)], length=150, batch=4, packing="whole")
    stream = Tokens(built)
    ends = stream.ends(0, stream.tokens).tolist()
    every = sorted(tuple(stream.read(a, b).tolist()) for a, b in zip([0, *ends], ends, strict=False) if b - a <= 150)
    seen, labels = [], 0
    windows = -(-len(mixture._packs[0]) // 4) * 4
    for step in range(windows // 4):
        rows = mixture.rows(step, range(4))
        for row in range(4):
            if step * 4 + row >= len(mixture._packs[0]):
                continue
            numbers, tokens = rows["documents"][row], rows["tokens"][row]
            parts = [tokens[numbers == n].tolist() for n in range(int(numbers.max()) + 1)]
            text = [part for part in parts if any(part)]  # what fills a window up is 0
            seen += [tuple(part) for part in text]
            labels += int((rows["labels"][row] != -100).sum())
            for place in (rows["labels"][row] != -100).nonzero().flatten().tolist():
                assert numbers[place] == numbers[place + 1] and rows["labels"][row, place] == tokens[place + 1]
    assert sorted(seen) == every
    assert labels == int(stream.counted(0, stream.tokens).sum())


def test_a_conversation_longer_than_a_window_is_left_out_and_counted(built: Path) -> None:
    mixture = Mixture([Source(built)], length=90, batch=4, packing="whole")
    assert "documents are longer than a sequence of 90 tokens and are left out" in mixture.left_out
    assert mixture.left_out in mixture.describe()
    with pytest.raises(DataError, match=r"IG905.*fits into a sequence"):
        Mixture([Source(built)], length=20, batch=4, packing="whole")


def test_packing_puts_each_document_into_one_window_that_has_room() -> None:
    import random

    draw = random.Random(0)
    lengths = [draw.randint(1, 40) for _ in range(500)]
    windows = pack(lengths, 32)
    assert sorted(d for window in windows for d in window) == [d for d, size in enumerate(lengths) if size <= 32]
    assert all(sum(lengths[d] for d in window) <= 32 for window in windows)
    used = sum(size for size in lengths if size <= 32)
    assert len(windows) <= used / 32 * 1.05 + 1


def test_the_fingerprint_depends_on_which_tokens_count(tmp_path: Path, built: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in built.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    manifest["shards"][0]["counted_sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    prints = {Mixture([Source(f)], length=150, batch=4, packing="whole").fingerprint for f in (built, other)}
    assert len(prints) == 2


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("second", "seen"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "message 2: the template does not write its tool"),
        ({"role": "assistant", "content": None}, "message 2: it has no content"),
        ({"role": "assistant", "content": "b", "weight": 0}, "weights .0. of the answers"),
        ({"role": "assistant", "content": "b", "weight": 0.5}, "weights .0.5. of the answers"),
    ],
)
@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_an_answer_of_which_nothing_would_be_learned_is_refused(
    tmp_path: Path, template: str, second: dict[str, Any], seen: str
) -> None:
    chats = Chats(tokenizer(tmp_path, template))
    with pytest.raises(DataError, match=f"IG990.*\n.*{seen}"):
        chats(json.dumps({"messages": [{"role": "user", "content": "a"}, second]}))


CALLS = """{%- if message['tool_calls'] %}{{- message['tool_calls'] | tojson }}{%- endif %}"""


def with_calls(content: str) -> str:
    """MARKED with the calls behind the content, which is written by the expression given."""
    before = "{%- generation %}{{- message['content'] + '<|im_end|>' }}"
    assert before in MARKED
    return MARKED.replace(before, f"{{%- generation %}}{content}{CALLS}{{{{- '<|im_end|>' }}}}")


@pytest.mark.parametrize("absent", [False, True], ids=["null", "absent"])
@pytest.mark.parametrize(
    ("content", "takes"),
    [
        ("{{- message['content'] or '' }}", True),
        ("{%- if message.content is string %}{{- message.content }}{% endif %}", True),
        ("{{- message['content'] if message['content'] is defined else '(calls)' }}", True),
        ("{{- message['content'] + '' }}", False), ("{{- message['content'].strip() }}", False),
    ],
)  # fmt: skip
def test_a_null_beside_tool_calls_is_what_the_template_takes(
    tmp_path: Path, content: str, takes: bool, absent: bool
) -> None:
    from transformers import AutoTokenizer

    folder = tokenizer(tmp_path, with_calls(content))
    theirs: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    call = {"role": "assistant", "tool_calls": [CALL]} | ({} if absent else {"content": None})
    messages = [*CHAT["messages"][:2], call, *CHAT["messages"][3:]]
    ids, marks = Chats(folder)(json.dumps({"messages": messages}))
    text = theirs.decode(ids[marks == 1].tolist())
    assert '"name": "add"' in text and "None" not in text and text.endswith("because<|im_end|>")
    if not takes:  # as for its own messages with empty text
        messages[2] = {**call, "content": ""}
    else:
        assert json.dumps(messages).count("null") == (not absent)
    found: Any = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids.tolist(), marks.tolist()) == (found["input_ids"], found["assistant_masks"])


def test_a_null_that_no_template_text_stands_for_is_refused_by_number(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    line = json.dumps({"messages": [CHAT["messages"][1], call]})
    with pytest.raises(
        DataError, match=r"IG990.*\n.*message 2: it has no content, for which the template writes 'None'"
    ):
        Chats(tokenizer(tmp_path / "a", with_calls("{{- message.get('content') }}")))(line)
    refuses = "{%- if not message['content'] %}{{ raise_exception('say something') }}{%- endif %}"
    with pytest.raises(DataError, match=r"IG990.*\n.*message 2: it has no content, and also with .*: say something"):
        Chats(tokenizer(tmp_path / "b", with_calls(refuses)))(line)


@pytest.mark.medium
def test_nulls_in_parquet_and_in_json_lines_are_the_same(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    template = with_calls("{{- message['content'] if message['content'] is defined else '(calls)' }}")
    folder = tokenizer(tmp_path / "tokenizer", template)
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    parquet.write_table(arrow.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    found = []
    for kind in ("jsonl", "parquet"):
        build(tmp_path / kind, [tmp_path / f"a.{kind}"], tokenizer=str(folder), chat=True, validation=0)
        tokens = Tokens(tmp_path / kind)
        found.append(tokens.read(0, tokens.tokens).tolist())
    assert found[0] == found[1] and "(calls)" in Chats(folder).tokenizer.decode(found[0])


LISTS = MARKED.replace("message['content'] +", "message['content'] | trim +")
KNOWN = MARKED.replace("messages %}", "messages if message['role'] in ['system', 'user', 'assistant'] %}", 1)
FIRST = MARKED.replace("messages %}", "messages if message is sameas messages[0] or message['role'] != 'system' %}", 1)
CALLS_ALONE = MARKED.replace(
    "{{- message['content'] + '<|im_end|>' }}{%- endgen",
    "{{- (message['tool_calls'] | tojson if message['tool_calls'] else message['content']) + '<|im_end|>' }}{%- endgen",
)
SILENT = MARKED.replace("{%- for message in messages %}", "{%- for message in messages if message['role'] != 'tool' %}")


@pytest.mark.parametrize(
    ("template", "changes", "seen"),
    [
        (SILENT, {}, "message 4, of the role 'tool': the template does not write it"),
        (SILENT, {3: {"role": "tool", "content": "a"}}, "message 4, of the role 'tool': the template does not"),
        (SILENT, {3: {"role": "tool", "content": [{"type": "text", "text": "a"}]}}, "message 4, of the role 'tool': "),
        (KNOWN, {}, "message 4, of the role 'tool': the template does not write it"),
        (FIRST, {3: {"role": "system", "content": "be brief"}}, "message 4, of the role 'system': the template does"),
        (FIRST, {3: {"role": "system", "content": "b"}}, "message 4, of the role 'system': the template does"),
        (CALLS_ALONE, {4: {"role": "assistant", "content": "because", "tool_calls": [CALL]}},
         "message 5: the template does not write its content"),
        (MARKED, {4: {"role": "assistant", "content": "b", "reasoning_content": "hm"}},
         "message 5: the template does not write its reasoning_content"),
        (LISTS, {1: {"role": "user", "content": [{"type": "text", "text": "a fish"}]}},
         "message 2: the template writes its parts as Python's "),
    ],
)  # fmt: skip
def test_what_the_template_leaves_out_or_spells_as_python_is_refused(
    tmp_path: Path, template: str, changes: dict[int, Any], seen: str
) -> None:
    chats = Chats(tokenizer(tmp_path, template))
    messages = [changes.get(number, message) for number, message in enumerate(CHAT["messages"])]
    with pytest.raises(DataError, match=f"IG990.*\n.*{seen}"):
        chats(json.dumps({**CHAT, "messages": messages}))


def test_reasoning_of_an_answer_that_is_not_learned_may_be_left_out(tmp_path: Path) -> None:
    talk = [*CHAT["messages"], {"role": "user", "content": "so?"}, {"role": "assistant", "content": "so."}]
    talk[4] = {**talk[4], "thinking": "hm", "weight": 0}
    assert counted(Chats(tokenizer(tmp_path)), json.dumps({**CHAT, "messages": talk})) == [ANSWERS[0], "so.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 / (messages | length - 5) }}", "IG990.*\n.*division by zero"),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "IG990.*\n.*recursion"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "IG990.*\n.*[Rr]ange too big"),
        ("{% for message in messages %}{{ message.content", "IG991.*\n.*no Jinja, line 1"),
        ("{{ ''.__class__.__mro__ }}", "IG990.*\n.*unsafe"),
    ],
)
def test_a_template_that_breaks_is_one_error(tmp_path: Path, template: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Chats(tokenizer(tmp_path, template))(json.dumps(CHAT))


def test_tools_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    chats = Chats(tokenizer(tmp_path, builtin_chats.TEMPLATE))
    with pytest.raises(DataError, match=r"IG990.*\n.*does not write the conversation's tools"):
        chats(json.dumps(CHAT))


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path: Path, template: str) -> None:
    messages = [dict(message) for message in CHAT["messages"]]
    messages[2]["weight"] = 0
    chats = Chats(tokenizer(tmp_path, template))
    given = json.dumps({**CHAT, "messages": messages})
    assert counted(chats, given) == ANSWERS[1:]
    assert chats(given)[0].tolist() == chats(json.dumps(CHAT))[0].tolist()


def test_a_key_that_stands_twice_is_refused_and_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "tokenizer")
    line = chat(("user", "a"), ("assistant", "b"))
    twice = line.replace('"content": "b"', '"content": "c", "content": "b"')
    with pytest.raises(DataError, match=r"IG990.*\n.*the key 'content' is given twice"):
        Chats(folder)(twice)
    (tmp_path / "marked.jsonl").write_text(line + "\n", encoding="utf-8-sig")
    made = build(tmp_path / "out", [tmp_path / "marked.jsonl"], tokenizer=str(folder), chat=True)
    assert sum(shard.documents for shard in made.shards) == 1


def test_white_space_behind_the_end_of_a_marked_answer_is_no_riddle(tmp_path: Path) -> None:
    """Some templates put the line's end inside the mark."""
    inside = MARKED.replace("'<|im_end|>' }}{%- endgeneration", "'<|im_end|>\\n' }}{%- endgeneration")
    inside = inside.replace(
        "{{- '\\n' }}\n{%- endfor", "{{- '' if message['role'] == 'assistant' else '\\n' }}\n{%- endfor"
    )
    chats = Chats(tokenizer(tmp_path, inside))
    assert counted(chats, json.dumps(CHAT)) == [f"{answer}\n" for answer in ANSWERS]
    assert chats.tokenizer.id_to_token(chats.end) == "<|im_end|>"


def test_an_export_stops_at_the_end_of_an_answer_and_at_the_end_of_a_text(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": builtin_chats.END}))
    text, answer = (Chats(folder).tokenizer.token_to_id(token) for token in (builtin_chats.END, builtin_chats.STOP))
    assert _with_stops({"eos_token_id": None}, folder) == {"eos_token_id": text}
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [text, answer]}
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 5}')
    assert _with_stops({"eos_token_id": 3}, folder) == {"eos_token_id": 3}
    found = json.loads((folder / "generation_config.json").read_text())
    assert found == {"eos_token_id": [3, 7, text, answer], "top_k": 5}


def test_a_place_is_the_number_of_tokens_of_the_text_before_it(tmp_path: Path) -> None:
    """Also where no special token is before it, one reaches over it, or a text spells one that it parts."""
    chats = Chats(tokenizer(tmp_path))
    text = "aé <|im_start|>b\n<|im_end|><|im_end|> \n🐟<|endoftext|> c"
    ids = chats.tokenizer.encode(text, add_special_tokens=False).ids
    expected: list[int | None] = []
    for place in range(len(text) + 1):
        before = chats.tokenizer.encode(text[:place], add_special_tokens=False).ids
        expected.append(len(before) if ids[: len(before)] == before else None)
    assert chats._tokens_before(text, ids, range(len(text) + 1)) == expected
    assert None in expected and len(text) > 30


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["markers", "prefixes"])
def test_calls_and_reasoning_of_each_answer_of_a_long_conversation_are_written_or_refused(
    tmp_path: Path, template: str
) -> None:
    call = "{%- for c in message['tool_calls'] or [] %}{{- c['function'] | tojson }}{%- endfor %}"
    writes = template.replace(
        "{{- message['content'] +", f"{call}{{{{- (message['thinking'] or '') + message['content'] +"
    )
    messages: list[dict[str, Any]] = []
    for number in range(25):
        function = {"name": f"add{number}", "arguments": {"a": number}}
        messages += [
            {"role": "user", "content": f"and {number}?"},
            {"role": "assistant", "content": f"is {number}", "thinking": f"hm{number}",
             "tool_calls": [{"type": "function", "function": function}]},
        ]  # fmt: skip
    chats = Chats(tokenizer(tmp_path, writes))
    answers = counted(chats, json.dumps({"messages": messages, "tools": [TOOL]}))
    assert answers[7] == '{"name": "add7", "arguments": {"a": 7}}hm7is 7<|im_end|>' and len(answers) == 25
    silent = Chats(tokenizer(tmp_path / "silent", template))
    with pytest.raises(DataError, match=r"IG990.*\n.*message 2: the template does not write its tool_calls"):
        silent(json.dumps({"messages": messages, "tools": [TOOL]}))
    for message in messages:
        message.pop("tool_calls", None)
    with pytest.raises(DataError, match=r"IG990.*\n.*message 2: the template does not write its thinking"):
        silent(json.dumps({"messages": messages, "tools": [TOOL]}))
