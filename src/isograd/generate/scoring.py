"""How probable a model finds texts: perplexity, and what lm-eval-harness asks of a model.

A Scorer is given a function from tokens to logits, so it serves a Hugging Face folder on one device, one that is cut
over ranks, and a model in training. Rows are divided among the data ranks, which call the model equally often, as
ZeRO 3 needs; all ranks call a Scorer together and have the same answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isograd.comm import raw
from isograd.core.mesh import Mesh
from isograd.errors import DataError, IsogradError, ModelError

Row = tuple[Sequence[int], int]  # tokens, and how many of the last are asked for
Conversation = tuple[list[int], list[int]]  # tokens, and 1 for each that the assistant writes
FEWEST = 2  # tokens of a text of which one is predicted


@dataclass(frozen=True)
class Scorer:
    """A model and its tokenizer, asked for probabilities."""

    logits: Callable[[Tensor], Tensor]  # tokens [b, s] to [b, s, vocab], on all ranks
    mesh: Mesh
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int  # the token that ends a text
    room: int  # tokens of a row at most
    batch: int = 8  # rows of a data rank at once
    beat: Callable[[str], None] = lambda _: None

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Of each row the log-probability of the tokens asked for, and whether each of them is the likeliest."""
        group, found = self.mesh.group("dp"), [(0.0, True)] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))  # of similar length together
        for first in range(0, len(order), self.batch * group.size):
            chosen = order[first : first + self.batch * group.size]
            mine = chosen[group.index :: group.size]
            filled = mine + chosen[:1] * (-(-len(chosen) // group.size) - len(mine))
            self.beat(f"scoring texts, {first} of {len(rows)} done")
            every = [part.tolist() for part in raw.gather_list(self._scored([rows[row] for row in filled]), group)]
            for place, row in enumerate(chosen):
                logp, greedy = every[place % group.size][place // group.size]
                found[row] = logp, bool(greedy)
        return found

    def _scored(self, rows: Sequence[Row]) -> Tensor:
        width = max(len(tokens) for tokens, _ in rows)
        ids = torch.tensor([[*tokens, *[self.end] * (width - len(tokens))] for tokens, _ in rows])
        logits = self.logits(ids.to(self.mesh.device))
        found = []
        for (tokens, asked), row in zip(rows, logits, strict=True):
            before = row[len(tokens) - 1 - asked : len(tokens) - 1]
            wide = before.to(torch.promote_types(before.dtype, torch.float32))
            labels = torch.tensor(list(tokens[len(tokens) - asked :]), device=wide.device)
            logp = -F.cross_entropy(wide, labels, reduction="sum").double()
            found.append(torch.stack((logp, (wide.argmax(-1) == labels).all().double())))
        return torch.stack(found)

    def windows(self, tokens: Sequence[int]) -> Iterator[Row]:
        """Rows of a text that together ask for each token but the first once, each with a token before it at least."""
        for first in range(0, len(tokens) - 1, self.room - 1):
            part = tokens[first : first + self.room]
            yield part, len(part) - 1

    def answers(self, tokens: Sequence[int], counted: Sequence[int]) -> Iterator[Row]:
        """A row for each run of tokens that are counted, behind as much of what stands before it as has room."""
        places = [place for place in range(1, len(tokens)) if counted[place]]
        starts = [place for place in places if place == 1 or not counted[place - 1]]
        for start, following in pairwise([*starts, len(tokens)]):
            end = next((place for place in range(start, following) if not counted[place]), following)
            for first in range(start, end, self.room - 1):
                last = min(first + self.room - 1, end)
                yield tokens[max(0, last - self.room) : last], last - first

    def perplexity(self, texts: Iterable[str | Conversation]) -> dict[str, float]:
        """Of texts, each by itself, and of the answers in conversations: the mean loss of a token, its exponential, and
        bits for each byte of the text."""
        rows, size, count = list[Row](), 0, 0
        for text in texts:
            tokens, counted = (self.encode(text), None) if isinstance(text, str) else text
            if len(tokens) >= FEWEST:
                rows += self.windows(tokens) if counted is None else self.answers(tokens, counted)
                asked = [token for at, token in enumerate(tokens) if at and (counted is None or counted[at])]
                size += len(self.decode(asked).encode())
                count += 1
        if not rows:
            raise DataError("IG911", seen=f"no text of {FEWEST} tokens", path="what --files names")
        total, number = -math.fsum(logp for logp, _ in self.score(rows)), sum(asked for _, asked in rows)
        loss = total / number
        bits = total / math.log(2) / max(1, size)
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "bits_per_byte": bits}
        return {**found, "tokens": number, "texts": count}

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], stops: Sequence[str], limit: int) -> str:
        """The likeliest tokens after a prompt, up to a stop."""
        tokens, text = list(prompt), ""
        for _ in range(limit):
            self.beat("answering")
            logits = self.logits(torch.tensor([tokens[-self.room :]], device=self.mesh.device))
            token = int(logits[0, -1].argmax())
            if token == self.end:
                break
            tokens.append(token)
            text = self.decode(tokens[len(prompt) :])
            if cut := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(cut)]
        return text


def scorer_of(folder: str, words: Mapping[str, Any], mesh: Mesh, length: int | None, batch: int) -> Scorer:
    """Of a Hugging Face folder, on this mesh; all ranks call it."""
    from isograd import hf
    from isograd.hf.training_rows import logits_of

    model: Any = hf.load(folder, mesh, prove=mesh.layout.world_size > mesh.size("dp")).eval()
    room = int(getattr(model.config, "max_position_embeddings", None) or 1024)
    if length is not None and length > room:
        raise ModelError("IG411", seen=f"--length {length}", max_positions=room)
    logits = partial(logits_of, model, mesh)
    return Scorer(logits, mesh, words["encode"], words["decode"], end_of(words), min(length or 1024, room), batch)


def end_of(words: Mapping[str, Any]) -> int:
    """The token that ends a text; of a tokenizer that has none, its first."""
    return int(next(iter(words["ends"]), 0))


def texts_of(files: Sequence[str], tokenizer: str) -> Iterator[str | Conversation]:
    """The texts in files: `text` of each line or row of .jsonl and .parquet, or its conversation, by the tokenizer's
    chat template; any other file is one text."""
    from isograd.data.chats import Chats
    from isograd.data.texts import values
    from isograd.io.untrusted import read_text

    chats: Chats | None = None
    for name in files:
        path = Path(name)
        if path.suffix not in (".jsonl", ".parquet"):
            if not path.is_file():
                raise DataError("IG910", seen="no such file", fix="name files of text, .jsonl or .parquet", path=path)
            yield read_text(path, 1 << 30)
            continue
        for number, value in values(path):
            text = value.get("text") if isinstance(value, dict) else None
            if isinstance(text, str):
                yield text
            elif isinstance(value, dict) and value.keys() & {"messages", "conversations", "instruction"}:
                chats = chats or Chats(tokenizer)
                try:
                    ids, counted = chats(json.dumps(value, default=str))
                except IsogradError as error:
                    error.where = f"{path}, line {number}"
                    raise
                yield ids.tolist(), counted.tolist()
            else:
                fix = "lines of JSON with the key 'text', or conversations: 'messages', or 'conversations' of ShareGPT"
                raise DataError("IG913", seen=f"{str(value)[:80]!r}", path=path, line=number, key="text", fix=fix)
