"""Shards made by several processes, each of which makes one shard after another.

A worker holds nothing but its end of a pipe: when the process that builds is killed, the pipe closes and the worker
ends after the shard it is at. A worker that dies, for want of memory for example, is an error that says so.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Generator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from isograd.data.chats import tokenizer_in_worker
from isograd.data.manifest import Recipe
from isograd.data.shards import ShardRecord, make
from isograd.data.texts import InputPart
from isograd.data.tokenizer import Tokenizer
from isograd.errors import DataError

Job = tuple[int, list[InputPart]]


def work(
    folder: Path, jobs: list[Job], recipe: Recipe, tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Job, ShardRecord]]:
    """Records in the order in which their shards are done."""
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            yield job, make(folder, *job, recipe, tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    busy: dict[Connection, Job] = {}
    started = []
    try:
        for _ in range(min(workers, len(jobs))):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, folder, recipe, tokenizer.json, tokenizer.folder), daemon=True
            )
            process.start()
            theirs.close()  # so that its end closes when the worker ends
            started.append((process, ours))
            busy[ours] = waiting.pop()
            ours.send(busy[ours])
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                yield busy.pop(ready), _answer(ready)
                if waiting:
                    busy[ready] = waiting.pop()
                    ready.send(busy[ready])
    finally:
        for process, ours in started:
            ours.close()
            process.terminate()
            process.join()


def _answer(ready: Connection) -> ShardRecord:
    try:
        answer = ready.recv()
    except (EOFError, ConnectionError) as error:
        raise DataError(
            "IG921",
            "a worker ended in the middle of a shard",
            seen="a signal from outside, or no memory left",
            fix="the same command resumes where it was; fewer --workers or smaller documents need less memory",
        ) from error
    if isinstance(answer, DataError):
        raise answer
    assert isinstance(answer, ShardRecord)
    return answer


def _serve(pipe: Connection, folder: Path, recipe: Recipe, tokenizer: str | None, chats: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one core; there are as many as were asked for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells every process; the one that builds decides
    tools = tokenizer_in_worker(tokenizer, recipe.vocabulary, recipe.special_tokens, chats)
    with suppress(EOFError, ConnectionError):
        while True:
            number, parts = pipe.recv()
            try:
                answer: ShardRecord | DataError = make(folder, number, parts, recipe, tools)
            except DataError as error:
                answer = error
            except Exception as error:
                answer = DataError(
                    "IG921", "a worker failed", seen=repr(error), fix="please report it", where=traceback.format_exc()
                )
            pipe.send(answer)
