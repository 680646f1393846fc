"""Local ranks for the corpus: processes that are started once, meet in a folder, and run one function after another."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from isograd_verify.errors import VerifyError
from isograd_verify.io import tempdir

GRACE = 1.0  # seconds for the errors of other ranks after the first
STOP = 2.0  # seconds between asking a rank to end and killing it
PATIENCE = 120.0  # seconds for one function, unless said otherwise


class LocalRanks:
    """`nproc` processes on the CPU, in one gloo group where they are several. After a failure they are started anew."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._home = ""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
        """fn(*args) on every rank; the values in rank order. After `timeout` seconds each rank prints its stack."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((fn, args, timeout))
            return self._collect(timeout)
        except BaseException:
            self.close(STOP / 10)
            raise

    def close(self, patience: float = STOP) -> None:
        """End the ranks, and remove the folder in which they met."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(10 * STOP)
        shutil.rmtree(self._home, ignore_errors=True)
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])
        self._home = tempfile.mkdtemp(prefix="ranks-", dir=tempdir.home())
        for rank in range(self.nproc):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, self.nproc, self._home, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any, float]] = {}
        end, failed = time.monotonic() + timeout + GRACE, False
        silent = dict(zip(self._pipes, range(self.nproc), strict=True))
        while silent and time.monotonic() < end:
            ready = wait([*silent], 0.2)
            for pipe in [pipe for pipe in silent if pipe in ready]:
                rank = silent.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(STOP)
                    code = self._processes[rank].exitcode
                    answers[rank] = (False, f"the process ended with exit code {code}", time.monotonic())
            if not failed and any(not good for good, *_ in answers.values()):
                failed, end = True, min(end, time.monotonic() + GRACE)
        wrong = sorted((when, rank, text) for rank, (good, text, when) in answers.items() if not good)
        if wrong:
            _, rank, text = wrong[0]
            raise VerifyError("IG742", text.rstrip(), seen=f"rank {rank} of {self.nproc} failed first")
        if len(answers) < self.nproc:
            raise VerifyError(
                "IG743", f"no answer within {timeout:g} s", seen=f"answers of ranks {sorted(answers)}",
                expected="one of each rank; the stacks of the others are above",
                fix="look for a collective that only some ranks call",
            )  # fmt: skip
        return [answers[rank][1] for rank in range(self.nproc)]


def _live(rank: int, nproc: int, home: str, pipe: Connection) -> None:
    """The life of one rank: join the group, then do what arrives until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    if nproc > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(os.path.join(home, "store"), nproc)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nproc)
    parent = threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True)
    parent.start()
    while True:
        try:
            try:
                fn, args, timeout = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # gloo's threads abort an interpreter that unwinds under them
            faulthandler.dump_traceback_later(timeout)
            pipe.send((True, fn(*args), time.monotonic()))
        except BaseException:  # also where what was sent, or is to be sent, cannot be read
            pipe.send((False, traceback.format_exc(), time.monotonic()))
        faulthandler.cancel_dump_traceback_later()


def _end_with_parent(server: int) -> None:
    """The server of these processes ends with the process that started it, however that ends."""
    while os.getppid() == server:
        time.sleep(1.0)
    os._exit(1)
