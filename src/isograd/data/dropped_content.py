"""Refuses a conversation of which its chat template leaves something out: that would be missing from what is learned.

Templates pass over what they do not know: a role, a second system turn, words beside tool calls, reasoning, tools. A
part of a message whose words stand in the text as often as in the conversation, and not in the template, is written.
Any other part is left out if the template writes the same without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from isograd.errors import ChatError

REASONING = "reasoning_content", "reasoning", "thinking"  # keys under which a message may hold what came before words
LOST = "left out by the template, in part"
Render = Callable[[list[Any], Any], str]  # (messages, tools): what the template writes


def refuse_dropped_content(
    text: str, messages: list[Any], tools: Any, learned: Sequence[int], render: Render, template: str
) -> None:
    """Raise IG990 with the first part of a conversation that is not in its `text`. learned: the messages of which the
    reasoning is learned, too."""
    said = "\0".join(strings([messages, tools]))

    def same_with(number: int, instead: list[Any]) -> bool:
        try:
            return text == render([*messages[:number], *instead, *messages[number + 1 :]], tools)
        except ChatError:  # it needs what was taken away
            return False

    for number, message in enumerate(messages):
        content, one = message.get("content"), f"message {number + 1}"
        if isinstance(content, list) and content and str(content) in text:
            raise no_chat(f"{one}: the template writes its parts as Python's {str(content)[:60]!r}", LOST)
        for name, words, rest in parts(message, number in learned):
            if all(word not in template and text.count(word) >= said.count(word) for word in words):
                continue
            if same_with(number, [rest]):
                if name == "content" and same_with(number, []):
                    raise no_chat(f"{one}, of the role {message['role']!r}: the template does not write it", LOST)
                raise no_chat(f"{one}: the template does not write its {name}", LOST)
    if tools and text == render(messages, None):
        raise no_chat("the template does not write the conversation's tools", LOST)


def parts(message: Any, learned: bool) -> Iterator[tuple[str, list[str], Any]]:
    """(name, words, the message without it) of each part of a message that a template should write."""
    for key in ("tool_calls", *(REASONING if learned else ())):
        if value := message.get(key):
            if key == "tool_calls":  # templates need not write ids
                value = [call.get("function", call).get("name") for call in value if isinstance(call, dict)]
            words = [word.strip() for word in strings(value)] or [""]
            yield key, words, {"content": "", **{name: one for name, one in message.items() if name != key}}
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        yield "content", [content.strip()], {**message, "content": ""}
    for at, part in enumerate(content if isinstance(content, list) else ()):
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and text.strip():
            emptied = {**part, "text": ""} if isinstance(part, dict) else ""
            yield "content", [text.strip()], {**message, "content": [*content[:at], emptied, *content[at + 1 :]]}


def no_chat(seen: str, reason: str) -> ChatError:
    """The error of a line that is no conversation to learn from. reason: the same words for every such line."""
    error = ChatError("IG990", seen=seen[:500])
    error.reason = reason
    return error


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)
