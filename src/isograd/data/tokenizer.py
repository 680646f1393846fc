"""Text to numbers and back: the built-in tokenizer of bytes, or any tokenizer.json of the `tokenizers` package.

Bytes: ids 0 to 255 are the bytes of UTF-8, 256 ends a document. A tokenizer.json adds nothing of its own here: no
special tokens, no truncation, no padding. Text that spells a special token is encoded as ordinary text, so that no
document can forge the end of one; with "keep" it becomes the token's id, as rendered chats need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isograd.data.manifest import TOKENIZER, SpecialTokens, Vocabulary
from isograd.errors import DataError, if_not_installed
from isograd.io.untrusted import read_bytes, read_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Loaded

BYTES = "bytes"
BYTES_END = 256
LARGEST = 256 << 20  # bytes of a tokenizer.json
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
CONFIGURED = 16 << 20  # bytes of a tokenizer_config.json
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")  # asked in this order

Ids = NDArray[Any]


class ChatEncoder(Protocol):
    """A tokenizer of conversations (data/chats.py)."""

    markers: dict[str, int]  # of the template that are text: how many tokens each of them is

    def __call__(self, text: str) -> tuple[Ids, Ids]:
        """(tokens, which of them count) of a conversation."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, and what is known about the ids."""

    vocabulary: Vocabulary
    json: str | None  # the text of tokenizer.json; None for bytes
    encode: Callable[[list[str]], list[Ids]]
    decode: Callable[[Sequence[int]], str]
    special: re.Pattern[str] | None = None  # finds special tokens that a text spells; None: there are none
    chat: ChatEncoder | None = None
    folder: str = ""  # of the chat template


