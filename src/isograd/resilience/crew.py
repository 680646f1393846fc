"""The launcher's side: processes that become the ranks of one world after another, while some of them die.

    attempt    a new world of `size` members runs a function: their values, or who died
    ask        members do something without a world

A member that dies by a signal (killed, out of memory, a crash) is a death, which the run may survive. An exception that
a rank raised by itself, or a rank that left with an exit code, ends the run as everywhere else: it would come again.

The launcher sees a death at once, because it waits for the process itself. The others see it as broken connections:
each of them closes its own (member.py), which ends the waits of the next ones. A member that has not answered `wait_s`
seconds after the first sign is killed, and has died, too.

Members meet in a directory of their own for each world: nothing of a world before can be mistaken for this one's. No
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

from isograd import scratch
from isograd.comm.launch import GRACE, UNKNOWN, dead_server, end_orphans, failure, pickled, start_method, stop_all
from isograd.comm.worker import Answer, Seat, main
from isograd.resilience.member import in_world
from isograd.resilience.progress import finished

LOOK_S = 1.0  # between two looks for ranks that are silent
NOTICE_S = 5.0  # the others may feel a death before the launcher is told of it, by a process that has to get its turn


@dataclass
class Member:
    """A process of the crew, and the pipe to it."""

    process: Any
    pipe: Connection

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        code: int | None = self.process.exitcode
        return code


@dataclass
class Attempt:
    """How a world's work ended."""

    values: list[Any] | None  # in rank order; None: somebody died
    dead: dict[int, int] = field(default_factory=dict)  # rank: exit code of its process
    late: list[int] = field(default_factory=list)  # of these, ranks that were killed because they did not answer
    silent: dict[int, str] = field(default_factory=dict)  # and those that the others waited for: what was known of each
    seen: float = 0.0  # when the launcher saw the first sign of it, in seconds since the epoch
    finished: int | None = None  # the most steps that a rank of it, dead or alive, says were done; None: not known
    server: int | None = None  # the process that starts ranks, when it was what died


