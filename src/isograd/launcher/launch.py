"""Start local ranks and get their values back: `launch(fn, nproc, *args)`, or a `World` that stays up between calls.

    values = isograd.launch(train, 4, "dp2 tp2 sp zero1")     # in a script or a notebook

Ranks meet in a temporary directory and gloo binds to the loopback interface: no port is open to anyone else. When a
rank fails, the error begins with that rank's own traceback; the others, which only wait for it, are stopped.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from isograd.comm.device import Asked
from isograd.errors import IsogradError, LaunchError
from isograd.io import tempdir
from isograd.launcher.worker import GROUP, Answer, Seat, main, stack_file

LONGEST_HOME = 60  # characters: the name of a socket has at most 104, on some systems
GRACE = 1.0  # seconds to collect the errors of other ranks after the first
STOP = 2.0  # seconds between asking a rank to end and killing it
UNKNOWN = 255  # multiprocessing's exit code of a rank of which its server does not tell how it ended


def launch(
    fn: Callable[..., Any], nproc: int, *args: Any, timeout: float | None = None, threads: int = 1, device: Asked = None
) -> list[Any]:
    """Run fn(*args) on `nproc` new local ranks; return each rank's value, in rank order.

    device: "cpu" computes on the CPU on purpose; None: each rank on a card of its own, where the machine has any."""
    with World(nproc, threads=threads, device=device) as world:
        return world.run(fn, *args, timeout=timeout)


class World:
    """`nproc` ranks that are started once and reused by every `run`. After a failed run they are started anew."""

    def __init__(
        self, nproc: int, *, threads: int = 1, patience: float = 0.0,
        deaf: Iterable[int] = (), busy: Callable[[], bool] = lambda: False, device: Asked = None,
    ) -> None:  # fmt: skip
        """patience: seconds that a collective waits for a silent rank, when longer than usual.

        busy: after a failure, ranks that have not ended are not stopped while this is true: they finish something.

        deaf: of SIGTERM and SIGHUP, those that do nothing to a rank, because the caller takes them for all ranks.

        device: as in `launch`.
        """
        if nproc < 1:
            raise LaunchError("IG250", "a world needs at least one rank", seen=nproc, expected="nproc >= 1")
        self.nproc, self._threads, self._patience = nproc, threads, patience
        self._deaf, self._busy, self._device = tuple(deaf), busy, device
        self._ranks: _Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """fn(*args) on every rank; `timeout` in seconds ends a run that hangs and shows where each rank was."""
        job = None
        if self._ranks is None:
            # The first job goes along with the fork: a forked rank (notebook) inherits it and needs no pickle.
            self._ranks = _Ranks(self, (fn, args))
        else:
            job = pickled(fn, args)
        try:
            if job is not None:
                self._ranks.send(job)
            values, left = self._ranks.collect(timeout)
        except BaseException:
            self.close(kill=True)
            raise
        if left:
            self.close()
        return values

    @property
    def pids(self) -> list[int]:
        """The process ids of the running ranks."""
        return [p.pid or 0 for p in self._ranks.processes] if self._ranks else []

    def close(self, kill: bool = False) -> None:
        """End the ranks; `kill`: without asking them first."""
        if self._ranks is not None:
            self._ranks.stop(kill)
            self._ranks = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Ranks:
    """The processes of one incarnation of a World."""

    def __init__(self, world: World, first: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        context, forked = start_method()
        self._busy = world._busy
        self.directory = tempfile.mkdtemp(prefix="world-", dir=tempdir.home())
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        watch, self._alive = context.Pipe(duplex=False)
        job = first if forked else pickled(*first)
        ignored = [number for number in GROUP if signal.getsignal(number) == signal.SIG_IGN]  # as under nohup
        deaf = (*world._deaf, *ignored)
        self._end = weakref.finalize(self, stop_all, self.processes, self.pipes, self.directory, self._alive)
        for rank in range(world.nproc):
            alive = self._alive.fileno() if forked else None
            seat = Seat(rank, world.nproc, self.directory, world._threads, world._patience, deaf, world._device, alive)
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(seat, theirs, watch, job), name=f"isograd rank {rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        watch.close()

    def send(self, job: bytes) -> None:
        """Give every rank its next job; one that has ended since the last is named."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                if pipe.poll():  # nothing is awaited now, so the pipe has been closed: the rank has ended
                    process.join(STOP)
                    break
                pipe.send_bytes(job)
            except OSError:
                process.join(STOP)
        if self._dead({}):
            raise failure({}, [process.exitcode for process in self.processes], " between two runs")

    def collect(self, timeout: float | None) -> tuple[list[Any], bool]:
        """The values of all ranks; and whether one has left its world."""
        end = None if timeout is None else time.monotonic() + timeout
        answers: dict[int, Answer] = {}
        while len(answers) < len(self.pipes):
            left = None if end is None else max(0.0, end - time.monotonic())
            news = self._listen(answers, left)
            if any(not answer.ok for answer in answers.values()) or self._dead(answers):
                self._listen_until(answers, time.monotonic() + GRACE)
                while self._silent(answers) and self._busy():
                    self._listen_until(answers, time.monotonic() + GRACE)
                raise failure(answers, [process.exitcode for process in self.processes])
            if not news and end is not None and time.monotonic() >= end:
                raise self._hang(answers, timeout)
        left = any(answer.has_left for answer in answers.values())
        return [answers[rank].value for rank in range(len(self.pipes))], left

    def _listen(self, answers: dict[int, Answer], timeout: float | None) -> bool:
        """Take in what arrives; True when something did (an answer or a death)."""
        open_ranks = [r for r in range(len(self.pipes)) if r not in answers]
        sources: dict[Any, int] = {self.pipes[r]: r for r in open_ranks}
        sources |= {self.processes[r].sentinel: r for r in open_ranks}
        ready = wait(list(sources), timeout)
        for source in ready:
            rank = sources[source]
            if rank in answers or not self.pipes[rank].poll():
                continue
            try:
                answers[rank] = self.pipes[rank].recv()
            except (EOFError, OSError):  # a rank that died closes its pipe; its exit code speaks for it
                self.processes[rank].join(STOP)
        return bool(ready)

    def _listen_until(self, answers: dict[int, Answer], end: float) -> None:
        while self._silent(answers) and time.monotonic() < end:
            known = len(answers)
            self._listen(answers, max(0.0, end - time.monotonic()))
            if len(answers) == known:
                time.sleep(0.02)  # the sentinel of a rank that has ended is always ready

    def _dead(self, answers: dict[int, Answer]) -> list[int]:
        return [r for r, p in enumerate(self.processes) if r not in answers and p.exitcode is not None]

    def _silent(self, answers: dict[int, Answer]) -> list[int]:
        """The ranks that have neither answered nor ended."""
        dead = self._dead(answers)
        return [rank for rank in range(len(self.pipes)) if rank not in answers and rank not in dead]

    def _hang(self, answers: dict[int, Answer], timeout: float | None) -> LaunchError:
        silent = [r for r in range(len(self.pipes)) if r not in answers]
        for rank in silent:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        said = {rank: Path(stack_file(self.directory, rank)).read_text()[: 1 << 16].rstrip() for rank in silent}
        stacks = "\n\n".join(f"rank {rank}:\n{stack}" for rank, stack in said.items())
        return LaunchError("IG254", where=stacks, timeout=timeout, silent=silent, finished=sorted(answers))

    def stop(self, kill: bool) -> None:
        if not kill:
            for pipe, process in zip(self.pipes, self.processes, strict=True):
                try:
                    pipe.send_bytes(b"")
                except OSError:
                    process.kill()
            end = time.monotonic() + STOP
            for process in self.processes:
                process.join(max(0.0, end - time.monotonic()))
        self._end()


