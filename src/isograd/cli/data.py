"""isograd data: the command line. Nothing but argparse is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isograd.cli.subcommands import Verb, number, run

EXAMPLES = """examples:
  isograd data build tokens/ books/                                 each file a document, tokens are bytes
  isograd data build tokens/ web.jsonl --tokenizer my_model/        a tokenizer.json; the text under "text"
  isograd data build tokens/ bible.txt --documents blank --validation 0.05
  isograd data build tokens/ chats.jsonl --tokenizer my_model/ --chat      {"messages": [...]}, by its chat template
  isograd data show tokens/ --length 64 --n 5
  isograd data show runs/chat/data/0                             of a run: chats in data/0, pairs of answers in data
  isograd data verify tokens/

A build that was stopped or killed resumes where it was when the same command is given again.
exit codes: 0 well, 2 wrong usage, inputs or folder, 1 a disk that fails or numbers that no build writes"""

COUNT, SHOWN, LONGEST = number(1, 1 << 40), number(1, 100), number(1, 1 << 20)  # samples of at most 800 MB are shown


def main(words: list[str]) -> int:
    """`isograd data`: run one of its commands; the exit code."""
    try:
        return run(words, "data", "Text as token shards that are read by number.", EXAMPLES, VERBS)
    except KeyboardInterrupt:
        print("data: stopped; the same command resumes where it was", file=sys.stderr)
        return 130


def _build_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", metavar="OUT", help="a new folder, or one whose build was stopped")
    add("inputs", metavar="INPUT", nargs="+", help="text files, .jsonl, .parquet, or folders of them")
    add("--tokenizer", default="bytes", help="'bytes' (default), a tokenizer.json, or a folder with one")
    _text_options(parser)
    add(
        "--validation",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of documents that are held out, chosen by a hash of their text (default 0.01)",
    )
    add("--end-of-document", default="auto", metavar="ID", help="a token id, 'none', or 'auto' (default)")
    add(
        "--special-tokens",
        default="refuse",
        choices=("refuse", "keep", "text"),
        help="text that spells a special token of the tokenizer: refuse it (default), keep it as the token's id "
        "(chats that a template has rendered), or encode it as ordinary text; of --chat 'text' says that what the "
        "template spells like a special token, and the tokenizer splits, is text",
    )
    add(
        "--chat",
        action="store_true",
        help='inputs are conversations, {"messages": [...], "tools": [...]}; the chat template in the folder '
        "--tokenizer renders them, and the assistant's tokens are the labels",
    )
    add(
        "--on-bad-lines",
        default="refuse",
        choices=("refuse", "skip"),
        help="of --chat, a line that is no conversation to learn from: refuse it (default), or skip it; how many were "
        "left out, and why, is printed and kept in the manifest",
    )
    add(
        "--shard-bytes",
        type=COUNT,
        metavar="N",
        help="bytes of text in a shard (default 16 MiB; more where that would give over 4096 shards)",
    )
    add(
        "--largest-document",
        type=COUNT,
        default=256,
        metavar="MIB",
        help="MiB of a document at most (default 256); reading one takes three times its size, and a tokenizer more",
    )
    add(
        "--workers",
        type=COUNT,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: one for each core); they do not change the result",
    )


def _text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--documents",
        default="file",
        choices=("file", "line", "blank"),
        help="a document in text is a file (default), a line, or what stands between blank lines",
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of JSON and parquet (default text)")


def _tokenizer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="a new folder")
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="text files, .jsonl, .parquet, or folders of them")
    parser.add_argument("--vocabulary", type=COUNT, default=32_000, metavar="N", help="tokens (default 32000)")
    parser.add_argument("--chat", action="store_true", help="inputs are conversations: their messages are the text")
    _text_options(parser)


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument(
        "--length", type=LONGEST, metavar="N",
        help="tokens of a sample (default 128; of conversations the longest, at most 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--packing", choices=("documents", "whole", "stream"),
        help="as data.packing of a run (default: whole for conversations, else documents)",
    )  # fmt: skip
    parser.add_argument("--n", type=SHOWN, default=3, metavar="N", help="how many samples (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of their order (default 0)")
    parser.add_argument("--split", default="train", choices=("train", "validation"))


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER")


def _build(options: argparse.Namespace) -> int:
    from isograd.data.building import build
    from isograd.data.manifest import SPLITS, left_out_text

    with _bar("build") as show:
        manifest = build(
            options.out, options.inputs, tokenizer=options.tokenizer, documents=options.documents,
            text_key=options.text_key, validation=options.validation, end_of_document=options.end_of_document,
            special_tokens=options.special_tokens, chat=options.chat, on_bad_lines=options.on_bad_lines,
            shard_bytes=options.shard_bytes,
            workers=options.workers, largest_document=options.largest_document << 20,
            progress=lambda done, total, tokens: show(done, total, f"{tokens:,} tokens"),
        )  # fmt: skip
    counts = {split: sum(shard.tokens for shard in manifest.of(split)) for split in SPLITS}
    print(f"{options.out}: {counts['train']:,} tokens to train on, {counts['validation']:,} for validation")
    if manifest.empty:
        print(f"left out: {manifest.empty:,} documents without text")
    if manifest.left_out:
        print(left_out_text(manifest.left_out, manifest.left_out_at))
    if manifest.as_text:
        print(manifest.as_text)
    if not counts["validation"] and options.validation:
        print(
            "data: no document was assigned to validation: a larger --validation, or smaller documents", file=sys.stderr
        )
    return 0


def _show(options: argparse.Namespace) -> int:
    from isograd.data.show import GREEN, LABELS, show

    marks = GREEN if sys.stdout.isatty() and "NO_COLOR" not in os.environ else LABELS
    print(show(options.folder, options.length, options.n, options.seed, options.split, options.packing, marks))
    return 0


def _tokenizer(options: argparse.Namespace) -> int:
    from isograd.data.tokenizer_training import train_tokenizer

    size, left_out = train_tokenizer(
        options.out, options.inputs, vocabulary=options.vocabulary, documents=options.documents,
        text_key=options.text_key, chat=options.chat,
    )  # fmt: skip
    print(f"{options.out}: a byte-level BPE tokenizer of {size:,} tokens, with a chat template")
    if left_out:
        print(left_out)
    inputs = " ".join(options.inputs) + (" --chat" if options.chat else "")
    print(f"next: isograd data build TOKENS {inputs} --tokenizer {options.out}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from isograd.data.show import verify

    with _bar("verify") as show:
        manifest = verify(options.folder, lambda done, total: show(done, total, ""))
    print(f"{options.folder}: {len(manifest.files())} files, all as they were built")
    return 0


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Progress: a bar on a terminal, elsewhere a line now and then."""
    if not sys.stderr.isatty():
        said = time.monotonic()

        def line(done: int, total: int, text: str) -> None:
            nonlocal said
            if time.monotonic() - said >= 10 or done == total:
                said, share = time.monotonic(), done / max(1, total)
                print(f"data {what}: {share:.0%} of {total:,} bytes  {text}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)


VERBS: dict[str, Verb] = {
    "build": ("make token shards of text, JSON lines and parquet", _build_options, _build),
    "show": ("print counts, and samples as training sees them, labels marked", _show_options, _show),
    "verify": ("hash every file of a folder and compare", _verify_options, _verify),
    "tokenizer": ("train a BPE tokenizer on text or conversations", _tokenizer_options, _tokenizer),
}