class Crew:
    """Processes on this machine. Those beyond the size of a world wait, and take the place of one that dies."""

    def __init__(self, *, threads: int = 1, patience: float = 0.0, deaf: Iterable[int] = (), wait_s: float = 20.0,
                 interface: str | None = "lo", busy: Callable[[], bool] = lambda: False,
                 silent: Callable[[int, float], dict[int, str]] = lambda size, since: {},
                 preload: Iterable[str] = ()) -> None:  # fmt: skip
        """wait_s: how long after a death the others may take to notice, or longer while they are `busy`.

        silent: which ranks of a world of this size that began then the others wait for in vain; asked every second.
        They are killed, and have died.

        preload: modules that new processes need, so that they have them from the beginning. The rest is as in
        `launch.World`.
        """
        self.busy, self.silent = busy, silent
        self.threads, self.patience, self.deaf, self.wait_s = threads, patience, tuple(deaf), wait_s
        self.interface = interface
        self.members: list[Member] = []
        self.worlds = self.started = 0  # how many worlds, how many processes
        self._preload = tuple(preload)
        self._context, self._forked = start_method(self._preload)
        self._root = tempfile.mkdtemp(prefix="crew-", dir=scratch.home())
        self._watch, self._alive = self._context.Pipe(duplex=False)
        self._processes: list[Any] = []  # of the members, like the pipes
        self._pipes: list[Connection] = []
        self._end = weakref.finalize(self, stop_all, self._processes, self._pipes, self._root, self._alive)

    def fill(self, size: int) -> int:
        """Start members until there are `size`; how many were started."""
        missing = max(0, size - len(self.members))
        if missing and not self._forked:
            start_method(self._preload)  # a new server, if the one before has died
        for _ in range(missing):
            alive = self._alive.fileno() if self._forked else None
            seat = Seat(self.started, 1, self._root, self.threads, None, deaf=self.deaf, alive=alive)
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=main, args=(seat, theirs, self._watch, None))
            process.start()
            theirs.close()
            self.started += 1
            self._processes.append(process)
            self._pipes.append(ours)
            self.members.append(Member(process, ours))
        return missing

    def attempt(self, size: int, fn: Callable[..., Any], *args: Any) -> Attempt:
        """fn(*args) on a new world of the first `size` members. The dead leave the crew; the others keep their order.

        Raises as `World.run` does when a rank fails by itself.
        """
        shutil.rmtree(os.path.join(self._root, f"world-{self.worlds}"), ignore_errors=True)
        self.worlds += 1
        directory = os.path.join(self._root, f"world-{self.worlds}")
        os.mkdir(directory)
        ranks, began = self.members[:size], time.time()
        for rank, member in enumerate(ranks):
            seat = Seat(rank, size, directory, self.threads, self.interface, self.patience)
            with suppress(OSError):  # it has died: its exit code says so
                member.pipe.send_bytes(pickled(in_world, (seat, fn, args)))
        silent: dict[int, str] = {}

        def look() -> Iterable[int]:
            silent.update(self.silent(size, began))
            return silent

        answers, late, seen = self._collect(ranks, look)
        codes = [None if rank in answers else member.code for rank, member in enumerate(ranks)]
        done = finished(directory, size)
        if (server := dead_server(codes)) is not None:
            end_orphans(self._processes, self._pipes)
            self.bury()
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
        self.bury()
        return Attempt(None, dead, late, silent, seen, done)

    def ask(self, jobs: Mapping[int, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[int, Any]:
        """Each of these members does its job, in no world; the values of those that did not die of it."""
        asked = {number: self.members[number] for number in jobs}
        for number, member in asked.items():
            with suppress(OSError):
                member.pipe.send_bytes(pickled(*jobs[number]))
        answers, _, _ = self._collect(list(asked.values()))
        if any(not answer.ok for answer in answers.values()):
            raise failure(answers, [member.code for member in asked.values()])
        numbers = list(asked)
        return {numbers[i]: answer.value for i, answer in answers.items()}

    def bury(self) -> None:
        """Let those go that have died, with their pipes: a long run may have hundreds of deaths."""
        for member in [member for member in self.members if member.code is not None]:
            self.members.remove(member)
            self._processes.remove(member.process)
            self._pipes.remove(member.pipe)
            member.pipe.close()
            member.process.close()

    def _collect(
        self, ranks: list[Member], silent: Callable[[], Iterable[int]] = tuple
    ) -> tuple[dict[int, Answer], list[int], float]:
        """(answers, who was killed because it gave none, when something was wrong): until every rank has answered or
        ended. `silent`: which ranks to kill although nothing is known to be wrong."""
        answers: dict[int, Answer] = {}
        late: list[int] = []
        wrong: float | None = None  # since when something is
        seen = 0.0
        while waiting := [r for r in range(len(ranks)) if r not in answers and ranks[r].code is None]:
            sources: dict[Any, int] = {ranks[r].pipe: r for r in waiting}
            sources |= {ranks[r].process.sentinel: r for r in waiting}
            died = len(waiting) + len(answers) < len(ranks)
            end = None if wrong is None else wrong + (self.wait_s if died else NOTICE_S)
            if end is not None and time.monotonic() >= end and not self.busy():
                if not died:
                    break
                late += waiting
                for rank in waiting:
                    ranks[rank].process.kill()
            for rank in silent() if wrong is None else ():
                ranks[rank].process.kill()
            for source in wait(list(sources), LOOK_S if end is None else max(0.1, end - time.monotonic())):
                rank = sources[source]
                if rank not in answers and ranks[rank].pipe.poll():
                    with suppress(EOFError, OSError):  # a rank that dies closes its pipe
                        answers[rank] = ranks[rank].pipe.recv()
                if rank not in answers:
                    ranks[rank].process.join(GRACE)
                if wrong is None and not (rank in answers and answers[rank].ok):
                    wrong, seen = time.monotonic(), time.time()
        return answers, late, seen or time.time()  # a server of ranks that had died before has no moment of its own

    def close(self, kill: bool = False) -> None:
        """End all members; `kill`: without asking them first."""
        for member in self.members if not kill else ():
            with suppress(OSError):
                member.pipe.send_bytes(b"")
        end = time.monotonic() + 2.0
        for member in self.members if not kill else ():
            member.process.join(max(0.0, end - time.monotonic()))
        self._end()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.close(kill=kind is not None)
