"""The launcher's side: processes that become the ranks of one world after another, while some of them die.

    attempt    a new world of `size` workers runs a function: their values, or who died
    ask        workers do something without a world

A worker that dies by a signal (killed, out of memory, a crash) is a death, which the run may survive. An exception that
a rank raised by itself, or a rank that left with an exit code, ends the run as everywhere else: it would come again.

The launcher sees a death at once, because it waits for the process itself. The others see it as broken connections:
each of them closes its own (worker.py), which ends the waits of the next ones. A worker that has not answered `wait_s`
seconds after the first sign is killed, and has died, too; so is one that stands still for `still_s` seconds between two
worlds. These are seconds in which the launcher was running. A process that waits for a disk may not end when it is
killed: it is left behind.

Workers meet in a directory of their own for each world: nothing of a world before can be mistaken for this one's. No
rank holds what the others need to meet, so any of them may die.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from isograd.comm.device import Asked
from isograd.elastic.progress import StallTimer, finished
from isograd.elastic.worker import in_world
from isograd.io import tempdir
from isograd.launcher.launch import (
    GRACE,
    UNKNOWN,
    dead_server,
    end_orphans,
    exit_words,
    failure,
    leave_behind,
    pickled,
    start_method,
    stop_all,
)
from isograd.launcher.worker import Answer, Seat, main

LOOK_S = 1.0  # between two looks for ranks that are silent
LEFT_S = 20.0  # after which a process that was killed is no longer waited for
NOTICE_S = 5.0  # the others may feel a death before the launcher is told of it, by a process that has to get its turn


@dataclass
class Worker:
    """A process of the pool, and the pipe to it."""

    process: Any
    pipe: Connection
    rank: int | None = None  # in the world before
    left: bool = False  # it was killed, and did not end

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code: int | None = self.process.exitcode
        return -signal.SIGKILL if code is None and self.left else code


@dataclass
class Attempt:
    """How a world's work ended."""

    values: list[Any] | None  # in rank order; None: somebody died
    dead: dict[int, int] = field(default_factory=dict)  # rank: exit code of its process
    late: list[int] = field(default_factory=list)  # of these, ranks that were killed because they did not answer
    silent: dict[int, str] = field(default_factory=dict)  # and those that the others waited for: what was known of each
    seen: float = 0.0  # when the launcher saw the first sign of it, by `time.monotonic`
    finished: int | None = None  # the most steps that a rank of it, dead or alive, says were done; None: not known
    server: int | None = None  # the process that starts ranks, when it was what died


