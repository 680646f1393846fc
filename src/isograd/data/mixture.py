"""Batches by number: what row r of step n is, is a function of the data, the options and (seed, n, r) alone.

A sample is a window: `length` tokens of a source's stream, and for each the token after it as its label. Windows stand
end to end, so that over an epoch of a source every token but the first is a label exactly once; the last window is
filled up with tokens that do not count. Which window: sample step * batch + row falls to a source and is its j-th
(Blend); that source's epoch j // windows shuffles its windows, and the sample is number j % windows of them (shuffled).

With packing 'whole' a window is made of whole documents instead (packs.py), and filled up behind them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from isograd.data.manifest import TOKENIZER, read
from isograd.data.order import Blend, drawn
from isograd.data.packs import Packs
from isograd.data.tokenizer import load_tokenizer, same_ids
from isograd.data.tokens import Numbers, Tokens
from isograd.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

ORDER = 1  # raised whenever a sample of the same number would become another one
IGNORE = -100


@dataclass(frozen=True)
class Source:
    """A folder made by `isograd data build`, and its share of the samples relative to the other sources."""

    path: str | Path
    weight: float = 1.0


class Mixture:
    """packing: 'documents' gives the model the numbers of documents, and no label leads from one into the next;
    'whole' does the same with windows of whole documents, and leaves out those that are longer than a window;
    'stream' is the plain stream, in which a model sees the documents before its own."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        length: int,
        batch: int,
        seed: int = 0,
        split: str = "train",
        packing: str = "documents",
        repeat: bool = True,
    ) -> None:
        """`repeat=False`, for evaluation: a window that was drawn before has no labels when it is drawn again."""
        _check(sources, length, batch, split, packing)
        self.sources, self.length, self.batch = tuple(sources), length, batch
        self.seed, self.split, self.packing, self.repeat = seed, split, packing, repeat
        self._blend = Blend([source.weight for source in sources])
        self._tokens = [Tokens(source.path, split) for source in sources]
        first, *others = self._tokens
        mine = first.manifest.recipe.vocabulary
        for other in others:
            theirs = other.manifest.recipe.vocabulary
            if (theirs.sha256, theirs.size) != (mine.sha256, mine.size):
                both = (first, mine), (other, theirs)
                seen = "; ".join(f"{tokens.folder}: {its.name}, {its.size} tokens" for tokens, its in both)
                raise DataError("IG908", seen=seen)
        self._packs = [Packs(tokens, length) for tokens in self._tokens] if packing == "whole" else []
        self._windows = [len(p) for p in self._packs] or [_windows(tokens, length) for tokens in self._tokens]

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return self._tokens[0].vocab

    @property
    def steps_per_epoch(self) -> int:
        """Steps that draw as many samples as all sources together have windows."""
        return -(-sum(self._windows) // self.batch)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides any sample: equal fingerprints, equal batches."""
        shards = [
            [
                self.split,
                *((s.tokens, s.tokens_sha256, s.ends_sha256, *filter(None, [s.counted_sha256])) for s in tokens.shards),
            ]
            for tokens in self._tokens
        ]
        options = [ORDER, self.length, self.batch, self.seed, self.packing, self._blend.parts]
        return sha256(json.dumps([options, shards]).encode()).hexdigest()

    def rows(self, step: int, rows: range) -> dict[str, Tensor]:
        """Rows of a step: tokens and labels [n, length], with packing 'documents' their numbers, and samples [n]."""
        import torch

        if step < 0 or any(not 0 <= row < self.batch for row in (*rows[:1], *rows[-1:])):
            raise DataError(
                "IG906",
                "no such rows",
                seen=f"step {step}, rows {rows}",
                expected=f"steps from 0, rows 0 to {self.batch - 1}",
                fix="the batch is all rows of a step, of all ranks",
            )
        shape = (len(rows), self.length)
        tokens, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORE, np.int64)
        samples = np.array([step * self.batch + row for row in rows], np.int64)
        for row, sample in enumerate(samples.tolist()):
            if not (self.repeat or self._is_new(sample)):
                continue
            source, window = self._window(sample)
            fill = self._fill_whole if self._packs else self._fill
            fill(source, window, tokens[row], labels[row], documents[row])
        found = {"tokens": tokens, "labels": labels, "samples": samples}
        if self.packing != "stream":
            found["documents"] = documents
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def place(self, sample: int) -> tuple[int, int]:
        """(source, first token in its stream) of a sample; not with packing 'whole'."""
        source, window = self._window(sample)
        return source, window * self.length

    def filled(self, sample: int) -> int:
        """How many tokens of a sample are text; it is filled up behind them."""
        number, window = self._window(sample)
        if self._packs:
            return sum(last - first for first, last in self._packs[number].documents(window))
        return min(self.length, self._tokens[number].tokens - window * self.length)

    def has_new(self, step: int) -> bool:
        """Whether a window of this step was not drawn before it."""
        return any(map(self._is_new, range(step * self.batch, (step + 1) * self.batch)))

    def _is_new(self, sample: int) -> bool:
        source, number = self._blend.at(sample)
        return number < self._windows[source]

    def _window(self, sample: int) -> tuple[int, int]:
        """(source, number of the window in it) of a sample."""
        source, number = self._blend.at(sample)
        return source, drawn(number, self._windows[source], f"{self.seed} {source} {self.split}")

    def _fill(self, number: int, window: int, tokens: Numbers, labels: Numbers, documents: Numbers) -> None:
        source, start = self._tokens[number], window * self.length
        stop = min(start + self.length + 1, source.tokens)
        stream = source.read(start, stop)
        tokens[: stop - start] = stream[: self.length]
        labels[: stop - start - 1] = np.where(source.counted(start, stop), stream, IGNORE)[1:]
        if self.packing == "documents":
            ends = source.ends(start, stop) - start
            labels[ends[ends <= self.length] - 1] = IGNORE  # what follows belongs to another text
            np.add.at(documents, ends[ends < self.length], 1)
            np.cumsum(documents, out=documents)

    def _fill_whole(self, number: int, window: int, tokens: Numbers, labels: Numbers, documents: Numbers) -> None:
        source, at = self._tokens[number], 0
        for first, last in self._packs[number].documents(window):
            stream, to = source.read(first, last), at + last - first
            tokens[at:to] = stream
            labels[at : to - 1] = np.where(source.counted(first, last), stream, IGNORE)[1:]
            documents[to:] += 1
            at = to

    @property
    def left_out(self) -> str:
        """The documents that no window holds, in words; empty: none."""
        packs = [(source.path, p) for source, p in zip(self.sources, self._packs, strict=False) if p.left_out]
        return "; ".join(
            f"{path}: {p.left_out:,} of {p.number:,} documents are longer than a sequence of {self.length} tokens and "
            f"are left out (the longest has {p.longest:,})"
            for path, p in packs
        )

    @property
    def as_text(self) -> str:
        """The markers of chat templates that are text, in words; empty: none."""
        found = {tokens.manifest.as_text for tokens in self._tokens} - {""}
        return "; ".join(sorted(found))

    def describe(self) -> str:
        """For people: what is read, and how often an epoch of the mixture goes through each source."""
        drawn = self.steps_per_epoch * self.batch
        lines = [
            f"{self.split}: {self.batch} x {self.length} tokens a step, {self.steps_per_epoch:,} steps an epoch, "
            f"packing {self.packing}, seed {self.seed}, vocabulary {self.vocab:,}"
        ]
        for source, tokens, windows, part in zip(
            self.sources, self._tokens, self._windows, self._blend.parts, strict=True
        ):
            share = part / self._blend.period
            lines.append(
                f"  {source.path}: {share:.2%} of samples, {tokens.tokens:,} tokens in {tokens.documents:,} documents, "
                f"{windows:,} windows, {share * drawn / windows:.2f} times an epoch"
            )
        return "\n".join([*lines, *([f"  {self.left_out}"] if self.left_out else [])])


