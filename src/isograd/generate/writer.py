"""A model and its tokenizer, from wherever they lie, and the tokens that the model writes.

A run or a checkpoint becomes a Hugging Face folder of this process (hf/export.py). So there is one way to write: a
model of transformers on one device, with transformers' own cache of keys and values. Prompts are answered one after
another, so that an answer does not depend on its neighbours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isograd.core import rng
from isograd.errors import ConfigError
from isograd.generate.sampling import Sampling, draw

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Writer:
    """A model that writes after a prompt."""

    model: Any  # of transformers
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # the tokens with which it ends by itself
    chat: Callable[[Sequence[Mapping[str, Any]]], list[int]] | None  # messages to the prompt of an answer

    def prompt_of(self, given: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a text, or of messages by the chat template."""
        if isinstance(given, str):
            return self.encode(given)
        if self.chat is None:
            raise ConfigError("IG647", seen="messages, and a tokenizer without a chat template")
        return self.chat(given)

    @torch.no_grad()
    def tokens(self, prompt: Sequence[int], how: Sampling, sample: int = 0) -> Iterator[int]:
        """What follows the prompt, until the model ends, or `max_new_tokens`. `sample`: another number, other draws."""
        room = int(getattr(self.model.config, "max_position_embeddings", None) or 1 << 31)
        if not prompt or len(prompt) >= room:
            raise ConfigError("IG648", seen=f"{len(prompt)} tokens", room=room)
        key, ids, cache = rng.key(how.seed, "generate", sample), torch.tensor([list(prompt)]), None
        for place in range(min(how.max_new_tokens, room - len(prompt))):
            output = self.model(input_ids=ids.to(self.model.device), past_key_values=cache, use_cache=True)
            token, cache = draw(output.logits[0, -1], key, place, how), output.past_key_values
            if token in self.ends:
                return
            yield token
            ids = torch.tensor([[token]])

    def write(self, given: str | Sequence[Mapping[str, Any]], how: Sampling, sample: int = 0) -> Iterator[str]:
        """The same as pieces of text, as soon as each is complete: a character may have several tokens."""
        written, said = list[int](), ""
        for token in self.tokens(self.prompt_of(given), how, sample):
            written.append(token)
            text = self.decode(written)
            if not text.endswith("\ufffd") and text.startswith(said):
                yield text[len(said) :]
                said = text
        rest = self.decode(written)
        if rest != said:
            yield rest[len(said) :] if rest.startswith(said) else rest


def open_writer(place: str | Path, *, tokenizer: str | None = None, device: str | None = None) -> Writer:
    """place: a run's folder, a checkpoint, or a Hugging Face folder. tokenizer: 'bytes', or a folder that has one; left
    out, what the run was trained with. device: left out, a card if there is one."""
    from transformers import AutoModelForCausalLM

    from isograd.hf.export import convert
    from isograd.io import tempdir

    place = Path(place)
    checkpoint = None if (place / "config.json").is_file() else _checkpoint_of(place)
    found = tokenizer or (str(place) if checkpoint is None else _tokenizer_of_run(checkpoint))
    words = _bytes() if found == "bytes" else _of_folder(Path(found))
    with tempfile.TemporaryDirectory(dir=tempdir.home()) as home:  # the model's memory stays mapped
        copied = found if Path(found, TOKENIZER).is_file() else None
        folder = place if checkpoint is None else convert(checkpoint, Path(home, "model"), tokenizer=copied)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
        )
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    ends = getattr(model.generation_config, "eos_token_id", None)
    known = set(words["ends"]) | set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    return Writer(model, words["encode"], words["decode"], frozenset(known), words["chat"])


def _checkpoint_of(place: Path) -> Path:
    from isograd.checkpoint.folder import one_of

    if not place.is_dir():
        raise ConfigError("IG645", seen="no such folder", place=place)
    return one_of(place)


def _tokenizer_of_run(checkpoint: Path) -> str:
    """What the run of a checkpoint was trained with, by the config.yaml in its folder."""
    from isograd.data.manifest import read
    from isograd.io.untrusted import CONFIG, read_text
    from isograd.io.yaml_reader import parse

    run = next((up for up in (checkpoint.parent.parent, checkpoint.parent) if (up / "config.yaml").is_file()), None)
    if run is None:
        raise ConfigError("IG646", seen=f"no config.yaml of a run beside {checkpoint}")
    config = parse(read_text(run / "config.yaml", CONFIG))
    data, model = config.get("data") or {}, config.get("model") or {}
    sources = [source.get("path") for source in data.get("sources") or [] if isinstance(source, dict)]
    folders = [str(run / "data"), *filter(None, [data.get("tokenizer"), *sources, model.get("path")])]
    for folder in folders:
        if Path(folder, TOKENIZER).is_file():
            return str(folder)
        if Path(folder, "manifest.json").is_file() and read(Path(folder)).recipe.vocabulary.sha256 is None:
            return "bytes"
    raise ConfigError("IG646", seen=f"none in {folders}")


def _bytes() -> dict[str, Any]:
    from isograd.data.tokenizer import BYTES_END, find_tokenizer

    found = find_tokenizer("bytes")
    return {
        "encode": lambda text: [int(i) for i in found.encode([text])[0]], "decode": found.decode,
        "ends": [BYTES_END], "chat": None,
    }  # fmt: skip


def _of_folder(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    if not (folder / TOKENIZER).is_file():
        raise ConfigError("IG646", seen=f"no {TOKENIZER} in {folder}")
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)

    def chat(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = theirs.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        return list(theirs(text, add_special_tokens=False).input_ids)

    return {
        "encode": lambda text: list(theirs(text).input_ids),
        "decode": lambda ids: theirs.decode(ids, skip_special_tokens=True),
        "ends": [] if theirs.eos_token_id is None else [theirs.eos_token_id],
        "chat": chat if theirs.chat_template else None,
    }
