"""Conversations as tokens, and which of the tokens the assistant writes: only these are labels.

    chats = Chats(folder)                                        # a tokenizer with a chat template
    ids, counted = chats('{"messages": [...], "tools": [...]}')

The tokenizer's own template renders a conversation. Where the assistant's words lie in the rendered text is found in
one of two ways:

    markers     the template has {% generation %}: it says so itself
    prefixes    an answer begins where the conversation before it ends, rendered with the prompt for an answer; it ends
                where the conversation that ends with the answer does, without white space behind its last special token

Then the text before each place is tokenized alone, as when a model is asked. These must be the first tokens of the
whole. Where this does not hold, or a special token is not one token, the conversation is refused: training on it would
teach something else, and nothing would show it. A special token parts a text: what is before it has the tokens that it
has alone. So only the text from the last special token to the place is tokenized again.

Markers that are spelled as special tokens are (`<|user|>`, `<start_of_turn>`, `</s>`) must be one token, unless the
caller says that they are text. Others ([INST], <tools>) are text where the tokenizer splits them; they are counted, and
whoever builds is told.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isograd.data import objects
from isograd.data.beginnings import Beginnings, writer
from isograd.data.manifest import SpecialTokens
from isograd.data.tokenizer import Ids, load_json, special_pattern
from isograd.data.unsaid import Unsaid, no_chat, strings
from isograd.errors import ChatError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Loaded

Span = tuple[int, int]
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The usual spelling of special tokens; DeepSeek's bars are wide ones, Gemma 4 has a bar at one side.
LIKE_A_TOKEN = re.compile(
    r"<[|\uff5c][^<>|\uff5c\n]{1,64}[|\uff5c]>|<\|\w{1,64}>|<\w{1,64}\|>|</?s>|<(?:bos|eos|pad|unk|sop|eop)>|"
    r"</?(?:start|end|begin)_of_\w{1,64}>|\[(?:BOS|EOS|CLS|SEP|PAD|UNK|MASK|gMASK)\]"
)
MARKER_OF_TEXT = re.compile(r"</?[A-Za-z][\w.:-]{0,64}>|<</?[A-Z]{1,64}>>|\[/?[A-Z][A-Z_]{1,64}\]")
FEW = 4  # answers that are found by rendering what is before each
MARK = "add {% generation %} and {% endgeneration %} around the assistant's words in the chat template"


class Chats:
    """Turns conversations into tokens by the template of one tokenizer."""

    def __init__(self, folder: str | Path, *, special_tokens: SpecialTokens = "refuse") -> None:
        """special_tokens: "keep": those that a message itself spells become ids, too; else they are refused. "text":
        what the template spells like one, and the tokenizer splits, is text; else it is refused."""
        self.folder, self.special_tokens = Path(folder), special_tokens
        self.markers: dict[str, int] = {}  # met so far that are text: how many tokens each of them is
        theirs = _open(self.folder)
        self.template, self.values = _template(theirs, self.folder), dict(theirs.special_tokens_map)
        self.json: str = theirs.backend_tokenizer.to_str()
        self.tokenizer: Loaded = load_json(self.json, self.folder)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {number for number, token in added.items() if token.special}
        self.spelled = special_pattern(self.tokenizer) or re.compile("(?!)")
        self.marks = bool(MARKER.search(self.template))

    def __call__(self, text: str) -> tuple[Ids, Ids]:
        """(tokens, 1 for each that the assistant writes and else 0) of a conversation, given as JSON."""
        messages, tools = conversation(text)
        said = list(strings([messages, tools]))
        if self.special_tokens != "keep":
            self._refuse_typed(said)
        rendered, spans = self._rendered(self._with_content(messages, tools), tools)
        try:
            rendered.encode()
        except UnicodeEncodeError as error:
            raise no_chat(f"{rendered[error.start]!r}, half of a surrogate pair") from error
        (ids,) = (e.ids for e in self.tokenizer.encode_batch_fast([rendered], add_special_tokens=False))
        self._refuse_split(rendered, ids, said)
        counted = np.zeros(len(ids), np.uint8)
        places = self._tokens_before(rendered, ids, [place for span in spans for place in span])
        for number, (begin, end) in enumerate(zip(places[::2], places[1::2], strict=True)):
            words = rendered[slice(*spans[number])]
            if begin is None or end is None or end <= begin:
                raise _unsure(
                    f"the tokens of the text before {words[:60]!r} are others when the answer follows, or when text "
                    "follows the answer", "begin and end each answer with a special token in the template",
                )  # fmt: skip
            if not self._stops(ids[begin:end]):
                raise ChatError(
                    "IG993", "an answer does not end with a special token: the model would not learn to stop",
                    seen=f"it ends with {words[-40:]!r}, tokens {self.tokenizer.encode(words[-12:]).tokens[-4:]}",
                    expected="a template that ends each answer with a special token of this tokenizer",
                    fix="the tokenizer that belongs to the template; or put the end of the answer inside "
                    "{% generation %}",
                )  # fmt: skip
            counted[begin:end] = 1
        return np.array(ids, np.uint32), counted

    def _tokens_before(self, text: str, ids: Sequence[int], places: Sequence[int]) -> list[int | None]:
        """How many tokens the text before each place has, tokenized alone; None: it begins with other tokens."""
        spelled = list(self.spelled.finditer(text))
        special = [number for number, token in enumerate(ids) if token in self.special]
        if [m[0] for m in spelled] != [self.tokenizer.id_to_token(ids[number]) for number in special]:
            spelled, special = [], []  # whatever parts this text is not what it spells
        ends = [match.end() for match in spelled]
        known = [bisect_right(ends, place) - 1 for place in places]  # of the last special token before a place
        starts = [(spelled[k].start(), special[k]) if k >= 0 else (0, 0) for k in known]
        pieces = [text[start:place] for (start, _), place in zip(starts, places, strict=True)]
        found = list[int | None]()
        for (_, first), piece in zip(
            starts, self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False), strict=True
        ):
            last = first + len(piece.ids)
            found.append(last if ids[first:last] == piece.ids else None)
        return found

    def _stops(self, ids: Sequence[int]) -> bool:
        """Whether the last token is a special one, or white space behind a special one."""
        last = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in self.special), 0)
        return bool(last) and not self.tokenizer.decode(list(ids[last:])).strip()

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        ids, counted = self('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
        return next(int(i) for i in ids[counted == 1][::-1] if int(i) in self.special)

    # -- what the template makes of the messages

    def _with_content(self, messages: list[Any], tools: Any) -> list[Any]:
        """Messages that have tool calls and no content (or null, which transformers takes away, too), as the template
        takes them: so, or with empty text where it refuses them."""
        bare = [number for number, message in enumerate(messages) if "content" not in message]
        if not bare:
            return messages
        empty = [{"content": "", **message} for message in messages]
        one = f"message {bare[0] + 1}: it has no content, "
        try:
            text = self._text(messages, tools)
        except ChatError:
            try:
                self._text(empty, tools)
            except ChatError as error:
                raise no_chat(f"{one}and also with empty text in its place {error.seen}") from error
            return empty
        if "None" in text and text.count("None") > self._text(empty, tools).count("None"):
            raise no_chat(f'{one}for which the template writes \'None\'; "content": "" is empty text')
        return messages

    def _rendered(self, messages: list[Any], tools: Any) -> tuple[str, list[Span]]:
        """The text of a conversation, and where its answers lie."""
        answers = _answers(messages)
        if not answers:
            raise no_chat("no message of the role 'assistant'")
        weights = [messages[number].pop("weight", 1) for number in answers]
        if any(weight not in (0, 1) for weight in weights) or not any(weights):
            raise no_chat(f"weights {weights[:8]} of the answers: 1 is learned, 0 is not, and one at least is 1")
        text, spans = self._render(messages, tools)
        known = self._beginnings(text, messages, tools) if len(answers) > FEW else None
        learned = [number for number, weight in zip(answers, weights, strict=True) if weight]
        Unsaid(text, messages, tools, self._text, self.template).refuse(learned, known)
        spans = spans if self.marks else self._spans(text, messages, tools, answers, known)
        if not all(weights):
            if len(spans) != len(answers):
                raise _unsure(
                    f"the template marks {len(spans)} answers of {len(answers)}, one of which has weight 0", MARK
                )
            spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
        if not any(end > start for start, end in spans):
            raise _unsure("the template marks nothing of this conversation as generated", MARK)
        return text, [(start, end) for start, end in spans if end > start]

    def _beginnings(self, text: str, messages: list[Any], tools: Any) -> Beginnings | None:
        try:
            return Beginnings(text, messages, writer(self.template, tools, self.values))
        except (ImportError, AttributeError):  # a version of transformers that has no such function
            return None

    def _spans(
        self, text: str, messages: list[Any], tools: Any, answers: Sequence[int], known: Beginnings | None
    ) -> list[Span]:
        """Where the answers lie. Of those that are known from one rendering, some are rendered to compare."""
        found: dict[int, Span] = {}
        looked: dict[str, list[int]] = {}  # the first and the last answer behind a role
        for number in answers:
            if known is not None and (span := known.span(text, number)):
                found[number] = self._to_its_end(text, *span)
                looked.setdefault(messages[number - 1]["role"], [number, number])[1] = number
        sampled = {number for two in looked.values() for number in two}
        spans = list[Span]()
        for number in answers:
            if number in found and number not in sampled:
                spans.append(found[number])
                continue
            spans.append(self._span(text, messages, tools, number))
            if found.get(number, spans[-1]) != spans[-1]:
                return [self._span(text, messages, tools, each) for each in answers]
        return spans

    def _span(self, text: str, messages: list[Any], tools: Any, number: int) -> Span:
        """Where the answer that is message `number` lies, from rendering with and without it."""
        if number == 0:
            raise _unsure("the conversation begins with the assistant", MARK)
        before, _ = self._render(messages[:number], tools, ask=True)
        through, _ = self._render(messages[: number + 1], tools)
        if not text.startswith(through) or not through.startswith(before):
            raise _unsure(f"the template renders message {number + 1} differently when it is the last one", MARK)
        words, content = text[len(before) : len(through)], messages[number].get("content")
        said = content.strip() if isinstance(content, str) else ""
        begins = said and words.lstrip().startswith(said)
        if not begins and before == self._render(messages[:number], tools)[0]:
            raise _unsure(f"the template has no prompt for an answer, and writes {words[:40]!r} before one", MARK)
        return self._to_its_end(text, len(before), len(through))

    def _to_its_end(self, text: str, start: int, end: int) -> Span:
        """An answer without the white space behind its last special token."""
        last = list(self.spelled.finditer(text, start, end))
        return (start, last[-1].end()) if last and not text[last[-1].end() : end].strip() else (start, end)

    def _text(self, messages: list[Any], tools: Any) -> str:
        return self._render(messages, tools)[0]

    def _render(self, messages: list[Any], tools: Any, *, ask: bool = False) -> tuple[str, list[Span]]:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(
                [messages], tools=tools, chat_template=self.template, add_generation_prompt=ask,
                return_assistant_tokens_mask=self.marks, **self.values,
            )  # fmt: skip
            texts, spans = found
        except TemplateSyntaxError as error:
            raise _no_tokenizer(
                self.folder, f"a chat template that is no Jinja, line {error.lineno}: {error}"
            ) from error
        except Exception as error:  # a template can also divide by zero, or call itself for ever
            raise no_chat(f"the template refuses it: {str(error) or type(error).__name__}") from error
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]] if self.marks else []

    # -- special tokens

    def _refuse_typed(self, said: Sequence[str]) -> None:
        for text in said:
            if found := self.spelled.search(text):
                raise DataError(
                    "IG929", f"a message spells the special token {found[0]!r}",
                    seen=repr(text[max(0, found.start() - 20) : found.end() + 20]),
                    expected="messages in which only the template writes special tokens: nobody should end a turn, or "
                    "speak as the system, by typing it", fix="change the message; or isograd data build "
                    "--chat --special-tokens keep, and that folder as the source of the run",
                )  # fmt: skip

    def _refuse_split(self, text: str, ids: Sequence[int], said: Sequence[str]) -> None:
        """Each special token that is spelled is one token, and so is all that looks like one, unless it is text."""
        there = Counter(self.tokenizer.id_to_token(i) for i in ids if i in self.special)
        apart = Counter(self.spelled.findall(text))
        split = sorted(spelling for spelling in apart if apart[spelling] != there[spelling])
        alike = self._split(LIKE_A_TOKEN, text, ids, said)
        if self.special_tokens == "text":
            self.markers |= alike
        else:
            split += sorted(alike)
        self.markers |= self._split(MARKER_OF_TEXT, text, ids, said, but=LIKE_A_TOKEN)
        if split:
            pieces = self.tokenizer.encode(split[0], add_special_tokens=False).tokens
            fix = (
                "the tokenizer that belongs to the template, or tokenizer.add_special_tokens and a model with rows for "
            )
            text_fix = "them; or, for a model that has learned them as text, isograd data build --special-tokens text"
            raise ChatError(
                "IG993", f"the template writes {split[0]!r}, which is not one token of this tokenizer",
                seen=f"{len(pieces)} tokens: {pieces[:12]}", expected="one token of its own",
                fix=fix + (text_fix if split[0] in alike else "them"),
            )  # fmt: skip

    def _split(
        self,
        pattern: re.Pattern[str],
        text: str,
        ids: Sequence[int],
        said: Sequence[str],
        but: re.Pattern[str] | None = None,
    ) -> dict[str, int]:
        """Markers that the template itself writes and that are several tokens: how many each of them is."""
        found = {}
        for marker, times in Counter(pattern.findall(text)).items():
            token = self.tokenizer.token_to_id(marker)
            whole = ids.count(token) if token is not None else 0
            if (but and but.fullmatch(marker)) or times <= whole or self.spelled.fullmatch(marker):
                continue
            if marker in self.markers or times - whole > sum(one.count(marker) for one in said):
                found[marker] = len(self.tokenizer.encode(marker, add_special_tokens=False).ids)
        return found


def conversation(text: str) -> tuple[list[Any], Any]:
    """The messages and the tools of a line, checked as far as every template needs it."""
    try:
        found = objects.loads(text)
    except (ValueError, RecursionError) as error:
        raise no_chat(f"no JSON: {error}") from error
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        if isinstance(found, dict) and "messages" not in found:
            seen = ", ".join(map(repr, list(found)[:10]))
        else:
            seen = "nothing in it" if messages == [] else type(messages if isinstance(found, dict) else found).__name__
        raise no_chat(f"no list of messages under 'messages': {seen}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise no_chat(f"message {number} has no 'role'")
        if not isinstance(message.get("content"), str | list | None):
            raise no_chat(f"message {number}: its content is {type(message['content']).__name__}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise no_chat(f"message {number}: it has no content")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    tools = found.get("tools") or None
    if isinstance(tools, str):  # in parquet, where every row would have the fields of every tool
        try:
            tools = objects.loads(tools)
        except ValueError as error:
            raise no_chat(f"'tools' is text, and no JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise no_chat("'tools' is no list of objects")
    return messages, tools


def _answers(messages: Sequence[Any]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def answer_end(folder: str | Path) -> int | None:
    """The token with which answers end by the chat template of a folder, if it has one that is understood."""
    try:
        return Chats(folder, special_tokens="text").end
    except (ChatError, DataError):
        return None


@lru_cache(maxsize=1)
def opened(folder: str, special_tokens: SpecialTokens) -> Chats:
    """The Chats of a folder; of several sources, once."""
    return Chats(folder, special_tokens=special_tokens)


def _open(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            "IG914", "conversations need the transformers package", seen=error, fix="pip install 'isograd[hf]'"
        ) from error
    try:
        if not folder.is_dir():
            raise OSError(f"no folder {folder}")
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises several kinds
        raise _no_tokenizer(folder, str(error)[:500]) from error
    if not getattr(found, "is_fast", False):
        raise _no_tokenizer(folder, "a tokenizer without a tokenizer.json")
    return found


def _template(theirs: Any, folder: Path) -> str:
    try:
        return str(theirs.get_chat_template())
    except ValueError as error:
        raise _no_tokenizer(folder, f"no chat template: {str(error)[:200]}") from error


def _no_tokenizer(folder: Path, seen: str) -> ChatError:
    return ChatError(
        "IG991", f"{folder} has no tokenizer with a chat template", seen=seen,
        expected="a folder with tokenizer.json, tokenizer_config.json and a chat template",
        fix="name it: --data.tokenizer FOLDER (isograd data build: --tokenizer FOLDER)",
    )  # fmt: skip


def _unsure(seen: str, fix: str) -> ChatError:
    return ChatError(
        "IG992", "it is not certain which tokens the assistant writes", seen=seen,
        expected="a template whose text of an answer can be told from the text before and behind it", fix=fix,
    )  # fmt: skip
