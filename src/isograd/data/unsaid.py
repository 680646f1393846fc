"""What of a conversation its chat template does not write: it would be missing from what is learned, and nothing would
show it.

Templates pass over what they do not know: a role, a second system turn, words beside tool calls, reasoning, tools. What
is there as often as the messages say it, and is no text of the template's own, is written. Of the rest two renderings
decide: one with other words in the place of every text (the template writes those of the texts that it writes), and for
each text that is then in doubt one without it, which gives the same if the template leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from isograd.data.beginnings import Beginnings
from isograd.errors import ChatError

REASONING = "reasoning_content", "reasoning", "thinking"  # keys under which a message may hold what came before words
Render = Callable[[list[Any], Any], str]  # (messages, tools): what the template writes


class Unsaid:
    """A conversation, and the text that the template makes of it."""

    def __init__(self, text: str, messages: list[Any], tools: Any, render: Render, template: str) -> None:
        self.text, self.messages, self.tools, self.render, self.template = text, messages, tools, render, template

    def refuse(self, learned: Sequence[int], known: Beginnings | None) -> None:
        """Raise what names the first message that is not written whole. learned: those of which reasoning is learned,
        too; known: where each begins in the text."""
        of_learned = set(learned)
        for number, message in enumerate(self.messages):
            for key in ("tool_calls", *(REASONING if number in of_learned else ())):
                if not message.get(key) or (known and _is_written(known.of(self.text, number), message, key)):
                    continue
                less = {"content": "", **{name: value for name, value in message.items() if name != key}}
                if self._is_the_same(number, [less]):
                    raise no_chat(f"message {number + 1}: the template does not write its {key}")
            parts = message.get("content")
            if isinstance(parts, list) and parts and str(parts) in self.text:
                raise no_chat(f"message {number + 1}: the template writes its parts as Python's {str(parts)[:60]!r}")
        for number, part in self._doubtful():
            message = self.messages[number]
            less = with_texts(message, ["" if at == part else one for at, one in enumerate(texts_of(message))])
            if self._is_the_same(number, [less]):
                whole = self._is_the_same(number, [])
                what = f", of the role {message['role']!r}: the template does not write it"
                raise no_chat(f"message {number + 1}{what if whole else ': the template does not write its content'}")
        if self.tools and self.text == self.render(self.messages, None):
            raise no_chat("the template does not write the conversation's tools")

    def _doubtful(self) -> list[tuple[int, int]]:
        """(number of a message, number of its text) of texts that may not be written."""
        said, found = "\0".join(strings([self.messages, self.tools])), list[tuple[int, int]]()
        for number, message in enumerate(self.messages):
            for part, one in enumerate(each.strip() for each in texts_of(message)):
                there = one not in self.template and self.text.count(one) >= said.count(one)
                found += [(number, part)] * bool(one and not there)
        if not found:
            return []
        marked = [
            with_texts(message, [_mark(number, part) for part, _ in enumerate(texts_of(message))])
            for number, message in enumerate(self.messages)
        ]
        try:
            other = self.render(marked, self.tools)
        except ChatError:  # the words decide what it writes
            return found
        texts = [texts_of(message) for message in self.messages]
        return [(n, k) for n, k in found if _mark(n, k) not in other or texts[n][k].strip() not in self.text]

    def _is_the_same(self, number: int, instead: list[Any]) -> bool:
        """Whether the template writes the same with other messages, or none, in the place of one."""
        try:
            return self.text == self.render(
                [*self.messages[:number], *instead, *self.messages[number + 1 :]], self.tools
            )
        except ChatError:  # it needs what was taken away
            return False


def no_chat(seen: str) -> ChatError:
    """The error of what is no conversation to learn from."""
    return ChatError(
        "IG990", "no conversation to learn from", seen=seen[:500],
        expected='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, and '
        'perhaps "tools"', fix="fix or remove the line",
    )  # fmt: skip


def _mark(number: int, part: int) -> str:
    return f"(text {part} of {number})"


def texts_of(message: Any) -> list[str]:
    """The texts in a message's content: itself, or those of its parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return [content] if isinstance(content, str) else []
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return [part for part in parts if isinstance(part, str)]


def with_texts(message: Any, texts: Sequence[str]) -> Any:
    """A message with other texts in its content."""
    content, rest = message.get("content"), list(texts)
    if not isinstance(content, list):
        return {**message, "content": rest[0]} if rest else message
    made = list[Any]()
    for part in content:
        if isinstance(part, str):
            made.append(rest.pop(0))
        else:
            has_text = isinstance(part, dict) and isinstance(part.get("text"), str)
            made.append({**part, "text": rest.pop(0)} if has_text else part)
    return {**message, "content": made}


def _is_written(text: str, message: Any, key: str) -> bool:
    """Whether the text of a message surely has what stands under a key, as it has what its content has not."""
    value, content = message[key], message.get("content")
    if key == "tool_calls":
        value = [call.get("function", call).get("name") for call in value if isinstance(call, dict)]
    said = [one.strip() for one in strings(value)]
    other = " ".join(strings(content))
    return bool(said) and all(one and one in text and one not in other for one in said)


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
