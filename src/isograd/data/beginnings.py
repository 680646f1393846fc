"""Where each message begins in a rendered conversation, from rendering the whole once instead of every beginning of it.

An answer is found by what the template writes of the messages before it (chats.py). To render each beginning of a talk
takes time that grows with the square of its length. A template that reads the messages one after the other has,
by the time at which it asks for message n, written what it writes of the first n messages alone: it is a function of
what it has read. So the messages are handed out one by one, with a note of what had been written by then, and of
whether something further had been looked at before (the number of messages, the last one, the next one). Where it had,
where the messages are read twice, or something is written behind the last one, nothing is said, and the beginning is
rendered.

The prompt for an answer is written behind the last message. It is what is added to the whole conversation with
`add_generation_prompt`; that it stands before an answer is looked up for each, and rendered for the first and the last
answer behind each role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Reading(Sequence[Any]):
    """Messages that note when a template asks for them."""

    def __init__(self, messages: Sequence[Any], notes: Notes, first: int = 0) -> None:
        self._messages, self._notes, self._first = messages, notes, first

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            if (at.start or 0) >= 0 and at.stop is None and at.step in (None, 1):
                return Reading(self._messages, self._notes, self._first + (at.start or 0))
            self._notes.saw_the_end()
            return list(self._messages[self._first :])[at]
        if at < 0 or self._first + at >= len(self._messages):
            self._notes.saw_the_end()
            return self._messages[self._first :][at]
        self._notes.saw(self._first + at)
        return self._messages[self._first + at]

    def __iter__(self) -> Iterator[Any]:
        self._notes.passes += 1
        for number in range(self._first, len(self._messages)):
            self._notes.begins(number)
            yield self._messages[number]
        self._notes.ends()

    def __bool__(self) -> bool:
        self._notes.saw(self._first)
        return self._first < len(self._messages)

    def __len__(self) -> int:
        self._notes.saw_the_end()
        return len(self._messages) - self._first


class Notes:
    """What a template had read and written, and when."""

    def __init__(self, number: int) -> None:
        self.written = self.passes = 0
        self.end: int | None = None  # characters written when there was no further message
        self.places: dict[int, int] = {}  # characters written when a message was asked for
        self.certain: set[int] = set()  # messages of which, and of what follows, nothing had been read by then
        self._seen, self._number = -1, number

    def saw(self, message: int) -> None:
        """A message was read, not as the next one."""
        self._seen = max(self._seen, message)

    def saw_the_end(self) -> None:
        """Something was asked that depends on how many messages there are."""
        self._seen = self._number

    def begins(self, message: int) -> None:
        """A message was read as the next one."""
        if self._seen < message:
            self.certain.add(message)
        self.places[message] = self.written
        self.saw(message)

    def ends(self) -> None:
        """There was no further message."""
        self.end = self.written
        self.saw_the_end()


Write = Callable[[Any, bool], Iterator[str]]  # (messages, whether a prompt for an answer is asked for): text in pieces


class Beginnings:
    """What is known of the beginnings of one rendered conversation."""

    def __init__(self, text: str, messages: Sequence[Any], write: Write) -> None:
        """text: what the template writes of all messages, without a prompt."""
        self._certain: set[int] = set()
        self.places: dict[int, int] = {}  # where each message begins, if the messages are read one after the other
        self.prompt = ""
        try:
            plain, notes = _noted(messages, write, ask=False)
            asked, again = _noted(messages, write, ask=True)
        except Exception:  # what a list can do and `Reading` cannot, or a template that has no prompt
            return
        once = notes.passes == again.passes == 1 and notes.end == again.end == len(text)
        if not once or plain != text or not asked.startswith(text) or notes.places != again.places:
            return
        self.places = {**notes.places, len(messages): len(text)}
        self._certain = (notes.certain & again.certain) | {len(messages)}
        self.prompt = asked[len(text) :]

    def span(self, text: str, number: int) -> tuple[int, int] | None:
        """Where message `number` lies without the prompt before it; None: it is not known."""
        if not self.prompt or number not in self._certain or number + 1 not in self._certain:
            return None
        start, end = self.places[number] + len(self.prompt), self.places[number + 1]
        return (start, end) if text.startswith(self.prompt, self.places[number]) and start <= end else None

    def of(self, text: str, number: int) -> str:
        """What is written of a message; of all of them where that is not known."""
        return text[self.places[number] : self.places[number + 1]] if {number, number + 1} <= self.places.keys() else ""


def _noted(messages: Sequence[Any], write: Write, *, ask: bool) -> tuple[str, Notes]:
    notes, pieces = Notes(len(messages)), list[str]()
    for piece in write(Reading(messages, notes), ask):
        pieces.append(piece)
        notes.written += len(piece)
    return "".join(pieces), notes


def writer(template: str, tools: Any, values: Mapping[str, Any]) -> Write:
    """The template as transformers compiles it, of which the text comes in pieces."""
    from transformers.utils import chat_template_utils as theirs

    compiled: Any = getattr(theirs, "_compile_jinja_template")(template)  # noqa: B009

    def write(messages: Any, ask: bool) -> Iterator[str]:
        yield from compiled.generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=ask, **values
        )  # fmt: skip

    return write