def failure(answers: dict[int, Answer], exitcodes: Sequence[int | None], when: str = "") -> LaunchError:
    """The root cause first: a rank that was killed, else the earliest exception; the rest in a line each.

    When a rank raises one of isograd's errors and leaves, gloo aborts ranks that wait for it: those come last.
    """
    dead = [r for r, code in enumerate(exitcodes) if r not in answers and code is not None]
    if (server := dead_server([exitcodes[rank] for rank in dead])) is not None:
        return LaunchError(
            "IG252", f"the server that starts ranks has died{when}: its process {server} is gone",
            seen=f"nothing is known of {len(dead)} ranks, which are ended", expected="a server that outlives its ranks",
            fix="it was killed by someone, or by the kernel for want of memory",
        )  # fmt: skip
    failed = sorted((r for r, a in answers.items() if not a.ok), key=lambda r: answers[r].when)
    told = any(answers[r].error for r in failed)
    aborted = [r for r in dead if told and exitcodes[r] == -signal.SIGABRT]
    order = [r for r in dead if r not in aborted] + failed + aborted
    first = order[0]
    others = [f"rank {r}: {_headline(answers.get(r), exitcodes[r])}" for r in order[1:]]
    waiting = [r for r in range(len(exitcodes)) if r not in answers and r not in dead]
    where = f"rank {first} of {len(exitcodes)}"
    consequences = "; ".join(others) if others else None
    if first in dead:
        return LaunchError(
            "IG252",
            f"rank {first} ended{when}: {exit_words(exitcodes[first])}",
            seen=consequences,
            expected="every rank to return a value or raise",
            fix=_exit_advice(exitcodes[first]),
            where=where,
        )
    return _RankError(
        "IG253",
        f"{str(answers[first].payload).rstrip()}\n\nrank {first} of {len(exitcodes)} raised the above first",
        seen=consequences,
        fix=f"ranks {waiting} waited for it and were stopped" if waiting else None,
        where=where,
        cause=answers[first].error,
    )


