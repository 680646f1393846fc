"""Pairs of answers, of which one is preferred, as tokens: read by number, as windows of text are.

Each line of the file (or row, of parquet; docs/train.md) becomes two conversations, in which only the answer counts;
chats.py renders them and building.py makes tokens of them. With `strangers` a third one follows, the prompt with the
chosen answer of the next pair, from which KTO estimates how far a model has moved. Pairs of one prompt are held out
together, as a number made of the prompt decides. Prompts with one right answer (`answered`) are read in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isograd.data.building import build
from isograd.data.chats import conversation
from isograd.data.files import sha256 as sha256_of
from isograd.data.files import write_whole, writing
from isograd.data.mixture import IGNORE, Source
from isograd.data.order import drawn
from isograd.data.texts import values
from isograd.data.tokens import Numbers, Tokens
from isograd.errors import DataError, IsogradError
from isograd.io.atomic import AtomicFile
from isograd.io.untrusted import read_bytes

if TYPE_CHECKING:
    from torch import Tensor

NOBODY = -1  # the number of no pair: a row without labels
TEXTS, PROMPTS, BUILT = "conversations.jsonl", "prompts.u64", "tokens"
Messages = list[dict[str, Any]]


PAIR = (
    "pair of answers",
    '{"prompt": ..., "chosen": ..., "rejected": ...}: texts, or messages; or "messages" instead of "prompt"; or two '
    "whole conversations that begin alike",
)
ANSWERED = (
    "prompt with its right answer",
    '{"prompt": ..., "answer": ...}: texts, or messages; or a conversation that ends with the right answer',
)


def prepare(
    to: Path, file: Path, tokenizer: str, lines: Iterable[tuple[list[dict[str, Any]], Any]], answers: int
) -> None:
    """Build the tokens of a file into a folder, of whose lines each has so many answers: what `conversations` and
    `answered` make of it. What was built from the same is left as it is."""
    to.mkdir(parents=True, exist_ok=True)
    kept, prompts, different = to / TEXTS, bytearray(), 0
    with writing(kept), AtomicFile(kept) as texts:
        for every, prompt in lines:
            different += answers == 1 or every[0] != every[1]
            texts.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in every).encode())
            prompts += blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=8).digest()
        if not different:
            raise DataError(
                "IG926",
                seen="in every pair the two answers are equal" if answers > 1 else "no line",
                expected="answers of which one is better" if answers > 1 else ANSWERED[1],
                path=file,
            )
        if not kept.exists() or sha256_of(kept) != texts.digest():  # the same keeps its date: a build knows it by that
            texts.commit()
    write_whole(to / PROMPTS, bytes(prompts))
    try:
        build(to / BUILT, [kept], tokenizer=tokenizer, validation=0.0, chat=True)
    except IsogradError as error:
        name, _, number = (error.where or "").rpartition(":")
        if name and number.isdigit():
            error.where = f"{file}, {'pair' if answers > 1 else 'prompt'} {(int(number) - 1) // answers + 1}"
        raise


def conversations(file: Path, strangers: bool) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """(the conversations of a pair, what its prompt is) of each pair of a file."""
    first: tuple[Messages, Any, Messages, Messages] | None = None
    waiting: tuple[Messages, Any, Messages, Messages] | None = None
    for number, value in values(file):
        pair = _pair(file, number, value)
        first = first or pair
        if waiting is not None:
            yield _written(waiting, pair if strangers else None)
        waiting = pair
    if waiting is None:
        raise DataError("IG926", seen="no line", expected='lines with "chosen" and "rejected"', path=file)
    yield _written(waiting, first if strangers else None)


def answered(file: Path, column: str) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """([the prompt with its right answer], what the prompt is) of each line of a file. column: of the answer."""
    form = ANSWERED[0], ANSWERED[1].replace('"answer"', json.dumps(column))
    for number, value in values(file):
        found, right = value, value.get(column) if isinstance(value, dict) else None
        if isinstance(value, dict) and not {column, "prompt"} & value.keys():
            try:
                messages, tools = conversation(json.dumps(value))
            except IsogradError as error:
                error.where = f"{file}, line {number}"
                raise
            found, right = {"messages": messages[:-1], "tools": tools}, messages[-1:]
        right = str(right) if isinstance(right, int | float) else right
        found = {**found, column: right} if isinstance(value, dict) else value
        lines, prompt = _written(_pair(file, number, found, form, (column, column)), None)
        yield lines[:1], prompt


def _written(
    pair: tuple[Messages, Any, Messages, Messages], following: tuple[Messages, Any, Messages, Messages] | None
) -> tuple[list[dict[str, Any]], Any]:
    prompt, tools, chosen, rejected = pair
    answers = [chosen, rejected] + ([] if following is None else [following[2]])
    more = {"tools": tools} if tools else {}
    return [{"messages": [*prompt, *answer], **more} for answer in answers], [prompt, tools]


def _pair(
    file: Path, number: int, value: Any, form: tuple[str, str] = PAIR, names: tuple[str, str] = ("chosen", "rejected")
) -> tuple[Messages, Any, Messages, Messages]:
    """(prompt, tools, chosen, rejected) of a line, as messages. Of the prompt nothing is learned. form: what a line
    is. names: of the two answers, equal where there is one."""

    def refused(seen: str) -> DataError:
        return DataError("IG927", seen=seen[:200], expected=form[1], path=file, number=number, kind=form[0])

    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused(f"{error.object[error.start]!r}, half of a surrogate pair") from error
    if not isinstance(value, dict):
        raise refused(f"{type(value).__name__} instead of an object")
    if missing := [key for key in dict.fromkeys(names) if not value.get(key)]:
        raise refused(f"no {' and no '.join(map(repr, missing))}; keys {', '.join(map(repr, list(value)[:10]))}")
    if "prompt" in value and "messages" in value:
        raise refused("'prompt' and 'messages', of which one is the prompt")
    chosen, rejected = (_messages(value[key], "assistant") for key in names)
    prompt = _messages(value.get("prompt", value.get("messages", [])), "user")
    if chosen is None or rejected is None or prompt is None:
        raise refused("messages that are neither text nor a list of objects with 'role'")
    if not prompt:
        same = 0
        while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
            same += 1
        while same and chosen[same - 1]["role"] == "assistant":
            same -= 1  # equal answers to one prompt are answers, not part of the prompt
        prompt = chosen[:same]
    if not prompt:
        raise refused("no prompt" + ": the two answers have no first message in common" * (names[0] != names[1]))
    chosen, rejected = (
        answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in (chosen, rejected)
    )
    for name, answer in zip(names, (chosen, rejected), strict=True):
        if not answer or answer[0]["role"] != "assistant":
            raise refused(f"{name!r} has no message of the role 'assistant' where its answer should begin")
    asked = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in prompt]
    return asked, value.get("tools"), chosen, rejected


def _messages(value: Any, role: str) -> Messages | None:
    """Text as one message of a role, a message, or a list of messages; None: something else."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value.strip() else []
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found):
        return None
    return [{key: part for key, part in message.items() if key != "weight"} for message in found]


