"""isograd generate and isograd chat: the command line."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isograd.cli.subcommands import CommandParser, number
from isograd.io import terminal

if TYPE_CHECKING:
    from isograd.generate import Sampling, Writer

JOURNAL, POINTS = "metrics.jsonl", 500
PLACE = "a run, a checkpoint, or a Hugging Face folder"
POSITIVE = number(1, 10**9)


def generate(words: list[str]) -> int:
    """`isograd generate`: the exit code."""
    parser = CommandParser(prog="isograd generate", description="What a model writes after a prompt.")
    parser.add_argument("place", metavar="PLACE", help=PLACE)
    parser.add_argument("prompt", nargs="?", help="a text; '-' reads it from the input")
    parser.add_argument(
        "--prompts", metavar="FILE", help="a file of prompts or conversations, .jsonl, .json or .parquet"
    )
    parser.add_argument("--json", action="store_true", help="write a line of JSON for each sample")
    parser.add_argument("--samples", type=POSITIVE, default=1, help="of each prompt (default 1)")
    parser.add_argument("--batch", type=POSITIVE, default=8, metavar="N", help="samples made together (default 8)")
    _shared_options(parser)
    options = parser.parse_args(words)
    if (options.prompt is None) == (options.prompts is None):
        parser.error("give a prompt, or --prompts FILE")
    writer, how = _opened(options)
    prompts = list(_prompts(options))
    asked = [(given, sample) for given in prompts for sample in range(options.samples)]
    if len(asked) == 1 and not options.json:
        wrote = False
        for piece in writer.write(prompts[0][1], how):
            wrote = True
            print(terminal.plain(piece), end="", flush=True)
        print()
        if not wrote and writer.chat is not None and isinstance(prompts[0][1], str):
            said = "generate: the model ended the text at once. To ask it as in a conversation:"
            print(f"{said} isograd chat {options.place}, or --prompts with messages", file=sys.stderr)
        return 0
    for first in range(0, len(asked), options.batch):
        batch = asked[first : first + options.batch]
        texts = writer.write_all([said for (_, said), _ in batch], how, range(first, first + len(batch)))
        for ((given, _), sample), text in zip(batch, texts, strict=True):
            row = {**given, "sample": sample, "text": text}
            print(json.dumps(row, default=str) if options.json else terminal.plain(text), flush=True)
    return 0


def chat(words: list[str]) -> int:
    """`isograd chat`: the exit code."""
    parser = CommandParser(
        prog="isograd chat",
        description="A conversation with a model. Ctrl-C ends an answer, Ctrl-D the conversation.",
    )  # fmt: skip
    parser.add_argument("place", metavar="PLACE", help=PLACE)
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    parser.add_argument(
        "--web", action="store_true", help="a page in the browser of this computer, with the loss curve"
    )
    parser.add_argument("--port", type=number(0, 65_535), default=0, help="of the page (default: a free one)")
    _shared_options(parser)
    options = parser.parse_args(words)
    writer, how = _opened(options)
    if writer.chat is None:
        from isograd.errors import ConfigError

        raise ConfigError("IG647", seen=f"the tokenizer of {options.place}")
    if options.web:
        return _serve(writer, how, options)
    _talk(writer, how, [{"role": "system", "content": options.system}] if options.system else [])
    return 0


def _serve(writer: Writer, how: Sampling, options: argparse.Namespace) -> int:
    from isograd.errors import ConfigError
    from isograd.generate.web import ChatServer

    try:
        server = ChatServer(writer, how, lambda: _loss(Path(options.place)), options.system, options.port)
    except OSError as error:
        raise ConfigError("IG644", seen=error.strerror, port=options.port) from error
    print(f"open {server.address}\nfor this computer alone; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def _loss(place: Path) -> dict[str, list[tuple[int, float]]]:
    """The curve of the run that a place is, or lies in; at most some hundred points of it."""
    from isograd.train.journal import curve

    folders = (place, *place.absolute().parents[:2])  # a run, its checkpoints, one of them
    found = curve(next((up / JOURNAL for up in folders if (up / JOURNAL).is_file()), place / JOURNAL))
    both = {"training": found.training, "held_out": found.held_out}
    return {name: [*points[:: 1 + len(points) // POINTS], *points[-1:]] for name, points in both.items()}


def _talk(writer: Writer, how: Sampling, messages: list[Any]) -> None:
    """A conversation on the terminal, until its input ends."""
    from isograd.errors import ConfigError

    told, asks = False, sys.stdin.isatty()
    for turn in itertools.count():
        try:
            said = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            print("\n" if asks else "", end="")
            return
        if not said.strip():
            continue
        asked = [*messages, {"role": "user", "content": said}]
        try:
            fitting = list(writer.fitted(asked, how))
        except ConfigError as error:
            if error.code != "IG648":
                raise
            print(error, file=sys.stderr)  # the message is forgotten, the conversation goes on
            continue
        if len(fitting) < len(asked) and not told:
            told = True
            print(f"chat: the model has {writer.room:,} positions: its oldest turns are left out now", file=sys.stderr)
        answer = ""
        try:
            for piece in writer.write(fitting, how, turn):
                answer += piece
                print(terminal.plain(piece), end="", flush=True)
        except KeyboardInterrupt:
            pass
        print()
        messages = [*fitting, {"role": "assistant", "content": answer}]


def _shared_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=POSITIVE, default=256, help="of an answer (default 256)")
    parser.add_argument(
        "--temperature", type=number(0, 100, float), default=0.8, help="0: the most likely (default 0.8)"
    )
    parser.add_argument("--top-k", type=POSITIVE, default=0, help="of so many tokens only")
    parser.add_argument(
        "--top-p", type=number(0, 1, float), default=1.0, help="of tokens that have this share together"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same text (default 0)")
    parser.add_argument("--tokenizer", metavar="DIR", help="with a tokenizer.json; or 'bytes' (default: the run's)")
    parser.add_argument("--device", help="such as cuda:1 (default: a card if there is one)")


def _opened(options: argparse.Namespace) -> tuple[Writer, Sampling]:
    from transformers.utils import logging

    from isograd.generate import Sampling, open_writer

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    how = Sampling(options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.seed)
    return open_writer(options.place, tokenizer=options.tokenizer, device=options.device), how


def _prompts(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any]]:
    """(the line of the file, the text or the messages that it asks) of each prompt."""
    if options.prompts is None:
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        yield {"prompt": text}, text
        return
    from isograd.data.texts import values
    from isograd.errors import DataError

    path = Path(options.prompts)
    if not (lines := list(values(path))):
        raise DataError("IG911", seen="no prompt", fix='write a line for each: {"prompt": "a text"}', path=path)
    yield from [(given, _asked(given, path, n)) for n, given in lines]  # all are read before one is answered


def _asked(given: Any, path: Path, number: int) -> Any:
    """A text; or messages, without the answer that ends the conversation."""
    from isograd.data.chats import conversation
    from isograd.errors import ChatError, ConfigError

    prompt = given.get("prompt") if isinstance(given, dict) else None
    if isinstance(prompt, str) and given.get("messages") is None:
        return prompt
    messages, tools, seen = list[Any](), None, json.dumps(given, ensure_ascii=False, default=str)
    if prompt is None:
        try:
            messages, tools = conversation(seen)
        except ChatError as error:
            seen = str(error.seen)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or tools or not all(isinstance(message.get("content"), str) for message in messages):
        raise ConfigError("IG649", seen=terminal.plain(seen[:200]), path=path, line=number)
    return messages