def _windows(tokens: Tokens, length: int) -> int:
    if tokens.tokens < 2:
        raise DataError(
            "IG905", f"the {tokens.split} split of {tokens.folder} has one token, and no token after it",
            seen=tokens.tokens, expected="at least 2", fix="build it from more text",
        )  # fmt: skip
    return -(-(tokens.tokens - 1) // length)


def _check(sources: Sequence[Source], length: int, batch: int, split: str, packing: str) -> None:
    wrong = [] if sources else ["no sources"]
    wrong += [f"{name} {value}" for name, value in (("length", length), ("batch", batch)) if value < 1]
    wrong += [] if split in ("train", "validation") else [f"split {split!r}"]
    wrong += [] if packing in ("documents", "whole", "stream") else [f"packing {packing!r}"]
    if wrong:
        raise DataError(
            "IG906",
            "a mixture that cannot be read",
            seen="; ".join(wrong),
            expected="sources; length and batch of at least 1; split 'train' or 'validation'; "
            "packing 'documents', 'whole' or 'stream'",
        )


class Sourced(Protocol):
    """What has been built from sources."""

    @property
    def sources(self) -> Sequence[Source]:
        """The folders."""
        ...


def read_tokenizer(data: Sourced) -> Callable[[Sequence[int]], str]:
    """What turns tokens back into text: the tokenizer kept with the first source, which is that of all."""
    first = Path(data.sources[0].path)
    return load_tokenizer(first, read(first).recipe.vocabulary).decode


def refuse_other_tokenizer(data: Sourced, model: Path, fix: str | None) -> None:
    """Raise IG908 if tokens are of another tokenizer than a model's folder has."""
    first = Path(data.sources[0].path)
    recipe = read(first).recipe
    of_bytes = recipe.vocabulary.sha256 is None
    if not (model / TOKENIZER).is_file() or (not of_bytes and same_ids([first, model])):
        return
    more = ["--chat"] if recipe.template else ["--documents", recipe.documents, "--text-key", recipe.text_key]
    inputs = [shlex.quote(one.path) for one in recipe.inputs] if len(recipe.inputs) < 9 else ["INPUT..."]
    typed = ["isograd data build", f"{first}-{model.name}", *inputs, "--tokenizer", str(model), *more]
    ours = f"{first}: {recipe.vocabulary.name}, {recipe.vocabulary.size} tokens"
    raise DataError("IG908", seen=f"{ours}; {model / TOKENIZER}: other ids", fix=fix or " ".join(typed))