class Preferences:
    """What `prepare` has built, `batch` pairs a step."""

    def __init__(self, folder: Path, *, length: int, batch: int, seed: int, held_out: float, answers: int) -> None:
        """answers: conversations of a pair: 2, or 3 with strangers; 1 of a prompt with its right answer."""
        self.batch, self.seed, self.answers, self.length = batch, seed, answers, length
        self.unit = "pair" if answers > 1 else "prompt"
        self.sources = (Source(folder / BUILT),)
        self._tokens = Tokens(folder / BUILT)
        self._ends = self._tokens.ends(0, self._tokens.tokens)
        prompts = np.frombuffer(read_bytes(folder / PROMPTS, len(self._ends) * 8), np.uint8)
        if len(prompts) * answers != len(self._ends) * 8:
            raise DataError(
                "IG928", seen=f"{len(prompts) // 8} prompts, {len(self._ends)} conversations", path=folder / PROMPTS
            )
        prompts = prompts.view(">u8")
        self._lengths = np.diff(self._ends, prepend=0).reshape(-1, answers)
        fits = self._lengths.max(1) <= length
        held = prompts.astype(np.float64) / 2.0**64 < held_out
        self.train = np.flatnonzero(fits & ~held).tolist()
        self.held: list[int] = np.flatnonzero(fits & held).tolist()
        self.number, self._too_long = len(prompts), int((~fits).sum())
        if not self.train:
            raise DataError(
                "IG926",
                seen=f"{self._too_long} {self.unit}s are longer than {length} tokens, {len(self.held)} are held out",
                expected=f"at least one {self.unit} that fits, and is not held out",
                fix=f"--data.length {int(self._lengths.max())}, or a smaller --data.held_out",
                path=folder,
            )
        shards = [(s.tokens_sha256, s.ends_sha256, s.counted_sha256) for s in self._tokens.shards]
        self.contents = sha256(json.dumps([shards, answers]).encode()).hexdigest()  # of all pairs, in their order
        options = [self.contents, length, batch, seed, held_out]
        self.fingerprint = sha256(json.dumps(options).encode()).hexdigest()

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return self._tokens.vocab

    @property
    def left_out(self) -> str:
        """The pairs that are too long, in words; empty: none."""
        if not self._too_long:
            return ""
        longest = int(self._lengths.max())
        return (
            f"{self._too_long:,} of {self.number:,} {self.unit}s have an answer that ends behind token {self.length}, "
            f"and are left out (the longest has {longest:,})"
        )

    @property
    def as_text(self) -> str:
        """The markers of the chat template that are text, in words; empty: none."""
        return self._tokens.manifest.as_text

    @property
    def mean_length(self) -> float:
        """Tokens of a prompt with its answer, on average."""
        return float(self._lengths[self.train, :2].mean())

    def describe(self) -> str:
        """For people: what is read."""
        text = f"{len(self.train):,} {self.unit}s, {len(self.held):,} held out, {self.batch} a step, seed {self.seed}"
        return f"{text}\n  {self.left_out}" if self.left_out else text

    def numbers(self, step: int) -> list[int]:
        """The pairs of a step. Each epoch goes through all pairs once, in an order of its own."""
        samples = range(step * self.batch, (step + 1) * self.batch)
        return [self.train[drawn(sample, len(self.train), str(self.seed))] for sample in samples]

    def batches(self, numbers: Sequence[int]) -> list[list[int]]:
        """Pairs in their order, cut into batches; the last one is filled up with `NOBODY`."""
        filled = [*numbers, *[NOBODY] * (-len(numbers) % self.batch)]
        return [filled[at : at + self.batch] for at in range(0, len(filled), self.batch)]

    def rows(self, numbers: Sequence[int], mine: range, answers: range) -> dict[str, Tensor]:
        """tokens and labels [n, answers, length] of rows `mine` of these pairs; the length is that of the longest
        answer of all of them, so that all ranks have one shape."""
        import torch

        pairs = [number for number in numbers if number != NOBODY]
        width = int(self._lengths[pairs][:, answers.start : answers.stop].max()) if pairs else 1
        shape = (len(mine), len(answers), width)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        for row, place in enumerate(mine):
            for answer in answers if numbers[place] != NOBODY else ():
                at = row, answer - answers.start
                self._fill(numbers[place] * self.answers + answer, tokens[at], labels[at])
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def _fill(self, document: int, tokens: Numbers, labels: Numbers) -> None:
        first, last = int(self._ends[document - 1]) if document else 0, int(self._ends[document])
        stream = self._tokens.read(first, last)
        tokens[: last - first] = stream
        labels[: last - first - 1] = np.where(self._tokens.counted(first, last), stream, IGNORE)[1:]
