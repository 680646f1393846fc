"""One rank of a World: joins the group, then does what it is sent until told to stop.

Imported before forking, so torch is loaded once for all ranks. Functions, arguments and results cross pipes between a
parent and its own children as pickled bytes, tensors by value; pickle touches no file.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from isograd.comm import world
from isograd.comm.consensus import spell, spelled_out
from isograd.comm.device import Asked
from isograd.comm.world import process_group_of, set_collective_timeout
from isograd.errors import IsogradError

LAST = 10.0  # seconds that a rank without a parent has for its last words
RAISED_AT = "raised_at"  # on an error: when it was raised, for a rank that has closed its connections since then
# Terminals and schedulers send these to every process of a group, at any moment.
GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Seat:
    """Where a rank sits: everything it needs to join its world."""

    rank: int
    nproc: int
    directory: str
    threads: int
    patience: float = 0.0  # seconds that collectives wait for a silent rank, when longer than usual
    deaf: tuple[int, ...] = ()  # signals that do nothing here: the parent takes them for all ranks
    device: Asked = None  # "cpu": on purpose; None: a card, where the machine has any
    alive: int | None = None  # in forked ranks: the parent's end of the watch pipe, to be closed here


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: a value, or the traceback of its error."""

    ok: bool
    payload: bytes | str  # pickled value, or a traceback
    when: float  # by `time.monotonic`: all processes of a machine read one clock
    error: IsogradError | None = None  # one of isograd's, in words
    has_left: bool = False  # its world: the rank can run nothing more

    @property
    def value(self) -> Any:
        """What the caller's function returned on one of our own children, which has pickled it."""
        assert isinstance(self.payload, bytes)
        return pickle.loads(self.payload)


def stack_file(directory: str, rank: int) -> str:
    """Where a rank writes its stack when it is asked to."""
    return os.path.join(directory, f"stack.{rank}")


def main(seat: Seat, jobs: Connection, watch: Connection, first: Any) -> None:
    """The life of one rank: join the world, run `first` and then each job that arrives."""
    if seat.alive is not None:
        os.close(seat.alive)
    watcher = threading.Thread(target=_die_with_parent, args=(watch,), daemon=True)
    watcher.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it stops all ranks
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Not SIG_IGN, which the programs that a rank starts would inherit.
        signal.signal(number, (lambda *_: None) if number in seat.deaf else signal.SIG_DFL)
    stacks = open(stack_file(seat.directory, seat.rank), "w")  # noqa: SIM115  (open as long as the rank lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP)  # the fork server has them blocked
    torch.set_num_threads(seat.threads)
    try:
        sit(seat)
    except Exception as error:
        jobs.send(_failed(error))
        first = None  # the caller ends this process
    job = first if first is not None else _next(jobs, watcher)
    while job is not None:
        answer = _do(job)
        jobs.send(replace(answer, has_left=seat.nproc > 1 and process_group_of() is None))
        job = _next(jobs, watcher)
    world.leave()
    # Not sys.exit: gloo's threads abort an interpreter that unwinds under them.
    os._exit(0)


def sit(seat: Seat) -> None:
    """Take a seat: tell this process which rank it is, and join the world."""
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.nproc),
        LOCAL_WORLD_SIZE=str(seat.nproc),
        OMP_NUM_THREADS=str(seat.threads),
    )
    # For `ps -e`, `pkill -x`, and the kernel's log, which says whom it killed for want of memory. Linux alone has it.
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(f"isograd r{seat.rank}")
    world.process.left.clear()  # this seat is in no world that a failure has ended
    if seat.nproc > 1:
        set_collective_timeout(seat.patience)
        world.join(seat.rank, seat.nproc, seat.directory, seat.device)


def _next(jobs: Connection, watcher: threading.Thread) -> Any:
    try:
        data = jobs.recv_bytes()
        return pickle.loads(data) if data else None
    except (EOFError, ConnectionResetError):  # whoever started this rank is gone
        watcher.join(LAST)  # it sees that too, and ends this process with its last words
        return None


def _do(job: Any) -> Answer:
    try:
        function, arguments = pickle.loads(job) if isinstance(job, bytes) else job
        value = function(*arguments)
    except BaseException as error:
        return _failed(error)
    try:
        return Answer(True, pickle.dumps(value), time.monotonic())
    except Exception as error:
        text = f"the value that the function returned cannot be sent to the parent: {error!r} (type {type(value)})"
        return Answer(False, text, time.monotonic())


def _failed(error: BaseException) -> Answer:
    """In the handler of an error: the answer that tells of it."""
    spelled = spelled_out(spell(error), IsogradError) if isinstance(error, IsogradError) else None
    return Answer(False, traceback.format_exc(), float(vars(error).get(RAISED_AT) or time.monotonic()), spelled)


def when_orphaned(say: Callable[[], str] | None) -> None:
    """What this process says when its parent ends without having ended its ranks: killed, that is."""
    global _last_words  # noqa: PLW0603  (one for each process)
    _last_words = say


_last_words: Callable[[], str] | None = None


def _die_with_parent(watch: Connection) -> None:
    try:
        watch.recv_bytes()
    except (EOFError, OSError):
        with suppress(Exception):
            if _last_words is not None:
                os.write(2, f"{_last_words()}\n".encode())
        os._exit(1)