def load_tokenizer(folder: Path, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that was kept with the tokens in a folder."""
    if vocabulary.sha256 is None:
        return of_bytes(vocabulary)
    path = folder / TOKENIZER
    text = _text(path)
    if sha256(text.encode()).hexdigest() != vocabulary.sha256:
        raise DataError("IG903", seen="another sha256", expected=vocabulary.sha256, path=path)
    return of_json(text, vocabulary)


def find_tokenizer(name: str, end_of_document: str = "auto", special_tokens: SpecialTokens = "text") -> Tokenizer:
    """name: 'bytes', a tokenizer.json, or a folder that has one. end_of_document: 'auto', an id, or 'none'."""
    if name == BYTES:
        end = BYTES_END if end_of_document == "auto" else _end(end_of_document, BYTES_END + 1)
        return of_bytes(Vocabulary(BYTES, None, BYTES_END + 1, end))
    given = Path(name)
    path = given / TOKENIZER if given.is_dir() else given
    text = _text(path)
    loaded = load_json(text, path)
    ids = loaded.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=0) + 1
    if end_of_document == "auto":
        spelled = next((end for end in (*_configured(path), *ENDS) if end in ids), None)
        if spelled is None:
            raise _no_end(f"{path} names no token that ends a document", f"none of {', '.join(ENDS)}", size)
        end_of_document = str(ids[spelled])
    shown = given.name if given.is_dir() or given.name != TOKENIZER else given.resolve().parent.name
    vocabulary = Vocabulary(shown, sha256(text.encode()).hexdigest(), size, _end(end_of_document, size))
    return of_json(text, vocabulary, special_tokens)


def of_json(text: str, vocabulary: Vocabulary, special_tokens: SpecialTokens = "text") -> Tokenizer:
    """A tokenizer.json's text as a Tokenizer. Special tokens in a text become their ids with "keep" alone."""
    loaded = load_json(text, Path(TOKENIZER))
    loaded.encode_special_tokens = special_tokens != "keep"

    def encode(texts: list[str]) -> list[Ids]:
        with _tokenizer_errors(Path(vocabulary.name)):
            return [np.array(e.ids, np.uint32) for e in loaded.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(ids: Sequence[int]) -> str:
        return loaded.decode(list(ids), skip_special_tokens=False)

    return Tokenizer(vocabulary, text, encode, decode, special_pattern(loaded))


def special_pattern(loaded: Loaded) -> re.Pattern[str] | None:
    """Finds the special tokens that a text spells."""
    spellings = {token.content for token in loaded.get_added_tokens_decoder().values() if token.special}
    longest_first = sorted(spellings - {""}, key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def of_bytes(vocabulary: Vocabulary) -> Tokenizer:
    """The built-in tokenizer of bytes."""

    def encode(texts: list[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < BYTES_END).decode(errors="replace")

    return Tokenizer(vocabulary, None, encode, decode)


def load_json(text: str, path: Path) -> Loaded:
    """The tokenizer of a tokenizer.json, which adds, cuts and pads nothing."""
    with if_no_tokenizers(path, "pip install tokenizers, or use bytes"):
        from tokenizers import Tokenizer as Loaded
    with _tokenizer_errors(path):
        loaded = Loaded.from_str(text)
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def if_no_tokenizers(path: object, fix: str) -> AbstractContextManager[None]:
    """Around the import of the library of Hugging Face. path: for what it is needed."""
    seen = "it needs the tokenizers package: "
    return if_not_installed(lambda error: DataError("IG914", seen=f"{seen}{error}", fix=fix, path=path))


def files_beside(name: str) -> dict[str, bytes]:
    """The files of config and chat template beside a tokenizer.json, by name. name: as of `find_tokenizer`."""
    folder = Path(name) if Path(name).is_dir() else Path(name).parent
    with _tokenizer_errors(folder):
        there = [folder / file for file in BESIDE if (folder / file).is_file()]
        return {path.name: read_bytes(path, CONFIGURED, follow=True) for path in there}


def same_ids(folders: Sequence[Path]) -> bool:
    """Whether the tokenizer.json of two folders give words the same ids, but for tokens that one of them has added."""
    texts = [_text(folder / TOKENIZER) for folder in folders]
    if texts[0] == texts[1]:
        return True
    loaded = [load_json(text, folder / TOKENIZER) for text, folder in zip(texts, folders, strict=True)]
    one, other = (found.get_vocab(with_added_tokens=True) for found in loaded)
    added = {token.content for found in loaded for token in found.get_added_tokens_decoder().values()}
    return all(word in added and not (word in one and word in other) for word, _ in one.items() ^ other.items())


def end_of_text(folder: Path) -> int | None:
    """The token that a folder's tokenizer_config.json says texts end with, if both files can be read."""
    path = folder / "tokenizer.json"
    try:
        loaded = load_json(_text(path), path)
    except DataError:
        return None
    return next((found for name in _configured(path) if (found := loaded.token_to_id(name)) is not None), None)


@contextmanager
def _tokenizer_errors(path: Path) -> Iterator[None]:
    """Of files, and of the tokenizers package: plain Exceptions, and panics of Rust, which are no Exceptions."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError("IG914", seen=getattr(error, "brief", str(error)[:500]), path=path) from error
        raise


def _text(path: Path) -> str:
    with _tokenizer_errors(path):
        return read_text(path, LARGEST, follow=True)


def _configured(path: Path) -> list[str]:
    """The end that a tokenizer_config.json beside it names, if there is one."""
    beside = path.parent / "tokenizer_config.json"
    with _tokenizer_errors(beside):
        found = read_json(beside, CONFIGURED, nan=True, follow=True) if beside.exists() else None
    named = found.get("eos_token") if isinstance(found, dict) else None
    named = named.get("content") if isinstance(named, dict) else named
    return [named] if isinstance(named, str) else []


def _end(asked: str, size: int) -> int | None:
    if asked == "none":
        return None
    if not asked.isdecimal() or int(asked[:12]) >= size:
        raise _no_end(f"{asked!r} is no token that ends a document", asked, size)
    return int(asked)


def _no_end(what: str, seen: str, size: int) -> DataError:
    return DataError(
        "IG915", what, seen=seen, expected=f"an id from 0 to {size - 1}, or 'none'", fix="--end-of-document ID"
    )