class WorkerPool:
    """Processes on this machine. Those beyond the size of a world wait, and take the place of one that dies."""

    def __init__(self, *, threads: int = 1, patience: float = 0.0, deaf: Iterable[int] = (), wait_s: float = 20.0,
                 still_s: float = 600.0, busy: Callable[[], bool] = lambda: False,
                 silent: Callable[[int], Callable[[], dict[int, str]]] = lambda size: dict,
                 preload: Iterable[str] = (), device: Asked = None) -> None:  # fmt: skip
        """wait_s: how long after a death the others may take to notice, or longer while they are `busy`.

        still_s: how long a worker may take over what it is asked between two worlds, or longer while it is `busy`.

        silent: called when a world of this size begins, and gives what says, every second, which of its ranks the
        others wait for in vain. They are killed, and have died.

        preload: modules that new processes need, so that they have them from the beginning. The rest is as in
        `launch.World`.
        """
        self.busy, self.silent, self.still_s = busy, silent, still_s
        self.threads, self.patience, self.deaf, self.wait_s = threads, patience, tuple(deaf), wait_s
        self.device = device
        self.workers: list[Worker] = []
        self.worlds = self.started = 0  # how many worlds, how many processes
        self._preload = tuple(preload)
        self._context, self._forked = start_method(self._preload)
        self._root = tempfile.mkdtemp(prefix="workers-", dir=tempdir.home())
        self._watch, self._alive = self._context.Pipe(duplex=False)
        self._processes: list[Any] = []  # of the workers, like the pipes
        self._pipes: list[Connection] = []
        self._end = weakref.finalize(self, stop_all, self._processes, self._pipes, self._root, self._alive)

    def fill(self, size: int) -> int:
        """Start workers until there are `size`; how many were started."""
        missing = max(0, size - len(self.workers))
        if missing and not self._forked:
            start_method(self._preload)  # a new server, if the one before has died
        for _ in range(missing):
            alive = self._alive.fileno() if self._forked else None
            seat = Seat(self.started, 1, self._root, self.threads, deaf=self.deaf, alive=alive)
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=main, args=(seat, theirs, self._watch, None))
            process.start()
            theirs.close()
            self.started += 1
            self._processes.append(process)
            self._pipes.append(ours)
            self.workers.append(Worker(process, ours))
        return missing

    def attempt(self, size: int, fn: Callable[..., Any], *args: Any) -> Attempt:
        """fn(*args) on a new world of the first `size` workers. The dead leave the pool; the others keep their order.

        Raises as `World.run` does when a rank fails by itself.
        """
        shutil.rmtree(os.path.join(self._root, f"world-{self.worlds}"), ignore_errors=True)
        self.worlds += 1
        directory = os.path.join(self._root, f"world-{self.worlds}")
        os.mkdir(directory)
        ranks, says = self.workers[:size], self.silent(size)
        for rank, worker in enumerate(ranks):
            worker.rank = rank
            seat = Seat(rank, size, directory, self.threads, self.patience, device=self.device)
            with suppress(OSError):  # it has died: its exit code says so
                worker.pipe.send_bytes(pickled(in_world, (seat, fn, args)))
        silent: dict[int, str] = {}

        def look() -> Iterable[int]:
            silent.update(says())
            return silent

        answers, late, seen = self._collect(ranks, look)
        codes = [None if rank in answers else worker.code for rank, worker in enumerate(ranks)]
        done = finished(directory, size)
        if (server := dead_server(codes)) is not None:
            end_orphans(self._processes, self._pipes)
            self.remove_dead()
            return Attempt(None, dict.fromkeys(range(size), UNKNOWN), seen=seen, finished=done, server=server)
        dead = {rank: code for rank, code in enumerate(codes) if code is not None}
        failed = [answer for answer in answers.values() if not answer.ok]
        told = any(answer.error for answer in failed)
        if not dead and not failed:
            return Attempt([answers[rank].value for rank in range(size)])
        # A rank that raises one of isograd's errors by itself leaves, and gloo may abort those that wait for it.
        own = [rank for rank, code in dead.items() if code < 0 and not (told and code == -signal.SIGABRT)]
        if not own or any(code >= 0 for code in dead.values()):
            raise failure(answers, codes)
        self.remove_dead()
        return Attempt(None, dead, late, silent, seen, done)

    def ask(
        self, jobs: Mapping[int, tuple[Callable[..., Any], tuple[Any, ...]]]
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Each of these workers does its job, in no world: (the values of those that did not die of it, who died and
        how). One that stands still has died."""
        asked = {number: self.workers[number] for number in jobs}
        for number, worker in asked.items():
            with suppress(OSError):
                worker.pipe.send_bytes(pickled(*jobs[number]))
        answers, late, _ = self._collect(list(asked.values()), still_s=self.still_s)
        if any(not answer.ok for answer in answers.values()):
            raise failure(answers, [worker.code for worker in asked.values()])
        workers, died = list(asked.items()), dict[int, str]()
        for i, (number, worker) in enumerate(workers):
            if i not in answers:
                still = f", as it stood still for {self.still_s:g} s" if i in late else ""
                who = "a new process" if worker.rank is None else f"rank {worker.rank}"
                died[number] = f"{who}, {exit_words(worker.code)}{still}"
        return {workers[i][0]: answer.value for i, answer in answers.items()}, died

    def remove_dead(self) -> None:
        """Let those go that have died, with their pipes: a long run may have hundreds of deaths."""
        for worker in [worker for worker in self.workers if worker.code is not None]:
            self.workers.remove(worker)
            self._processes.remove(worker.process)
            self._pipes.remove(worker.pipe)
            worker.pipe.close()
            if worker.left:
                leave_behind(worker.process)
            else:
                worker.process.close()

    def _collect(
        self, ranks: list[Worker], silent: Callable[[], Iterable[int]] = tuple, still_s: float | None = None
    ) -> tuple[dict[int, Answer], list[int], float]:
        """(answers, who was killed because it gave none, when something was wrong): until every rank has answered or
        ended. `silent`: which ranks to kill although nothing is known to be wrong; `still_s`: kill those that have not
        answered when nothing was `busy` for so long."""
        answers: dict[int, Answer] = {}
        late: list[int] = []
        killed: dict[int, StallTimer] = {}
        seen, wrong, idle = 0.0, StallTimer(2 * LOOK_S), StallTimer(2 * LOOK_S)
        while waiting := [r for r in range(len(ranks)) if r not in answers and ranks[r].code is None]:
            sources: dict[Any, int] = {ranks[r].pipe: r for r in waiting}
            sources |= {ranks[r].process.sentinel: r for r in waiting}
            died, since = len(waiting) + len(answers) < len(ranks), wrong.look(bool(seen))
            stood = idle.look(time.monotonic() if (seen or still_s) and self.busy() else None)
            if seen and not died and not killed and since >= NOTICE_S and stood > 2 * LOOK_S:
                break
            if (died and since >= self.wait_s and stood > 2 * LOOK_S) or (still_s and stood >= still_s):
                late = late or waiting
            for rank in (set(late) if seen or late else set(silent())).intersection(waiting):
                ranks[rank].process.kill()
                if killed.setdefault(rank, StallTimer(2 * LOOK_S)).look() >= LEFT_S:
                    ranks[rank].left, seen = True, seen or time.monotonic()
            for source in wait(list(sources), LOOK_S):
                rank = sources[source]
                if rank not in answers and ranks[rank].pipe.poll():
                    with suppress(EOFError, OSError):  # a rank that dies closes its pipe
                        answers[rank] = ranks[rank].pipe.recv()
                if rank not in answers:
                    ranks[rank].process.join(GRACE)
                if not seen and not (rank in answers and answers[rank].ok):
                    seen = time.monotonic()
        return answers, late, seen or time.monotonic()  # a server that had died before has no moment of its own

    def close(self, kill: bool = False) -> None:
        """End all workers; `kill`: without asking them first."""
        for worker in self.workers if not kill else ():
            with suppress(OSError):
                worker.pipe.send_bytes(b"")
        end = time.monotonic() + 2.0
        for worker in self.workers if not kill else ():
            worker.process.join(max(0.0, end - time.monotonic()))
        self._end()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(kill=kind is not None)
