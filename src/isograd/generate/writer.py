"""A model and its tokenizer, from wherever they lie, and the tokens that the model writes.

A run or a checkpoint becomes a Hugging Face folder of this process (hf/export.py). So there is one way to write: a
model of transformers on one device, with transformers' own cache of keys and values. Several prompts are the rows of a
batch (rows.py); each row has its own positions, draws and end, so an answer is the one that it has alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isograd.core.mesh import Mesh
from isograd.errors import CheckpointError, ConfigError, IsogradError
from isograd.generate.rows import drawn_rows, write_rows
from isograd.generate.sampling import Sampling
from isograd.generate.text_stream import TextStream
from isograd.hf.training_rows import LibraryFollowing

TOKENIZER = "tokenizer.json"
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Writer:
    """A model that writes after a prompt."""

    model: Any  # of transformers
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # the tokens with which it ends by itself
    chat: Callable[[Messages], list[int]] | None  # messages to the prompt of an answer

    def prompt_of(self, given: str | Messages) -> list[int]:
        """The tokens of a text, or of messages by the chat template."""
        if isinstance(given, str):
            return self.encode(given)
        if self.chat is None:
            raise ConfigError("IG647", seen="messages, and a tokenizer without a chat template")
        return self.chat(given)

    @property
    def room(self) -> int:
        """How many tokens the model has positions for, the prompt's included."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1 << 31)

    def tokens(self, prompt: Sequence[int], how: Sampling, sample: int = 0) -> Iterator[int]:
        """What follows the prompt, until the model ends, or `max_new_tokens`. `sample`: another number, other draws."""
        rows = self.rows([prompt], how, [sample])
        return (token for (token,) in rows if token is not None and token not in self.ends)

    def rows(
        self, prompts: Sequence[Sequence[int]], how: Sampling, samples: Sequence[int]
    ) -> Iterator[list[int | None]]:
        """The same of several prompts, with the tokens that end them: at each place a token of each, or None."""
        for prompt in prompts:
            if not prompt or len(prompt) >= self.room:
                raise ConfigError("IG648", seen=f"{len(prompt)} tokens", room=self.room)
        mesh = Mesh.unbound("dp1")
        mesh.device = self.model.device
        return drawn_rows(partial(LibraryFollowing, self.model), prompts, self.ends, how, samples, self.room, mesh)

    def write(self, given: str | Messages, how: Sampling, sample: int = 0) -> Iterator[str]:
        """The same as pieces of text, as soon as each is complete: a character may have several tokens."""
        text = TextStream(self.decode)
        for token in self.tokens(self.prompt_of(given), how, sample):
            if piece := text.add(token):
                yield piece
        if rest := text.rest():
            yield rest

    def write_all(self, given: Sequence[str | Messages], how: Sampling, samples: Sequence[int]) -> list[str]:
        """The texts of several prompts, made together."""
        prompts = [self.prompt_of(one) for one in given]
        written = write_rows(prompts, self.rows(prompts, how, samples))
        return [self.decode([token for token in tokens if token not in self.ends]) for tokens in written]

    def fitted(self, messages: Messages, how: Sampling) -> Messages:
        """The messages without the oldest turns, as far as the answer needs room; a system message stays.

        A turn is a message of the user with all that follows it. An answer has a quarter of the model's positions, or
        `max_new_tokens` if that is less. The last turn stays, and is refused (IG648) if it leaves no room at all.
        """
        first = 1 if messages and messages[0]["role"] == "system" else 0
        turns = [first, *(n for n in range(first + 1, len(messages)) if messages[n]["role"] == "user")]
        for turn in turns:
            fitting = [*messages[:first], *messages[turn:]]
            size = len(self.prompt_of(fitting))
            if size + min(how.max_new_tokens, self.room // 4) <= self.room:
                return fitting
        if not 0 < size < self.room:
            raise ConfigError("IG648", seen=f"{size} tokens", room=self.room)
        return fitting


def open_writer(place: str | Path, *, tokenizer: str | None = None, device: str | None = None) -> Writer:
    """place: a run's folder, a checkpoint, or a Hugging Face folder. tokenizer: 'bytes', or a folder that has one; left
    out, what the run was trained with. device: left out, a card if there is one."""
    from transformers import AutoModelForCausalLM

    with hugging_folder(place, tokenizer) as (folder, found):  # the model's memory stays mapped
        words = words_of(found)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
        )
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    ends = getattr(model.generation_config, "eos_token_id", None)
    known = set(words["ends"]) | set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return Writer(model, words["encode"], words["decode"], frozenset(known), words["chat"])


@contextmanager
def hugging_folder(place: str | Path, tokenizer: str | None) -> Iterator[tuple[Path, str]]:
    """A Hugging Face folder of a place, and its tokenizer: 'bytes' or a folder. A checkpoint's lasts while inside."""
    from isograd.io import hub, tempdir
    from isograd.io.untrusted import CONFIG, read_json

    found, place = tokenizer_of(place, tokenizer), Path(hub.local(str(place)))
    words_of(found)
    if (place / "config.json").is_file():
        _refuse_scores(dict(read_json(place / "config.json", CONFIG, nan=True, follow=True)), place)
        yield place, found
        return
    with tempfile.TemporaryDirectory(dir=tempdir.home()) as home:
        yield _converted(place, Path(home, "model"), found if Path(found, TOKENIZER).is_file() else None), found