class _RankError(LaunchError):
    """A rank's exception. Its traceback is the first thing printed."""

    def __init__(self, *texts: str, cause: IsogradError | None = None, **fields: Any) -> None:
        super().__init__(*texts, **fields)
        self.cause = cause

    def __str__(self) -> str:
        head, _, rest = super().__str__().partition("\n\nrank ")
        return f"\n{head.removeprefix(self.code + ': ')}\n\n{self.code}: rank {rest}"


def stop_all(processes: list[Any], pipes: list[Connection], directory: str, alive: Connection) -> None:
    """End whatever still runs: ask, then kill; leave no zombie and no directory."""
    if dead_server([process.exitcode for process in processes]) is not None:
        end_orphans(processes, pipes)
    for process in processes:
        if process.is_alive():
            process.terminate()
    end = time.monotonic() + STOP
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(10 * STOP)
        if process.is_alive():
            leave_behind(process)
    for pipe in pipes:
        pipe.close()
    alive.close()
    shutil.rmtree(directory, ignore_errors=True)


def leave_behind(process: Any) -> None:
    """Of a process that was killed and does not end, as it waits for a disk: this one's end does not wait for it."""
    mp.process._children.discard(process)  # type: ignore[attr-defined]


def start_method(preload: Iterable[str] = ()) -> tuple[Any, bool]:
    """(multiprocessing context, whether ranks are forked from this very process). `preload`: modules that ranks have
    from the beginning, if the fork server has not been started before.

    A fork server that has torch loaded makes ranks in milliseconds from a clean process. A notebook's functions live in
    a __main__ that no other process can import; there, ranks are forked from the notebook itself.
    """
    main_module = sys.modules["__main__"]
    has_file = os.path.exists(getattr(main_module, "__file__", None) or "")
    if not has_file and getattr(main_module, "__spec__", None) is None:
        return mp.get_context("fork"), True
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["isograd.launcher.worker", *preload])
    _start_server()
    return context, False


def _start_server() -> None:
    """Start the fork server with the signals of a group blocked: if it ended before its parent, the parent would not
    learn how the ranks ended. The parent receives its own when they are unblocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)
    try:
        resource_tracker.ensure_running()  # which unblocks two of them
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)
        # It makes its folder of sockets here, once: a launcher that is killed leaves none elsewhere.
        others, home = tempfile.tempdir, tempdir.home()
        tempfile.tempdir = home if len(home) <= LONGEST_HOME else others
        try:
            forkserver.ensure_running()
        finally:
            tempfile.tempdir = others
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def dead_server(exitcodes: Iterable[int | None]) -> int | None:
    """The process of the fork server, when that is what died: of all its ranks nothing more is known then, though they
    live on, and these are the exit codes that multiprocessing makes up."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None or UNKNOWN not in exitcodes or not hasattr(os, "waitid"):
        return None
    end = time.monotonic() + GRACE  # a process closes its pipes a moment before it has ended
    with suppress(ChildProcessError):
        while os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)
        return int(server)
    return None


def end_orphans(processes: Iterable[Any], pipes: Iterable[Connection]) -> None:
    """Kill the ranks of a server that has died, and wait until each has closed its pipe: it has ended then."""
    for process in processes:
        with suppress(ProcessLookupError):
            if process.exitcode == UNKNOWN:
                os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 10 * STOP
    for pipe in pipes:
        with suppress(EOFError, OSError):
            while pipe.poll(max(0.0, end - time.monotonic())):
                pipe.recv_bytes()


def _end_server() -> None:
    """Left alone, the fork server takes a second or two to notice that its parent has ended."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(OSError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


# Once multiprocessing has joined all children, and before it removes its temporary folder (-100).
Finalize(None, _end_server, exitpriority=-50)


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A job as it is sent to a rank."""
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise LaunchError("IG251", seen=f"{error}") from error


def _headline(answer: Answer | None, exitcode: int | None) -> str:
    if answer is None:
        return exit_words(exitcode)
    lines = str(answer.payload).strip().splitlines()
    return next(line for line in reversed(lines) if not line[:1].isspace())


def exit_words(exitcode: int | None) -> str:
    """How a process ended."""
    if exitcode is not None and exitcode < 0:
        return f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    return f"exit code {exitcode} without an answer"


def _exit_advice(exitcode: int | None) -> str | None:
    if exitcode == -signal.SIGKILL:
        return "-9 is what the kernel sends when memory runs out: out of memory is likely"
    if exitcode == -signal.SIGABRT:
        return "gloo aborts a rank when others leave an exchange: see what the others raised"
    if exitcode == -signal.SIGSEGV:
        return "a crash in compiled code: run with PYTHONFAULTHANDLER=1 to see the Python line"
    return "the rank left through os._exit or sys.exit; return from the function instead"
