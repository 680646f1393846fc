"""Conversations as tokens, and which of the tokens the assistant writes: only these are labels.

Where the assistant's words lie in the text that the template renders is found in one of two ways:

    markers     the template has {% generation %}: it says so itself
    prefixes    an answer begins where the conversation before it ends, rendered with the prompt for an answer; it ends
                where the conversation that ends with the answer does, without white space behind its last special token

Then the text before each place is tokenized alone, as when a model is asked. These must be the first tokens of the
whole. Where this does not hold, or a special token is not one token, the conversation is refused: training on it would
teach something else, and nothing would show it. A special token parts a text, so only the text from the last one to the
place is tokenized again.

Markers that are spelled as special tokens are (`<|user|>`, `</s>`) must be one token, unless the caller says that they
are text. Others ([INST], <tools>) are text where the tokenizer splits them; they are counted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isograd.data.dropped_content import no_chat, parts, refuse_dropped_content, strings
from isograd.data.manifest import SpecialTokens, Vocabulary
from isograd.data.tokenizer import Ids, Tokenizer, load_json, of_bytes, of_json, special_pattern
from isograd.errors import ChatError, DataError, did_you_mean, if_not_installed
from isograd.io.untrusted import parse_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Loaded

Span = tuple[int, int]
SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
NO_CONTENT, NO_TEXT, NO_TOOLS = "a message without content", "content that is no text", "tools that are no list"
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The usual spelling of special tokens; DeepSeek's bars are wide ones, Gemma 4 has a bar at one side.
LIKE_A_TOKEN = re.compile(
    r"<[|\uff5c][^<>|\uff5c\n]{1,64}[|\uff5c]>|<\|\w{1,64}>|<\w{1,64}\|>|</?s>|<(?:bos|eos|pad|unk|sop|eop)>|"
    r"</?(?:start|end|begin)_of_\w{1,64}>|\[(?:BOS|EOS|CLS|SEP|PAD|UNK|MASK|gMASK)\]"
)
MARKER_OF_TEXT = re.compile(r"</?[A-Za-z][\w.:-]{0,64}>|<</?[A-Z]{1,64}>>|\[/?[A-Z][A-Z_]{1,64}\]")


class Chats:
    """Turns conversations into tokens by the template of one tokenizer."""

    def __init__(self, folder: str | Path, *, special_tokens: SpecialTokens = "refuse") -> None:
        """special_tokens: "keep": those that a message itself spells become ids, too; else they are refused. "text":
        what the template spells like one, and the tokenizer splits, is text; else it is refused."""
        self.folder, self.special_tokens = Path(folder), special_tokens
        self.markers: dict[str, int] = {}  # met so far that are text: how many tokens each of them is
        theirs = _open(self.folder)
        try:
            self.template = str(theirs.get_chat_template())
        except ValueError as error:
            raise ChatError("IG991", seen=f"no chat template: {str(error)[:200]}", folder=self.folder) from error
        self.values = dict(theirs.special_tokens_map)
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
        for words in said if self.special_tokens != "keep" else ():
            if found := self.spelled.search(words):
                raise DataError(
                    "IG929", f"a message spells the special token {found[0]!r}",
                    seen=repr(words[max(0, found.start() - 20) : found.end() + 20]),
                    expected="messages in which only the template writes special tokens: nobody should end a turn, or "
                    "speak as the system, by typing it", fix="change the message; or isograd data build "
                    "--chat --special-tokens keep, and that folder as the source of the run",
                )  # fmt: skip
        rendered, spans = self._rendered(self._with_content(messages, tools), tools)
        try:
            rendered.encode()
        except UnicodeEncodeError as error:
            raise no_chat(f"{rendered[error.start]!r}, half of a surrogate pair", "half a character") from error
        (ids,) = (e.ids for e in self.tokenizer.encode_batch_fast([rendered], add_special_tokens=False))
        self._refuse_split(rendered, ids, said)
        counted = np.zeros(len(ids), np.uint8)
        places = self._tokens_before(rendered, ids, [place for span in spans for place in span])
        for number, (begin, end) in enumerate(zip(places[::2], places[1::2], strict=True)):
            words = rendered[slice(*spans[number])]
            if begin is None or end is None or end <= begin:
                raise ChatError(
                    "IG992",
                    seen=f"the text before {words[:60]!r} has other tokens when the answer follows, or text after it",
                    fix="begin and end each answer with a special token in the template",
                )
            last = next((place for place in range(end, begin, -1) if ids[place - 1] in self.special), 0)
            if not last or self.tokenizer.decode(list(ids[last:end])).strip():  # white space may come behind it
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

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        ids, counted = self('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
        return next(int(i) for i in ids[counted == 1][::-1] if int(i) in self.special)

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
                raise no_chat(f"{one}and also with empty text in its place {error.seen}", NO_CONTENT) from error
            return empty
        if "None" in text and text.count("None") > self._text(empty, tools).count("None"):
            raise no_chat(f'{one}for which the template writes \'None\'; "content": "" is empty text', NO_CONTENT)
        return messages

    def _rendered(self, messages: list[Any], tools: Any) -> tuple[str, list[Span]]:
        """The text of a conversation, and where its answers lie."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            roles = ", ".join(repr(role) for role in dict.fromkeys(message["role"] for message in messages))
            raise no_chat(f"no message of the role 'assistant', but of {roles}", "no answer")
        weights = [messages[number].pop("weight", 1) for number in answers]
        if any(weight not in (0, 1) for weight in weights) or not any(weights):
            seen = f"weights {weights[:8]} of the answers: 1 is learned, 0 is not, and one at least is 1"
            raise no_chat(seen, "weights other than 0 and 1, or no 1")
        text, spans = self._render(messages, tools)
        learned = [number for number, weight in zip(answers, weights, strict=True) if weight]
        refuse_dropped_content(text, messages, tools, learned, self._text, self.template)
        if not self.marks:
            spans = [self._span(text, messages, tools, number) for number in answers]
        if not all(weights):
            if len(spans) != len(answers):
                raise ChatError(
                    "IG992",
                    seen=f"the template marks {len(spans)} answers of {len(answers)}, one of which has weight 0",
                )
            spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
        if not any(end > start for start, end in spans):
            raise ChatError("IG992", seen="the template marks nothing of this conversation as generated")
        if empty := [number for number in learned if not any(parts(messages[number], True))]:
            raise no_chat(f"message {empty[0] + 1}: an empty answer", "an empty answer")
        return text, [(start, end) for start, end in spans if end > start]

    def _span(self, text: str, messages: list[Any], tools: Any, number: int) -> Span:
        """Where the answer that is message `number` lies, from rendering with and without it."""
        if number == 0:
            raise ChatError("IG992", seen="the conversation begins with the assistant")
        before, _ = self._render(messages[:number], tools, ask=True)
        through, _ = self._render(messages[: number + 1], tools)
        if not text.startswith(through) or not through.startswith(before):
            raise ChatError(
                "IG992", seen=f"the template renders message {number + 1} differently when it is the last one"
            )
        words, content = text[len(before) : len(through)], messages[number].get("content")
        said = content.strip() if isinstance(content, str) else ""
        begins = said and words.lstrip().startswith(said)
        if not begins and before == self._render(messages[:number], tools)[0]:
            raise ChatError(
                "IG992",
                seen=f"the template has no prompt for an answer, and writes {words[:40]!r} before one",
            )
        start, end = len(before), len(through)  # without the white space behind the answer's last special token
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
            raise ChatError(
                "IG991", seen=f"a chat template that is no Jinja, line {error.lineno}: {error}", folder=self.folder
            ) from error
        except Exception as error:  # a template can also divide by zero, or call itself for ever
            seen = f"the template refuses it: {str(error) or type(error).__name__}"
            raise no_chat(seen, "refused by the template") from error
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]] if self.marks else []

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
        found = parse_line(text)
    except (ValueError, RecursionError) as error:
        raise no_chat(f"no JSON: {error}", "no JSON") from error
    found = _with_messages(found) if isinstance(found, dict) else found
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        if isinstance(found, dict) and "messages" not in found:
            known = ("messages", "conversations")
            near = [f"{key!r}{did_you_mean(key, known) if key not in known else ''}" for key in list(found)[:10]]
            seen = ", ".join(near)
        else:
            seen = "nothing in it" if messages == [] else type(messages if isinstance(found, dict) else found).__name__
        raise no_chat(f"no list of messages under 'messages': {seen}", "no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise no_chat(f"message {number} has no 'role'", "a message without a role")
        if not isinstance(message.get("content"), str | list | None):
            raise no_chat(f"message {number}: its content is {type(message['content']).__name__}", NO_TEXT)
        if message.get("content") is None and not message.get("tool_calls"):
            raise no_chat(f"message {number}: it has no content", NO_CONTENT)
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    tools = found.get("tools") or None
    if isinstance(tools, str):  # in parquet, where every row would have the fields of every tool
        try:
            tools = parse_line(tools)
        except ValueError as error:
            raise no_chat(f"'tools' is text, and no JSON: {error}", NO_TOOLS) from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise no_chat("'tools' is no list of objects", NO_TOOLS)
    return messages, tools


def _with_messages(found: dict[str, Any]) -> dict[str, Any]:
    """A line of ShareGPT or Alpaca as messages; any other line as it is. What has no place in messages is refused."""
    if found.get("messages") is not None:
        return found
    if isinstance(turns := found.get("conversations"), list):
        if all(isinstance(turn, dict) and "from" not in turn and {"role", "content"} <= turn.keys() for turn in turns):
            return {**found, "messages": turns}
        messages = []
        for number, turn in enumerate(turns, 1):
            sender = turn.get("from") if isinstance(turn, dict) else None
            role = SHAREGPT.get(sender) if isinstance(sender, str) else None
            if role is None or not isinstance(turn.get("value"), str):
                seen = f"turn {number} of 'conversations': 'from' is {sender!r}, one of {list(SHAREGPT)} is expected, "
                raise no_chat(seen + "with text as its 'value'", "an unknown sender" if role is None else NO_TEXT)
            weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
            messages.append({"role": role, "content": turn["value"], **weight})
        if found.get("system"):
            messages.insert(0, {"role": "system", "content": found["system"]})
        return {"messages": messages, "tools": found.get("tools")}
    if "instruction" in found and "output" in found:
        parts = {name: found.get(name) or "" for name in ("system", "instruction", "input", "output")}
        if wrong := [name for name, part in parts.items() if not isinstance(part, str)]:
            raise no_chat(f"{wrong[0]!r} is {type(parts[wrong[0]]).__name__}, no text", NO_TEXT)
        if not parts["output"].strip() or found.get("history"):
            seen = "an empty 'output'" if not found.get("history") else "'history', which is not read"
            raise no_chat(seen, seen)
        asked = "\n\n".join(part for part in (parts["instruction"], parts["input"]) if part)
        said = (("system", parts["system"]), ("user", asked), ("assistant", parts["output"]))
        return {"messages": [{"role": role, "content": text} for role, text in said if text or role == "user"]}
    return found


def answer_end(folder: str | Path) -> int | None:
    """The token with which answers end by the chat template of a folder, if it has one that is understood."""
    try:
        return Chats(folder, special_tokens="text").end
    except (ChatError, DataError):
        return None


_chats = lru_cache(maxsize=1)(Chats)  # of several sources with one folder, once


def chat_tokenizer(folder: str | Path, special_tokens: SpecialTokens = "refuse") -> tuple[Tokenizer, str]:
    """A folder's tokenizer for conversations, and the sha256 of its chat template."""
    chats = _chats(str(folder), special_tokens=special_tokens)
    size = max(chats.tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    vocabulary = Vocabulary(chats.folder.resolve().name, sha256(chats.json.encode()).hexdigest(), size, None)
    made = replace(of_json(chats.json, vocabulary, "keep"), chat=chats, folder=str(folder))
    return made, sha256(chats.template.encode()).hexdigest()


def tokenizer_in_worker(
    text: str | None, vocabulary: Vocabulary, special_tokens: SpecialTokens, folder: str
) -> Tokenizer:
    """The same tokenizer in another process."""
    if folder:
        return chat_tokenizer(folder, special_tokens)[0]
    return of_bytes(vocabulary) if text is None else of_json(text, vocabulary, special_tokens)


def _open(folder: Path) -> Any:
    seen, fix = "conversations need the transformers package: ", "pip install transformers"
    with if_not_installed(lambda error: DataError("IG914", seen=f"{seen}{error}", fix=fix, path=folder)):
        from transformers import AutoTokenizer
    try:
        if not folder.is_dir():
            raise OSError(f"no folder {folder}")
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises several kinds
        raise ChatError("IG991", seen=str(error)[:500], folder=folder) from error
    if not getattr(found, "is_fast", False):
        raise ChatError("IG991", seen="a tokenizer without a tokenizer.json", folder=folder)
    return found