def _converted(place: Path, folder: Path, tokenizer: str | None) -> Path:
    """A checkpoint as a folder. A run under way may prune the newest while it is read: then a newer one is there."""
    from isograd.checkpoint.read import open_whole
    from isograd.hf.export import convert

    while True:
        checkpoint = _checkpoint_of(place)
        try:
            _refuse_scores((open_whole(checkpoint).manifest.model or {}).get("config") or {}, place)
            return convert(checkpoint, folder, tokenizer=tokenizer)
        except (IsogradError, OSError):
            if checkpoint == place or checkpoint.exists():
                raise


def _refuse_scores(config: Mapping[str, Any], place: Path) -> None:
    """Raise IG645 for a reward model."""
    named = str((config.get("architectures") or [""])[0])
    if config.get("score") or named.endswith("ForSequenceClassification"):
        raise ConfigError(
            "IG645", seen=f"a model that scores texts, and writes none: {named or 'a reward model'}", place=place,
            expected="a model that predicts the next token",
            fix="isograd ckpt convert, then transformers' AutoModelForSequenceClassification",
        )  # fmt: skip


def tokenizer_of(place: str | Path, tokenizer: str | None) -> str:
    """The one that is named; else that of a Hugging Face folder, or what the run of a checkpoint was trained with, by
    the config.yaml in its folder."""
    from isograd.io import hub

    place = Path(hub.local(str(place)))
    if tokenizer or (place / "config.json").is_file():
        return tokenizer or str(place)
    checkpoint = _checkpoint_of(place)
    run, config = _run_of(checkpoint), config_beside(checkpoint)
    if run is None or config is None:
        raise ConfigError("IG646", seen=f"no config.yaml of a run beside {checkpoint}")
    return tokenizer_in(run, config)


def words_of(tokenizer: str) -> dict[str, Any]:
    """What a tokenizer does, as functions: that of bytes, or of a folder."""
    if tokenizer == "bytes":
        from isograd.data.tokenizer import BYTES_END, find_tokenizer

        found = find_tokenizer("bytes")
        return {
            "encode": lambda text: [int(i) for i in found.encode([text])[0]], "decode": found.decode,
            "ends": [BYTES_END], "chat": None,
        }  # fmt: skip
    from transformers import AutoTokenizer

    if not Path(tokenizer, TOKENIZER).is_file():
        raise ConfigError("IG646", seen=f"no {TOKENIZER} in {tokenizer}")
    theirs = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)

    def chat(messages: Messages) -> list[int]:
        text = theirs.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        return list(theirs(text, add_special_tokens=False).input_ids)

    return {
        "encode": lambda text: list(theirs(text).input_ids),
        "decode": lambda ids: theirs.decode(ids, skip_special_tokens=True),
        "ends": [] if theirs.eos_token_id is None else [theirs.eos_token_id],
        "chat": chat if theirs.chat_template else None,
    }


def config_beside(place: Path) -> dict[str, Any] | None:
    """The config.yaml of the run that a place is, or whose checkpoint it is."""
    from isograd.io.untrusted import CONFIG, read_text
    from isograd.io.yaml_reader import parse

    run = _run_of(place)
    return None if run is None else parse(read_text(run / "config.yaml", CONFIG))


def _run_of(place: Path) -> Path | None:
    return next((up for up in (place, *place.absolute().parents[:2]) if (up / "config.yaml").is_file()), None)


def _checkpoint_of(place: Path) -> Path:
    from isograd.checkpoint.folder import one_of

    if not place.is_dir():
        raise ConfigError(
            "IG645", seen="no such folder", place=place, fix="give the folder that the run's config names as 'run'"
        )
    if (place / "adapter_config.json").is_file():
        fix = "isograd ckpt convert RUN OUT --tokenizer DIR, without --adapters: the merged model"
        raise ConfigError("IG645", seen="adapters without their model", place=place, fix=fix)
    try:
        found: Path = one_of(place)
    except CheckpointError as error:
        if (place / "config.yaml").is_file():
            error.fix = "wait for the run's first checkpoint (checkpoint.every), or end it by Ctrl-C, which saves"
        raise
    return found


def tokenizer_in(run: Path, config: Mapping[str, Any]) -> str:
    """The tokenizer of a run with this config: 'bytes' or a folder."""
    from isograd.data.manifest import read

    data, model = config.get("data") or {}, config.get("model") or {}
    sources = [source.get("path") for source in data.get("sources") or [] if isinstance(source, dict)]
    folders = [
        str(run / "data"),
        str(run / "tokenizer"),
        *filter(None, [data.get("tokenizer"), *sources, model.get("path")]),
    ]
    for folder in folders:
        if Path(folder, TOKENIZER).is_file():
            return str(folder)
        if Path(folder, "manifest.json").is_file() and read(Path(folder)).recipe.vocabulary.sha256 is None:
            return "bytes"
    raise ConfigError("IG646", seen=f"none in {folders}")
