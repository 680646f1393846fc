"""A folder of tokens for people: what is in it, some samples as training sees them, and whether a bit has flipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from isograd.data.files import sha256
from isograd.data.manifest import SPLITS, TokenManifest, left_out_text, read
from isograd.data.mixture import IGNORE, Mixture, Source
from isograd.data.preferences import BUILT, PROMPTS, Preferences
from isograd.data.tokenizer import load_tokenizer
from isograd.data.tokens import Tokens, check_sizes
from isograd.errors import DataError
from isograd.io import terminal

LABELS = "▶", "◀"  # around what is learned of a conversation
GREEN = "\x1b[32m", "\x1b[39m"  # instead of them, on a terminal
ROOM = 2048  # tokens of a sample of conversations, where its length is not given and some fit


def show(
    folder: str | Path,
    length: int | None = None,
    samples: int = 3,
    seed: int = 0,
    split: str = "train",
    packing: str | None = None,
    labels: tuple[str, str] = LABELS,
) -> str:
    """Counts, then `samples` rows of step 0 as training sees them, decoded, a line for each document in them.

    packing, length: None stands for those of the task: conversations whole, in rows that hold the longest of them.
    labels: what stands before and behind what is learned, where that is not all.
    Pairs of answers (the folder `data` of a run of task preference), and prompts of task grpo, are shown one by one.
    """
    home = Path(folder)
    of_pairs = (home / PROMPTS).exists()
    manifest = read(home / BUILT if of_pairs else home)
    vocabulary = manifest.recipe.vocabulary
    end = "none" if vocabulary.end_of_document is None else vocabulary.end_of_document
    lines = [f"{folder}: tokenizer {vocabulary.name}, vocabulary {vocabulary.size:,}, end of document {end}"]
    for name in SPLITS:
        shards = manifest.of(name)
        tokens, documents = sum(s.tokens for s in shards), sum(s.documents for s in shards)
        lines.append(f"  {name:<11}{tokens:>16,} tokens {documents:>12,} documents {len(shards):>6,} shards")
    inputs = manifest.recipe.inputs
    lines.append(
        f"  from {len(inputs):,} files, {sum(one.bytes for one in inputs):,} bytes, {manifest.empty:,} empty documents"
    )
    told = left_out_text(manifest.left_out, manifest.left_out_at), manifest.as_text
    lines += [f"  {text}" for text in told if text]
    decode = load_tokenizer(home / BUILT if of_pairs else home, vocabulary).decode
    if of_pairs:
        if split != "train" or packing is not None:
            raise DataError(
                "IG906", f"{home} holds rows of a run's own, which have neither splits nor packing",
                seen=f"--split {split}" if packing is None else f"--packing {packing}",
                expected="none of these options", fix="a run holds some out by data.held_out when it starts",
            )  # fmt: skip
        return "\n".join([*lines, *_pairs(home, manifest, length, samples, seed, decode, labels)])
    chats = manifest.recipe.template is not None
    packing = packing or ("whole" if chats else "documents")
    length = length or (_room(Tokens(home, split)) if chats else 128)
    mixture = Mixture([Source(folder)], length=length, batch=samples, seed=seed, split=split, packing=packing)
    lines += [f"  packing {packing}, length {length}", *([f"  {mixture.left_out}"] if mixture.left_out else [])]
    lines += [f"  {_legend(labels)}"] if chats else []
    rows = mixture.rows(0, range(samples))
    for row in range(samples):
        ids, following = rows["tokens"][row].tolist(), rows["labels"][row].tolist()
        filled = mixture.filled(row)
        numbers = rows["documents"][row].tolist() if "documents" in rows else [0] * length
        counted = [label != IGNORE for label in following]
        of = "plain stream" if packing == "stream" else f"{numbers[filled - 1] + 1} documents"
        lines.append(f"\nsample {row} of {split}: {length} tokens, {sum(counted)} labels, {of}")
        marks = [False, *counted[: filled - 1]] if chats else [False] * filled
        for number, held in groupby(range(filled), key=numbers.__getitem__):
            text = _text(ids, marks, list(held), decode, labels)
            lines.append(f"  [{number}] {text}")
        if filled < length:
            lines.append(f"  {length - filled} tokens of filling, without labels")
    return "\n".join(lines)


def _room(tokens: Tokens) -> int:
    """A length for conversations: that of the longest, or ROOM where some fit into that."""
    lengths = np.diff(tokens.ends(0, tokens.tokens), prepend=0)
    return max(int(lengths.min()), min(int(lengths.max()), ROOM))


def _pairs(
    folder: Path,
    manifest: TokenManifest,
    length: int | None,
    samples: int,
    seed: int,
    decode: Callable[[list[int]], str],
    labels: tuple[str, str],
) -> Iterator[str]:
    """Samples of pairs: what of each row is read, and which of it are labels."""
    documents = sum(shard.documents for shard in manifest.of("train"))
    answers = documents // max(1, (folder / PROMPTS).stat().st_size // 8)
    length = length or _room(Tokens(folder / BUILT))
    pairs = Preferences(folder, length=length, batch=samples, seed=seed, held_out=0.0, answers=answers)
    yield f"  {pairs.number:,} {pairs.unit}s, rows of at most {length} tokens" + (
        ", with strangers (KTO)" * (answers == 3)
    )
    yield from [f"  {pairs.left_out}"] if pairs.left_out else []
    yield f"  {_legend(labels)}"
    for sample, pair in enumerate(pairs.numbers(0)):
        yield f"\nsample {sample}: {pairs.unit} {pair}"
        for answer in range(answers):
            name = ("chosen", "rejected", "stranger")[answer] if answers > 1 else "answer"
            rows = pairs.rows([pair], range(1), range(answer, answer + 1))
            ids, following = rows["tokens"][0, 0].tolist(), rows["labels"][0, 0].tolist()
            marks = [False, *(label != IGNORE for label in following[:-1])]
            text = _text(ids, marks, list(range(len(ids))), decode, labels)
            yield f"  [{name}: {len(ids)} tokens, {sum(marks)} labels] {text}"


def _legend(labels: tuple[str, str]) -> str:
    return f"labels are {'green'.join(labels)}" if labels == GREEN else f"labels stand between {' and '.join(labels)}"


def _text(
    ids: list[int],
    marks: list[bool],
    places: list[int],
    decode: Callable[[list[int]], str],
    labels: tuple[str, str],
) -> str:
    """Tokens as text, labels between marks, lines after the first one indented."""
    found = []
    for label, held in groupby(places, key=marks.__getitem__):
        text = terminal.plain(decode([ids[place] for place in held]))
        found.append(text.join(labels) if label else text)
    return "".join(found).replace("\n", "\n      ")


def verify(folder: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> TokenManifest:
    """Hash every file and compare with the manifest. All that differ are named."""
    home = Path(folder)
    manifest = read(home)
    files = manifest.files()
    check_sizes(home, files)
    total, passed, wrong = sum(size for size, _ in files.values()), 0, []
    for name, (size, expected) in files.items():
        if sha256(home / name) != expected:
            wrong.append(name)
        passed += size
        progress(passed, total)
    if wrong:
        raise DataError("IG903", seen=f"{len(wrong)} of {len(files)} files: {', '.join(wrong[:10])}", path=folder)
    load_tokenizer(home, manifest.recipe.vocabulary)
    return manifest
