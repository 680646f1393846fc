"""Long conversations: answers lie where rendering each beginning puts them, in time by the length, not its square."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from isograd.data import chats as room
from isograd.data import sums
from isograd.data.chats import Chats
from isograd.errors import DataError
from tests.data.test_chats import MARKED, PLAIN, TOOL, tokenizer

pytest.importorskip("transformers")

HEAD = "{{- '<|im_start|>' + m['role'] + '\\n' }}"
BODY = HEAD + "{{- m['content'] + '<|im_end|>\\n' }}"
ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
LOOP = "{%- for m in messages %}" + BODY + "{%- endfor %}"
CALLED = ASK.replace("assistant\\n'", "assistant\\n' + ('!' if messages[-1]['role'] == 'tool' else '')")
SAID = "m['content'] +"
TEMPLATES = {
    "markers": MARKED,
    "plain": PLAIN,
    "first apart": "{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '<|im_end|>' }}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- for m in rest %}" + BODY + "{%- endfor %}" + ASK,
    "loop.last": LOOP.replace(BODY, BODY + ASK.replace("if ", "if loop.last and ")),
    "index": LOOP.replace(SAID, "loop.index0 ~ ' ' ~ " + SAID) + ASK,
    "looks back": LOOP.replace(SAID, "(messages[loop.index0 - 1].role if loop.index0 else 'none') + " + SAID) + ASK,
    "looks ahead": LOOP.replace(SAID, "(messages[loop.index0 + 1].role if not loop.last else '') + " + SAID) + ASK,
    "drops old": LOOP.replace(SAID, "(m['content'] if loop.revindex < 9 else 'old') +") + ASK,
    "reads twice": "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + LOOP.replace(SAID, "('' if loop.index0 < ns.last else 'new ') + " + SAID) + ASK,
    "scans first": "{%- for m in messages %}{%- if m['role'] == 'nobody' %}x{%- endif %}{%- endfor %}" + LOOP + ASK,
    "one late": "{%- set ns = namespace(held='') %}{%- for m in messages %}{{- ns.held }}"
    "{%- set ns.held = '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' %}"
    "{%- endfor %}{{- ns.held }}"
    + ASK,
    "an end behind": LOOP + "{%- if not add_generation_prompt %}{{- '<|endoftext|>' }}{%- endif %}" + ASK,
    "prompt by role": LOOP + CALLED,
    "tool header": LOOP.replace(
        SAID, "('!' if m['role'] == 'assistant' and messages[loop.index0 - 1]['role'] == 'tool' else '') + " + SAID
    ) + CALLED,
    "counts": "{{- messages | length }}" + LOOP + ASK,
    "macro": "{%- macro all() %}" + LOOP + "{%- endmacro %}{{- all() }}" + ASK,
    "joins": "{{- messages | map(attribute='content') | join('<|im_end|>') + '<|im_end|>' }}" + ASK,
    "instructions": "{%- for m in messages %}{%- if m['role'] == 'assistant' %}{{- ' ' + m['content'] + '<|im_end|>' }}"
    "{%- else %}{{- '[INST] ' + m['content'] + ' [/INST]' }}{%- endif %}{%- endfor %}",
}  # fmt: skip


def talk(answers: int, seed: int = 0, words: int = 3) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def said() -> str:
        return " ".join("".join(draw.choice("abcdé ") for _ in range(draw.randint(0, 8))) + "x" for _ in range(words))

    found = [{"role": "system", "content": "be brief"}] if seed % 2 else []
    for number in range(answers):
        found += [{"role": "user", "content": said()}, {"role": "assistant", "content": said()}]
        found += [{"role": "tool", "content": said()}, {"role": "assistant", "content": said()}] * (number % 4 == 3)
    return found


def found(chats: Chats, messages: list[dict[str, Any]], **more: Any) -> Any:
    try:
        ids, counted = chats(json.dumps({"messages": messages, **more}))
    except DataError as error:
        return error.code, error.seen
    return ids.tolist(), counted.tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_lie_where_rendering_each_beginning_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chats = Chats(tokenizer(tmp_path, TEMPLATES[name]))
    for seed in range(2):
        messages = talk(9, seed)
        monkeypatch.setattr(room, "FEW", 0)
        fast = found(chats, messages)
        monkeypatch.setattr(room, "FEW", 1000)
        assert fast == found(chats, messages), name


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


@pytest.mark.parametrize("name", ["markers", "plain", "first apart", "index"])
def test_a_long_conversation_is_rendered_a_few_times_and_tokenized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chats = Chats(tokenizer(tmp_path, TEMPLATES[name]))
    renders, characters = [0], [0]
    render, loaded = chats._render, chats.tokenizer

    def count(*given: Any, **more: Any) -> Any:
        renders[0] += 1
        return render(*given, **more)

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(loaded, name)

        def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
            characters[0] += sum(map(len, texts))
            return loaded.encode_batch_fast(texts, **more)

    monkeypatch.setattr(chats, "_render", count)
    monkeypatch.setattr(chats, "tokenizer", Counting())
    messages = talk(300)
    ids, counted = chats(json.dumps({"messages": messages}))
    assert renders[0] < 20 and characters[0] < 4 * len(ids) and counted.sum() > 1000


def test_calls_and_reasoning_of_a_long_conversation_are_looked_up_where_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = "{%- for c in m['tool_calls'] or [] %}{{- c['function'] | tojson }}{%- endfor %}"
    template = MARKED.replace("message['content'] +", "(message['thinking'] or '') + message['content'] +")
    template = template.replace("{%- generation %}", "{%- generation %}" + call.replace("m[", "message["))
    chats = Chats(tokenizer(tmp_path, template))
    messages = talk(20)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            function = {"name": f"add{number}", "arguments": {"a": number}}
            message |= {"thinking": f"hm{number}", "tool_calls": [{"type": "function", "function": function}]}
    renders, render = [0], chats._render
    monkeypatch.setattr(chats, "_render", lambda *a, **k: (renders.__setitem__(0, renders[0] + 1), render(*a, **k))[1])
    ids, _ = found(chats, messages, tools=[TOOL])
    assert renders[0] < 10 and chats.tokenizer.decode(ids).count("hm") == 25
    silent = Chats(tokenizer(tmp_path / "silent", MARKED))
    code, seen = found(silent, messages, tools=[TOOL])
    assert code == "IG990" and "does not write its tool_calls" in seen
    for message in messages:
        message.pop("tool_calls", None)
    assert "does not write its thinking" in found(silent, messages, tools=[TOOL])[1]


def test_the_recipe_s_template_takes_the_short_way(tmp_path: Path) -> None:
    chats = Chats(tokenizer(tmp_path, PLAIN))
    messages = talk(6)
    text, _ = chats._render(messages, None)
    known = chats._beginnings(text, messages, None)
    assert known is not None and known.prompt == "<|im_start|>assistant\n"
    assert all(known.span(text, number) for number, m in enumerate(messages) if m["role"] == "assistant")
    assert sums.TEMPLATE in MARKED
