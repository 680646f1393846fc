"""Where a run's tokens come from: folders that were built before, built-in texts, or files of conversations.

What is not built yet is built into the run's own folder, by one process, before the ranks read it: token shards of a
built-in text in `data`, those of source number 0, 1, ... of task chat in `data/0`, `data/1`, ..., and the pairs of task
preference, or the prompts of task grpo, in `data`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

from isograd.data import Mixture, Source, build, builtin_chats, manifest, preferences
from isograd.data.preferences import Preferences
from isograd.errors import ConfigError
from isograd.train.config import Config
from isograd.train.sections import Text


def place(config: Config, number: int, text: Text) -> Path:
    """The folder of a source's token shards."""
    given, built = Path(text.path or ""), (manifest.NAME, "building.json")
    if text.path and (config.task != "chat" or any((given / name).exists() for name in built)):
        return given
    return config.folder / "data" / str(number) if config.task == "chat" else config.folder / "data"


def prepare(config: Config) -> None:
    """Build the data that is not there yet. One process does."""
    if config.data is None:
        return
    if config.pads_rows:
        (source,) = config.data.sources
        file = _file_of(config, source, builtin_chats.pairs if config.grpo is None else builtin_chats.conversations)
        answers = _answers(config)
        lines = preferences.conversations(file, answers == 3)
        lines = lines if config.grpo is None else preferences.answered(file, config.grpo.column)
        preferences.prepare(config.folder / "data", file, str(tokenizer(config)), lines, answers)
        return
    for number, text in enumerate(config.data.sources):
        to = place(config, number, text)
        if text.path and to == Path(text.path):
            continue
        if config.task == "chat":
            made = _file_of(config, text, builtin_chats.conversations)
            build(to, [made], tokenizer=str(tokenizer(config)), validation=config.data.held_out, chat=True)
        elif not (to / manifest.NAME).exists():
            files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
            build(to, files, validation=config.data.held_out)


def _file_of(config: Config, text: Text, make: Callable[[Path, str], Path]) -> Path:
    """The file of a source, which is made of a built-in one."""
    return make(config.folder / f"{text.builtin}.jsonl", text.builtin) if text.builtin else Path(str(text.path))


def tokenizer(config: Config) -> Path:
    """The folder with the tokenizer and the chat template of tasks chat and preference."""
    assert config.data is not None
    named = config.data.tokenizer or config.model.path
    if named is None and any(text.builtin for text in config.data.sources):
        return builtin_chats.tokenizer(config.folder / "tokenizer")
    if named is None:
        raise ConfigError(
            "IG642", "conversations need a tokenizer with a chat template", expected="a Hugging Face folder",
            seen="neither data.tokenizer nor model.path", fix="--data.tokenizer FOLDER, or --model.path FOLDER",
        )  # fmt: skip
    return Path(named)


def _answers(config: Config) -> int:
    """How many a line of the file has: of grpo the right one, of KTO those of a pair and a stranger."""
    if config.grpo is not None:
        return 1
    return 3 if config.preference is not None and config.preference.loss == "kto" else 2


def pairs(config: Config) -> Preferences:
    """The pairs of task preference, and the prompts of task grpo, which `prepare` has built."""
    assert config.data is not None
    each = 1 if config.grpo is None else config.grpo.answers
    return Preferences(
        config.folder / "data", length=config.data.length, batch=config.batch // each, seed=config.data.seed,
        held_out=config.data.held_out, answers=_answers(config),
    )  # fmt: skip


def wants_evaluation(config: Config) -> bool:
    """Whether a run in which nothing is held out lacks what it asked for: evaluations, or a share that is held out."""
    if config.evaluate.every is not None:
        return True
    if config.pairs is not None:
        return config.pairs.held_out > 0
    assert config.data is not None
    if config.pads_rows:
        return config.data.held_out > 0
    if config.task != "chat":  # what is held out was said when the folder was built, perhaps by somebody else
        return True
    folders = [place(config, number, text) for number, text in enumerate(config.data.sources)]
    return any(manifest.read(folder).recipe.validation > 0 for folder in folders)


def ignored_share(config: Config) -> str:
    """That data.held_out does not count for folders that were built before, in words; empty: it does, or is not set."""
    data = config.data
    assert data is not None
    shares = {to: manifest.read(to).recipe.validation for to in (place(config, *s) for s in enumerate(data.sources))}
    unlike = [f"{to} with --validation {share:g}" for to, share in shares.items() if share != data.held_out]
    if data.held_out == type(data).model_fields["held_out"].default or not unlike:
        return ""
    return f"data.held_out {data.held_out:g} does not count: isograd data build made {', '.join(unlike)}"


def trained(config: Config) -> Mixture | Preferences:
    """What a run trains on."""
    if config.pads_rows:
        return pairs(config)
    found = mixture(config, "train")
    assert found is not None
    return found


def mixture(config: Config, split: str) -> Mixture | None:
    """None where nothing is held out."""
    data = config.data
    assert data is not None
    sources = [Source(place(config, number, text), text.weight) for number, text in enumerate(data.sources)]
    if split == "validation":
        sources = [source for source in sources if manifest.read(Path(source.path)).of(split)]
        if not sources:
            return None
    return Mixture(
        sources, length=data.length, batch=config.batch, seed=data.seed, split=split, packing=config.packing,
        repeat=split == "train",
    )  # fmt: skip


def is_ready(config: Config) -> bool:
    """Whether nothing is to be built when the run starts."""
    assert config.data is not None
    if config.pads_rows:
        return (config.folder / "data" / preferences.BUILT / manifest.NAME).exists()
    given = [text for text in config.data.sources if text.path and config.task != "chat"]
    made = [place(config, number, text) for number, text in enumerate(config.data.sources) if text not in given]
    return all((folder / manifest.NAME).exists() for folder in made)
