"""A byte-level BPE tokenizer, trained by the tokenizers package: `isograd data tokenizer`.

The folder has the template of built-in chats, so it serves `data build` with --chat and without. Text is split before
merges as by GPT-2, no token spans two words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from isograd.data import builtin_chats
from isograd.data.building import SHARD
from isograd.data.chats import conversation
from isograd.data.manifest import Documents, Recipe, left_out_text
from isograd.data.texts import cut, find_inputs, read
from isograd.data.tokenizer import find_tokenizer, if_no_tokenizers
from isograd.errors import ChatError, DataError

SPECIAL = [builtin_chats.END, builtin_chats.START, builtin_chats.STOP]


def train_tokenizer(
    out: str | Path,
    inputs: Sequence[str | Path],
    *,
    vocabulary: int = 32_000,
    documents: Documents = "file",
    text_key: str = "text",
    chat: bool = False,
) -> tuple[int, str]:
    """Writes a new folder; (the size of the vocabulary, which is smaller than asked for where the text has no more
    merges; the lines that are no conversation and were passed over, in words). The same inputs give the same one."""
    with if_no_tokenizers(out, "pip install 'isograd[hf]'"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    folder, least = Path(out), 256 + len(SPECIAL)
    if vocabulary < least:
        raise DataError("IG924", seen=f"a vocabulary of {vocabulary}", expected=f"at least {least}: bytes and special")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            "IG916",
            seen=sorted(p.name for p in folder.iterdir())[:10] if folder.is_dir() else "a file",
            fix="choose a new folder",
            folder=folder,
        )
    found = find_inputs([str(path) for path in inputs], folder, chat)
    text = find_tokenizer("bytes").vocabulary
    recipe = Recipe(text, documents, text_key, 0.0, SHARD, found, "text", "0" * 64 if chat else None)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    left_out = Counter[str]()
    texts = _texts(recipe, chat, left_out)
    if (first := next(texts, None)) is None:
        fix = 'give inputs that hold conversations, such as {"messages": [...]} in each line' if chat else None
        raise DataError("IG923", seen=left_out_text(left_out) or "no text", fix=fix or "give inputs that hold text")
    made.train_from_iterator(chain([first], texts), trainer)
    builtin_chats.save_tokenizer(folder, made.to_str(pretty=True), builtin_chats.END)
    return int(made.get_vocab_size()), left_out_text(left_out)


def _texts(recipe: Recipe, chat: bool, left_out: Counter[str]) -> Iterator[str]:
    """Those with something in them. left_out: counts the lines that are no conversation, by reason."""
    for part in (part for shard in cut(recipe) for part in shard):
        for text in read(recipe, part):
            try:
                contents = [one.get("content") for one in conversation(text)[0]] if chat else [text]
            except ChatError as error:
                left_out[str(error.reason)] += 1
                continue
            for content in filter(None, contents):
                yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
